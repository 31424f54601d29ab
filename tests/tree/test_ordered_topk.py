# SPDX-License-Identifier: Apache-2.0
"""ordered_topk follows (-value, index) exactly, whatever ties there are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tree.tree_oracle import first_entries
from treespark.tree import ordered_topk

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def _expected(z, k):
    rows = z.double().reshape(-1, z.shape[-1]).tolist()
    k = min(k, z.shape[-1])
    return torch.tensor([first_entries(row, k) for row in rows]).reshape(*z.shape[:-1], k)


def _assert_ordered(z, k):
    values, indices = ordered_topk(z, k)
    assert indices.dtype == torch.int64
    assert values.dtype == z.dtype
    assert torch.equal(indices, _expected(z, k))
    assert torch.equal(values, z.gather(-1, indices))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 900),
    k=st.integers(1, 7),
    num_values=st.integers(1, 6),
    dtype=st.sampled_from(FLOATS),
)
def test_tied_values_come_in_index_order(seed, size, k, num_values, dtype):
    generator = torch.Generator().manual_seed(seed)
    choices = torch.tensor([0.0, -0.0, 1.5, -torch.inf, torch.inf, -2.0], dtype=dtype)
    z = choices[torch.randint(num_values, (2, 3, size), generator=generator)]
    _assert_ordered(z, k)


@pytest.mark.parametrize("size", [128, 511, 512, 513, 640, 1000, 4096])
@pytest.mark.parametrize("dtype", FLOATS)
def test_random_values_are_ordered_across_chunks(size, dtype):
    z = torch.randn(5, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    _assert_ordered(z, 4)


@pytest.mark.parametrize("fill", [0.0, -0.0, -torch.inf, torch.finfo(torch.float32).min])
def test_constant_rows_give_the_lowest_indices(fill):
    values, indices = ordered_topk(torch.full((3, 1031), fill), 4)
    assert indices.tolist() == [[0, 1, 2, 3]] * 3
    assert (values == fill).all()


def test_boundary_tie_between_far_chunks_takes_the_lower_index():
    z = torch.zeros(1, 2048)
    z[0, [2000, 1500, 130, 129]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    assert ordered_topk(z, 3).indices.tolist() == [[2000, 129, 130]]


def test_lowest_finite_value_comes_before_minus_infinity():
    z = torch.full((1, 900), -torch.inf)
    z[0, 850] = torch.finfo(torch.float32).min
    assert ordered_topk(z, 3).indices.tolist() == [[850, 0, 1]]


@pytest.mark.parametrize("size", [5, 700])
def test_low_precision_orders_as_its_exact_upcast(size):
    z = torch.randn(4, size, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(ordered_topk(z, 4).indices, ordered_topk(z.float(), 4).indices)


@pytest.mark.parametrize("k", [3, 4, 9])
def test_k_above_the_row_length_returns_the_whole_row_in_order(k):
    z = torch.tensor([[0.0, 1.0, 0.0]])
    assert ordered_topk(z, k).indices.tolist() == [[1, 0, 2]]


def test_whole_long_row_in_order():
    z = torch.randint(3, (2, 700), generator=torch.Generator().manual_seed(2)).float()
    _assert_ordered(z, 700)


def test_zero_entries_and_empty_batches_keep_their_shape():
    assert ordered_topk(torch.zeros(2, 5), 0).indices.shape == (2, 0)
    for size in (5, 1031):
        values, indices = ordered_topk(torch.zeros(0, 3, size), 4)
        assert values.shape == indices.shape == (0, 3, 4)


def test_strided_input_gives_the_same_answer():
    z = torch.randint(4, (1024, 6), generator=torch.Generator().manual_seed(3)).float().T
    assert not z.is_contiguous()
    _assert_ordered(z, 4)


def test_input_is_not_changed():
    z = torch.randn(2, 1031, generator=torch.Generator().manual_seed(4))
    before = z.clone()
    ordered_topk(z, 4)
    assert torch.equal(z, before)


@pytest.mark.parametrize("size", [9, 1031])
@pytest.mark.parametrize("num_nan", [1, 3, 9])
def test_rows_with_nan_yield_distinct_indices_in_range(size, num_nan):
    z = torch.randn(3, size, generator=torch.Generator().manual_seed(5))
    z[1, :num_nan] = torch.nan
    indices = ordered_topk(z, 4).indices
    assert all(len(set(row)) == 4 and 0 <= min(row) <= max(row) < size for row in indices.tolist())
    assert torch.equal(indices[[0, 2]], _expected(z[[0, 2]], 4))
