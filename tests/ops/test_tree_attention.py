# SPDX-License-Identifier: Apache-2.0
"""tree_attention: every implementation gives the attention of the contract.

Tolerances are absolute for values around 1. float64: 1e-12, another order of summation. float32:
1e-5, the same. bfloat16 and float16: 2e-2 and 3e-3, a few roundings of 2^-9 and 2^-11 each, of the
probabilities and of the result. lse is summed in float32 throughout: 1e-4 at 500 keys.
"""

import math

import pytest
import torch

from npu_ops import words_from_mask
from npu_ops.tree_attention import SPEC, fast, fits

IMPLEMENTATIONS = {"reference": SPEC.reference, "cpu": fast.on_cpu, "cuda": fast.on_cuda}
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}


@pytest.fixture(params=IMPLEMENTATIONS)
def run(request):
    """One implementation; that for CUDA computes on a CPU as well."""
    return IMPLEMENTATIONS[request.param]


class World:
    """Random trees behind random prefixes; cache rows behind a request's last one are NaN."""

    def __init__(
        self, prefixes, counts, rows, heads=(4, 2), head_dim=64, dtype=torch.float32, seed=0
    ):
        self.generator = torch.Generator().manual_seed(seed)
        self.prefixes, self.counts = prefixes, counts
        num_requests, room = len(prefixes), max(prefixes, default=0) + rows + 3
        self.query = self.draw(num_requests, rows, heads[0], head_dim).to(dtype)
        self.key = self.draw(num_requests, room, heads[1], head_dim).to(dtype)
        self.value = self.draw(num_requests, room, heads[1], head_dim).to(dtype)
        self.mask = torch.zeros(num_requests, rows, rows, dtype=torch.bool)
        for request, (prefix, count) in enumerate(zip(prefixes, counts, strict=True)):
            for row in range(count):
                if row:
                    parent = int(torch.randint(row, (), generator=self.generator))
                    self.mask[request, row] = self.mask[request, parent]
                self.mask[request, row, row] = True
            self.key[request, prefix + count :] = math.nan
            self.value[request, prefix + count :] = math.nan
        self.seq_lens = torch.tensor(prefixes, dtype=torch.int32)

    def draw(self, *shape):
        return torch.randn(shape, generator=self.generator)

    @property
    def arguments(self):
        words = words_from_mask(self.mask)
        return self.query, self.key, self.value, self.seq_lens, words

    def paged(self, block_size):
        """The same cache in shuffled blocks, and the block table."""
        num_requests, room = self.key.shape[:2]
        per_request = -(-room // block_size)
        order = torch.randperm(num_requests * per_request, generator=self.generator)
        table = order.view(num_requests, per_request).int()

        def blocks(rows):
            padding = (0, 0, 0, 0, 0, per_request * block_size - room)
            whole = torch.nn.functional.pad(rows, padding, value=math.nan)
            whole = whole.unflatten(1, (per_request, block_size)).flatten(0, 1)
            return torch.empty_like(whole).index_copy_(0, order, whole)

        return blocks(self.key), blocks(self.value), table

    def expected(self, scale=None):
        """Attention in float64 by an additive mask, with NaN rows left out."""
        num_requests, _, num_heads, head_dim = self.query.shape
        groups = num_heads // self.key.shape[2]
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        lse = torch.full(self.query.shape[:3], -math.inf, dtype=torch.float64)
        for b in range(num_requests):
            end = self.prefixes[b] + self.counts[b]
            keys = self.key[b, :end].double().repeat_interleave(groups, 1)
            values = self.value[b, :end].double().repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,shd->hqs", self.query[b, : self.counts[b]].double(), keys)
            scores = scores * (head_dim**-0.5 if scale is None else scale)
            nodes = self.mask[b, : self.counts[b], : self.counts[b]]
            scores[:, :, self.prefixes[b] :].masked_fill_(~nodes, -math.inf)
            out[b, : self.counts[b]] = torch.einsum("hqs,shd->qhd", scores.softmax(-1), values)
            lse[b, : self.counts[b]] = scores.logsumexp(-1).T
        return out, lse


def check(world, results, scale=None):
    out, lse = results
    dtype = world.query.dtype
    expected_out, expected_lse = world.expected(scale)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=tolerance)
    lse_tolerance = tolerance if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=lse_tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 64), ((9, 3), 64), ((4, 4), 128)])
