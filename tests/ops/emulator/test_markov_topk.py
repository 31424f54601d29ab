# SPDX-License-Identifier: Apache-2.0
"""markov_topk's kernels, emulated, against a stable sort of the whole logits.

Operands are whole numbers or halves of them, so every product and sum is exact in any order and the
many ties are exact too: values and tokens are compared exactly. The log-sum-exp goes through Exp
and Ln, which the emulator takes from the C library: 1e-5 covers the order of the sums.
"""

import math

import pytest
import torch

import npu_ops  # noqa: F401  (defines the operators)
from npu_ops.emulator import operators
from npu_ops.emulator.dispatch import emulated
from tests.ops.emulator.markov_topk_world import BF16, F16, F32, expected, operands


def check(arguments, k, *options, **launch):
    results, counters = operators.markov_topk(*arguments, k, *options, **launch)
    values, indices, lse = expected(*arguments, k, *options)
    torch.testing.assert_close(results[0], values, rtol=0, atol=0)
    assert torch.equal(results[1], indices)
    torch.testing.assert_close(results[2], lse, rtol=1e-5, atol=1e-5)
    assert not any(counters["unwritten_bytes"][name] for name in ("values", "indices", "lse"))
    return counters


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 3, 20, 24])
def test_same_at_every_core_count(blocks, strict):
    check(operands(blocks, 12, 3, 1000, 32), 8, blocks=blocks, strict=strict)


@pytest.mark.parametrize(
    ("rows", "vocab", "rank", "k"),
    [
        (1, 1, 16, 1),
        (1, 17, 64, 4),
        (12, 255, 256, 32),
        (48, 1000, 256, 4),
        (5, 513, 272, 8),
        (70, 600, 32, 4),
        (130, 300, 512, 4),
        (3, 3000, 512, 32),
    ],
)
def test_sizes_across_every_tile_shape(rows, vocab, rank, k):
    check(operands(vocab, rows, (rows + 3) // 4, vocab, rank), k, blocks=3)


@pytest.mark.parametrize("latent_dtype", [BF16, F16])
@pytest.mark.parametrize("base_dtype", [BF16, F16, F32])
def test_every_dtype(base_dtype, latent_dtype):
    check(operands(1, 6, 6, 400, 32, base_dtype, latent_dtype), 8, blocks=2)


def test_temperature_and_padded_vocabulary():
    arguments = operands(2, 8, 2, 700, 32)
    arguments[0][:, 650:] = 1e4
    check(arguments, 8, 0.5, 650, blocks=3)


def test_equal_logits_come_in_token_order():
    base, base_row, latent, w2 = operands(3, 4, 1, 900, 16)
    arguments = (torch.zeros_like(base), base_row, torch.zeros_like(latent), w2)
    results, _ = operators.markov_topk(*arguments, 32, blocks=4)
    assert results[1].tolist() == [list(range(32))] * 4


def test_nan_and_minus_infinity_rank_last_in_token_order():
    arguments = operands(4, 4, 4, 300, 16)
    arguments[0][0] = math.nan
    arguments[0][1, :] = -math.inf
    arguments[0][1, 200] = 1
    arguments[0][2, ::2] = math.nan
    check(arguments, 16, blocks=2)


@pytest.mark.parametrize("blocks", [1, 3])
def test_infinite_logits_come_first_and_make_lse_infinite(blocks):
    arguments = operands(8, 5, 5, 900, 16, F32)
    # once in the first tile, in the last of several blocks, everywhere, beside NaN and -inf
    arguments[0][0, 7] = arguments[0][1, 880] = math.inf
    arguments[0][2] = math.inf
    arguments[0][3, ::3], arguments[0][3, 1::3], arguments[0][3, 5] = math.nan, -math.inf, math.inf
    check(arguments, 8, blocks=blocks)
    assert operators.markov_topk(*arguments, 8, blocks=blocks).results[2].isinf().tolist() == [
        True, True, True, True, False,
    ]  # fmt: skip


def test_the_largest_float_is_no_infinity():
    base, base_row, latent, w2 = operands(9, 2, 1, 300, 16, F32)
    base[0, 40] = torch.finfo(F32).max
    check((base, base_row, torch.zeros_like(latent), w2), 4, blocks=2)


def test_the_parent_overload_runs_the_kernel_on_gathered_rows():
    base, base_row, _, w2 = operands(10, 6, 2, 500, 32)
    w1 = operands(11, 500, 1, 500, 32)[3]
    parents = torch.tensor([499, 0, 7, 7, 123, 250], dtype=torch.int32)
    with emulated(blocks=2) as calls:
        found = torch.ops.treespark.markov_topk.parent(base, base_row, w1, parents, w2, 4)
    assert calls["markov_topk"] == 1
    values, indices, lse = expected(base, base_row, w1[parents.long()], w2, 4)
    torch.testing.assert_close(found[0], values, rtol=0, atol=0)
    assert torch.equal(found[1], indices)
    torch.testing.assert_close(found[2], lse, rtol=1e-5, atol=1e-5)


def test_rows_of_the_base_are_shared_in_any_order():
    arguments = list(operands(5, 9, 3, 400, 16))
    arguments[1] = torch.tensor([2, 2, 0, 1, 1, 1, 0, 2, 0], dtype=torch.int32)
    check(arguments, 4, blocks=2)


@pytest.mark.slow
def test_traffic_at_the_papers_size_is_near_the_lower_bound():
    arguments = operands(6, 48, 12, 151936, 256)
    counters = check(arguments, 4, blocks=24)
    read = counters["read_bytes"]
    moved = sum(read[name] for name in ("base_logits", "base_row", "latent", "w2"))
    bound = 151936 * 256 * 2 + 12 * 151936 * 2
    assert bound <= moved < 1.1 * bound
    # The ring stays in L2 and is counted apart: every product once in and once out.
    assert read["ring"] == counters["written_bytes"]["ring"] == 48 * 151936 * 4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": 33}, "markov_topk: k must be in 1..32, got 33"),
        ({"rank": 24}, "r must be a multiple of 16"),
        ({"rank": 528}, "markov_topk: r must be in 16..512, got 528"),
        ({"rows": 4097}, "markov_topk: R must be in 1..4096, got 4097"),
    ],
)
def test_host_refuses_sizes_before_any_launch(change, text):
    sizes = {"rows": 2, "rank": 16, "k": 4} | change
    arguments = operands(7, sizes["rows"], 1, 40, sizes["rank"])
    with pytest.raises(RuntimeError, match=text):
        operators.markov_topk(*arguments, sizes["k"])


def test_kernels_compile_without_warnings():
    assert operators.markov_topk_library().warnings == ""
