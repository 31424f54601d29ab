# SPDX-License-Identifier: Apache-2.0
"""Overlap of prompts: what a word is, the one-way share, and near duplicates by brute force."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treespark.data.overlap import TrigramIndex, near_duplicates, trigrams, words


def test_words_are_lower_case_runs_or_single_cjk_characters():
    assert words("Don't \uff21dd x_1\u4f60\u597d, \u00c9t\u00e9!") == [
        *("don", "t", "add", "x_1", "\u4f60", "\u597d", "\u00e9t\u00e9"),
    ]
    assert trigrams("one two") == set()
    assert trigrams("a b c a b c") == {("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b")}


@pytest.mark.parametrize(("share", "refused"), [(0.10, True), (0.25, True), (0.26, False)])
def test_share_is_of_the_evaluation_prompt_and_reached_is_refused(share, refused):
    # 8 trigrams, of which a long prompt holds 2, itself of 104.
    index = TrigramIndex(["", "two words", "a b c d e f g h i j"], share)
    assert index.refuses("A, b; c D! " + "other words " * 50) is refused
    assert not index.refuses("two words")


def test_share_is_reached_by_exactly_a_tenth():
    # 30 trigrams: three reach the share, and two do not.
    text = " ".join(f"w{i}" for i in range(32))
    assert TrigramIndex([text], 0.1).refuses("w0 w1 w2 w3 w4")
    assert not TrigramIndex([text], 0.1).refuses("w0 w1 w2 w3")


def brute_force(texts):
    sets = [trigrams(text) for text in texts]
    return [
        (i, j)
        for i, j in combinations(range(len(sets)), 2)
        if sets[i] and sets[j] and 5 * len(sets[i] & sets[j]) >= 4 * len(sets[i] | sets[j])
    ]


# Few words and long repeats, so that many of the sets are alike.
LINES = st.lists(st.sampled_from("abc"), max_size=9).map(lambda line: " ".join(line * 2))


@given(st.lists(LINES, max_size=12))
def test_near_duplicates_are_those_of_comparing_all_pairs(texts):
    assert near_duplicates(texts) == brute_force(texts)


def test_jaccard_of_exactly_four_fifths_is_near_and_less_is_not():
    # 10, 8 and 11 trigrams: 8 of 10, 10 of 11, 8 of 11.
    long = [f"w{i}" for i in range(13)]
    assert near_duplicates([" ".join(long[:num]) for num in (12, 10, 13)]) == [(0, 1), (0, 2)]