def test_attention_is_that_of_prefix_and_ancestors(run, dtype, heads, head_dim):
    world = World([5, 0, 63], [33, 7, 1], 33, heads, head_dim, dtype)
    check(world, run(*world.arguments))


@pytest.mark.parametrize("rows", [1, 8, 33, 64, 65, 128])
@pytest.mark.parametrize("prefix", [0, 1, 127, 512])
def test_any_number_of_rows_behind_any_prefix(run, rows, prefix):
    world = World([prefix], [rows], rows, (2, 1), seed=rows + prefix)
    check(world, run(*world.arguments))


@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_blocks_in_any_order_hold_the_same_cache(run, block_size):
    world = World([5, 0, 70], [12, 12, 3], 12)
    key, value, table = world.paged(block_size)
    query, _, _, seq_lens, words = world.arguments
    check(world, run(query, key, value, seq_lens, words, table, 0.0, block_size))


def test_block_numbers_behind_the_last_block_may_be_anything(run):
    world = World([5, 70], [12, 3], 12)
    key, value, table = world.paged(16)
    query, _, _, seq_lens, words = world.arguments
    table[0, 2:] = 2**30
    check(world, run(query, key, value, seq_lens, words, table, 0.0, 16))


def test_scale_replaces_the_default(run):
    world = World([5], [8], 8)
    query, key, value, seq_lens, words = world.arguments
    check(world, run(query, key, value, seq_lens, words, None, 0.3), scale=0.3)


def test_padding_is_0_with_lse_minus_infinity(run):
    world = World([5, 9], [3, 0], 8)
    out, lse = run(*world.arguments)
    check(world, (out, lse))
    assert (out[0, 3:] == 0).all()
    assert (out[1] == 0).all()
    assert lse[1].isneginf().all()


def test_padding_between_rows_is_padding(run):
    world = World([5], [8], 8)
    world.mask[0, 3] = False
    world.mask[0, 4:, 3] = False
    out, lse = run(*world.arguments)
    assert (out[0, 3] == 0).all()
    assert lse[0, 3].isneginf().all()
    assert out.isfinite().all()


def test_what_a_row_does_not_see_changes_nothing_bitwise(run):
    world = World([20], [12], 12)
    before, lse_before = run(*world.arguments)
    for node in range(12):
        other = World([20], [12], 12)
        other.key[0, 20 + node] = other.draw(2, 64) * 50
        other.value[0, 20 + node] = other.draw(2, 64) * 50
        after, lse_after = run(*other.arguments)
        blind = ~world.mask[0, :, node]
        assert torch.equal(after[0, blind], before[0, blind])
        assert torch.equal(lse_after[0, blind], lse_before[0, blind])
        assert not torch.equal(after[0, ~blind], before[0, ~blind])


def test_lse_merges_a_split_prefix(run):
    world = World([40], [9], 9, dtype=torch.float64)
    whole, lse = run(*world.arguments)
    query, key, value, _, words = world.arguments
    split = torch.tensor([25], dtype=torch.int32)
    # The first 15 rows alone, as a tree of rows that all see each other, against the rest.
    front_words = words_from_mask(torch.ones(1, 15, 15, dtype=torch.bool))
    padded = torch.nn.functional.pad(query, (0, 0, 0, 0, 0, 6))
    parts = [
        run(padded, key[:, :15].contiguous(), value[:, :15].contiguous(), split - 25, front_words),
        run(query, key[:, 15:].contiguous(), value[:, 15:].contiguous(), split, words),
    ]
    outs = torch.stack([part[0][:, :9] for part in parts])
    sums = torch.stack([part[1][:, :9] for part in parts])
    merged = (outs * (sums - lse).exp()[..., None]).sum(0)
    torch.testing.assert_close(sums.logsumexp(0), lse, rtol=0, atol=1e-12)
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-12)


def test_strides_do_not_matter(run):
    world = World([5, 17], [8, 4], 8)
    query, key, value, seq_lens, words = world.arguments
    heads_first = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (key, value)]
    wide = query.repeat_interleave(2, 1)[:, ::2]
    strided = (wide, *heads_first, seq_lens.repeat_interleave(2)[::2], words.mT.contiguous().mT)
    check(world, run(*strided))


def test_no_requests_give_empty_results(run):
    world = World([5], [8], 8)
    out, lse = run(*(part[:0] for part in world.arguments))
    assert out.shape == (0, 8, 4, 64)
    assert lse.shape == (0, 8, 4)


