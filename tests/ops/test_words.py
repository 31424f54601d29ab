# SPDX-License-Identifier: Apache-2.0
"""Mask words: layout, round trip, and that the operators' tests see unwritten memory."""

import pytest
import torch

from npu_ops import mask_from_words, num_words, words_from_mask


def test_unwritten_memory_is_poisoned():
    assert torch.empty(3).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()


@pytest.mark.parametrize(("columns", "words"), [(1, 2), (33, 2), (64, 2), (65, 4), (128, 4)])
def test_a_row_is_whole_words_of_64_bits(columns, words):
    assert num_words(columns) == words
    assert words_from_mask(torch.ones(2, columns, dtype=torch.bool)).shape == (2, words)


def test_bit_of_node_j_is_bit_j_of_the_little_endian_row():
    mask = torch.zeros(5, 40, dtype=torch.bool)
    mask[0, 0] = mask[1, 31] = mask[2, 32] = True
    mask[3, [1, 2, 39]] = True
    words = words_from_mask(mask)
    assert words.dtype == torch.int32
    assert words.tolist() == [[1, 0], [-(2**31), 0], [0, 1], [6, 1 << 7], [0, 0]]


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 64, 65, 100, 128])
def test_words_give_back_the_mask(columns):
    torch.manual_seed(columns)
    mask = torch.rand(3, 7, columns) < 0.5
    assert torch.equal(mask_from_words(words_from_mask(mask), columns), mask)
