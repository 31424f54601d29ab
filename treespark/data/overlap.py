# SPDX-License-Identifier: Apache-2.0
"""Overlap of prompts by word trigrams: with evaluation prompts, and among themselves. Both exact.

A word is a run of letters, digits and underscores in lower case after NFKC, or one CJK character,
as those scripts write no spaces. A prompt of fewer than three words has no trigram.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

_CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(f"[{_CJK}]|[^\\W{_CJK}]+")

# Jaccard index from which two prompts are near duplicates, as a fraction: 4 / 5.
NEAR = (4, 5)


def words(text: str) -> list[str]:
    """Return the words of a text in order."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def trigrams(text: str) -> set[tuple[str, str, str]]:
    """Return the different runs of three words of a text."""
    found = words(text)
    return set(zip(found, found[1:], found[2:], strict=False))


class TrigramIndex:
    """Tells whether a prompt holds too large a part of any evaluation prompt.

    The share is one-way: trigrams of the evaluation prompt that the other holds too, over all
    trigrams of the evaluation prompt. So a long training prompt that quotes a short evaluation
    prompt is found.
    """

    def __init__(self, texts: Iterable[str], share: float) -> None:
        """texts: the evaluation prompts. share: the part from which on a prompt is refused."""
        self._holders: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        self._needed: list[float] = []
        for number, text in enumerate(texts):
            found = trigrams(text)
            self._needed.append(share * len(found))
            for trigram in found:
                self._holders[trigram].append(number)

    def refuses(self, text: str) -> bool:
        """Return whether the share of some evaluation prompt is reached."""
        hits = Counter(n for t in trigrams(text) if t in self._holders for n in self._holders[t])
        # 1e-9: 0.1 * 30 is a little above 3 in binary.
        return any(num >= self._needed[n] - 1e-9 for n, num in hits.items())


def near_duplicates(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return all pairs (i, j), i < j, sorted, whose trigram sets have a Jaccard index >= 4 / 5.

    Exact, without comparing all pairs: two sets that similar share one of their rarest trigrams
    (prefix filter; Bayardo et al., Scaling Up All Pairs Similarity Search, 2007), so only prompts
    that an inverted index over those brings together are compared.
    """
    over, under = NEAR
    ranks, is_single = _ranked_trigrams(texts)
    holders: dict[int, list[int]] = defaultdict(list)
    pairs = []
    # Shorter ones first: the other of a pair then has at most as many trigrams.
    for i in sorted(range(len(ranks)), key=lambda n: (len(ranks[n]), n)):
        size = len(ranks[i])
        # None of a prompt without trigrams; a trigram that occurs once brings nothing together.
        first = ranks[i][: size - -(-over * size // under) + 1]
        prefix = first[~is_single[first]].tolist()
        candidates = {j for rank in prefix for j in holders[rank]}
        for j in candidates:
            if under * len(ranks[j]) < over * size:
                continue
            common = len(np.intersect1d(ranks[i], ranks[j], assume_unique=True))
            if under * common >= over * (size + len(ranks[j]) - common):
                pairs.append((min(i, j), max(i, j)))
        for rank in prefix:
            holders[rank].append(i)
    return sorted(pairs)


def _ranked_trigrams(texts: Sequence[str]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return each text's different trigrams as ranks, rarest first, and which ranks occur once."""
    numbers: dict[str, int] = {}
    rows = [[numbers.setdefault(word, len(numbers)) for word in words(text)] for text in texts]
    flat = np.fromiter((n for row in rows for n in row), np.int64)
    if len(flat) < 3:
        return [flat[:0] for _ in rows], np.zeros(0, bool)
    # Two steps, so that 32 bits hold each number and no trigrams are mistaken for each other.
    _, pair = np.unique(flat[:-1] << 32 | flat[1:], return_inverse=True)
    _, triple, counts = np.unique(
        pair[:-1].astype(np.int64) << 32 | flat[2:], return_inverse=True, return_counts=True
    )
    order = np.argsort(counts, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    ranked = rank[triple]
    ends = np.cumsum([0, *map(len, rows)])
    return (
        [np.unique(ranked[a : max(a, b - 2)]) for a, b in pairwise(ends.tolist())],
        counts[order] == 1,
    )