def test_requests_do_not_influence_each_other(run):
    world = World([5, 0, 17], [8, 3, 8], 8)
    out, lse = run(*world.arguments)
    for request in range(3):
        alone = run(*(part[request : request + 1] for part in world.arguments))
        torch.testing.assert_close(alone[0][0], out[request], rtol=0, atol=1e-6)
        torch.testing.assert_close(alone[1][0], lse[request], rtol=0, atol=1e-5)


GOOD = {
    "query": torch.zeros(2, 3, 4, 64),
    "key": torch.zeros(2, 9, 2, 64),
    "value": torch.zeros(2, 9, 2, 64),
    "seq_lens": torch.zeros(2).int(),
    "tree_mask": torch.zeros(2, 3, 2).int(),
}
PAGED = {
    "key": torch.zeros(5, 16, 2, 64),
    "value": torch.zeros(5, 16, 2, 64),
    "block_table": torch.zeros(2, 2).int(),
    "block_size": 16,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 3, 64)}, "query must be [B, Q, Hq, D], got [2, 3, 64]"),
        (
            {"key": torch.zeros(3, 9, 2, 64)},
            "key must be [B=2, S, Hkv, D=64], got [3, 9, 2, 64]",
        ),
        (
            {"value": torch.zeros(2, 8, 2, 64)},
            "value must have the shape of key, [2, 9, 2, 64], got [2, 8, 2, 64]",
        ),
        ({"seq_lens": torch.zeros(3).int()}, "seq_lens must be [B=2], got [3]"),
        ({"tree_mask": torch.zeros(2, 3, 1).int()}, "tree_mask must be [B=2, Q=3, W=2], got"),
        ({"tree_mask": torch.zeros(2, 3, 2).long()}, "tree_mask must be int32, got int64"),
        ({"value": torch.zeros(2, 9, 2, 64).half()}, "value must be float32, got float16"),
        (
            {"block_size": 16},
            "key must be [P, block_size=16, Hkv, D=64], got [2, 9, 2, 64]",
        ),
        (
            PAGED | {"block_table": None},
            "block_table must be given if and only if block_size 16 > 0, got none",
        ),
        (
            {"block_table": torch.zeros(2, 2).int()},
            "block_table must be given if and only if block_size 0 > 0, got one",
        ),
        (
            PAGED
            | {"key": torch.zeros(5, 24, 2, 64), "value": torch.zeros(5, 24, 2, 64)}
            | {"block_size": 24},
            "block_size must be a multiple of 16 in 16..256, got 24",
        ),
        (
            {name: torch.zeros(2, 9, 2, 96) for name in ("key", "value")}
            | {"query": torch.zeros(2, 3, 4, 96)},
            "D must be 64 or 128, got 96",
        ),
        ({"query": torch.zeros(2, 3, 5, 64)}, "Hq must be a multiple of Hkv=2, got 5"),
        (
            {"query": torch.zeros(2, 129, 4, 64), "tree_mask": torch.zeros(2, 129, 6).int()},
            "Q must be in 1..128, got 129",
        ),
        ({"scale": -1.0}, "scale must not be negative, got -1.0"),
    ],
)
def test_wrong_argument_is_named(run, changes, message):
    with pytest.raises(RuntimeError) as caught:
        run(**(GOOD | changes))
    assert str(caught.value).startswith(f"tree_attention: {message}")


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": torch.tensor([0, 7]).int()}, "seq_lens + tree rows must hold values in 0..9"),
        ({"seq_lens": torch.tensor([-1, 0]).int()}, "seq_lens must hold values in 0..9, got -1"),
        (
            PAGED | {"block_table": torch.tensor([[0, 9], [5, 0]]).int()},
            "block_table must hold values in 0..4, got 5",
        ),
    ],
)
def test_rows_and_blocks_that_do_not_exist_are_named(name, changes, message):
    words = words_from_mask(torch.ones(2, 3, 3, dtype=torch.bool).tril())
    with pytest.raises(RuntimeError) as caught:
        IMPLEMENTATIONS[name](**(GOOD | {"tree_mask": words} | changes))
    assert str(caught.value).startswith(f"tree_attention: {message}")


def test_limits_are_those_of_fits():
    assert fits(64, 1)
    assert fits(128, 128)
    assert not any([fits(96, 8), fits(64, 0), fits(64, 129)])
