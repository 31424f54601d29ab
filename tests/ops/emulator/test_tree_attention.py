# SPDX-License-Identifier: Apache-2.0
"""tree_attention's kernels, emulated, against attention over exactly the rows a node sees.

Tolerance: weights are rounded to the query's type before they meet the values, as on the device,
and the result is rounded once more: 8 (bfloat16) or 11 (half) bits of values of at most 4.
"""

import pytest
import torch

from npu_ops.emulator import operators
from tests.ops.emulator.tree_attention_world import TOLERANCE, expected, operands, paged, words_of


def check(arguments, scale=0.0, block_size=0, **launch):
    query, key, value, seq_lens, mask = arguments
    words, table = words_of(mask), None
    kept = (key, value)
    if block_size:
        (key, table), (value, _) = paged(key, block_size), paged(value, block_size)
    results, counters = operators.tree_attention(
        query, key, value, seq_lens, words, table, scale, block_size, **launch
    )
    out, lse = expected(query, *kept, seq_lens, mask, scale)
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close(results[0].float(), out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(results[1], lse, rtol=1e-4, atol=1e-4)
    assert not any(counters["unwritten_bytes"][name] for name in ("out", "lse"))
    return counters


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 3, 20, 24])
def test_same_at_every_core_count(blocks, strict):
    arguments = operands(blocks, [200, 0, 129], 9, 8, 2, 64)
    check(arguments, blocks=blocks, strict=strict)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("prefix", [0, 1, 127, 512, 513])
def test_prefixes_around_the_tile(prefix, dim, dtype):
    check(operands(prefix, [prefix], 33, 4, 2, dim, dtype), blocks=2)


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads"), [(1, 1, 1), (1, 8, 2), (8, 6, 2), (64, 4, 1), (128, 3, 3)]
)
def test_row_counts_and_groups(rows, heads, kv_heads):
    check(operands(rows, [70, 130], rows, heads, kv_heads, 64), blocks=3)


@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_paged_cache_gives_the_same(block_size):
    check(operands(1, [300, 17], 12, 4, 2, 64), block_size=block_size, blocks=3)


def test_splits_of_a_long_prefix_are_combined():
    arguments = operands(2, [2100, 40], 5, 4, 1, 64)
    counters = check(arguments, blocks=16)
    assert counters["written_bytes"]["lses"] == 2 * 5 * 4 * 4 * 4


def test_scale_and_padded_rows():
    # The cache ends behind the last row that sees anything.
    arguments = operands(3, [50, 20], 16, 4, 2, 64, valid=[7, 0])
    arguments[1], arguments[2] = arguments[1][:, :57], arguments[2][:, :57]
    check(arguments, scale=0.3, blocks=2)


def test_what_a_row_does_not_see_has_no_influence():
    query, key, value, seq_lens, mask = operands(4, [60], 10, 2, 1, 64)
    words = words_of(mask)
    before, _ = operators.tree_attention(query, key, value, seq_lens, words, blocks=1)
    row = 4
    hidden = 60 + (~mask[0, row]).nonzero().flatten()
    key[0, hidden], value[0, hidden] = -key[0, hidden], 3 + value[0, hidden]
    after, _ = operators.tree_attention(query, key, value, seq_lens, words, blocks=1)
    assert torch.equal(before[0][0, row], after[0][0, row])
    assert torch.equal(before[1][0, row], after[1][0, row])
    assert not torch.equal(before[0], after[0])


@pytest.mark.slow
def test_traffic_at_the_papers_size_is_near_the_lower_bound():
    requests, rows, heads, kv_heads, dim, prefix = 12, 33, 32, 8, 128, 4096
    arguments = operands(6, [prefix] * requests, rows, heads, kv_heads, dim)
    counters = check(arguments, blocks=24)
    read, written = counters["read_bytes"], counters["written_bytes"]
    # The bound is the prefix's keys and values alone.
    bound = 2 * requests * prefix * kv_heads * dim * 2
    moved = sum(read[name] for name in ("query", "key", "value", "seq_lens", "tree_mask"))
    moved += sum(written[name] for name in ("out", "lse"))
    assert bound < moved < 1.1 * bound
    # Rings between the cores stay in L2 and are counted apart: everything once in, once out.
    assert read["scores"] == written["scores"]
    assert read["sums"] == written["sums"]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "text"),
    [
        (4, 3, 64, "Hq must be a multiple of Hkv, D 64 or 128"),
        (4, 2, 96, "D 64 or 128"),
        (81, 1, 64, "Hq / Hkv must be in 1..80, got 81"),
    ],
)
def test_host_refuses_sizes_before_any_launch(heads, kv_heads, dim, text):
    query, key, value, seq_lens, mask = operands(5, [3], 2, heads, kv_heads, dim)
    with pytest.raises(RuntimeError, match=text):
        operators.tree_attention(query, key, value, seq_lens, words_of(mask))


def test_kernels_compile_without_warnings():
    assert operators.tree_attention_library().warnings == ""
