# SPDX-License-Identifier: Apache-2.0
"""Text of a growing answer: whole characters only, cut at the first stop string."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

# What the decoder prints for bytes that are no complete character (yet).
REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one request, grown token by token.

    `text` never ends in half a character and never contains a stop string. Special tokens print
    nothing. Without a tokenizer the text stays empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = ()) -> None:
        """Start with no text; `stops` are the strings that end it."""
        self.text = ""
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._longest_stop = max(map(len, self._stops), default=0)
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ends: list[int] = []

    def push(self, token: int) -> str | None:
        """Append one token; return the stop string it completed, having cut the text before it."""
        if self._tokenizer is None:
            return None
        piece = self._decoder.step(self._tokenizer, token)
        stop = self._grow(piece) if piece else None
        self._ends.append(len(self.text))
        return stop

    def flush(self, token_ids: Sequence[int]) -> str | None:
        """Append whatever whole characters the decoder still holds back; returns as `push`.

        token_ids: all tokens pushed so far. An unfinished character at the end is dropped.
        """
        if self._tokenizer is None:
            return None
        whole = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        stop = self._grow(whole[len(self.text) :].rstrip(REPLACEMENT))
        if self._ends:
            self._ends[-1] = len(self.text)
        return stop

    def num_tokens(self) -> int:
        """Fewest leading tokens whose text covers `text`."""
        return bisect_left(self._ends, len(self.text)) + 1 if self.text else 0

    def settled(self) -> tuple[str, int | None]:
        """Text that no later token can take back, and the tokens that cover it (None = all).

        Only a stop string can take text back, at most its length less one character.
        """
        if self._longest_stop < 2:
            return self.text, None
        size = max(len(self.text) - self._longest_stop + 1, 0)
        return self.text[:size], bisect_left(self._ends, size) + 1 if size else 0

    def _grow(self, piece: str) -> str | None:
        window = max(len(self.text) - self._longest_stop + 1, 0)
        self.text += piece
        found = [(self.text.find(stop, window), i) for i, stop in enumerate(self._stops)]
        start, which = min(((at, i) for at, i in found if at >= 0), default=(-1, -1))
        if start < 0:
            return None
        self.text = self.text[:start]
        return self._stops[which]
