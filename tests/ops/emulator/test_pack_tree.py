# SPDX-License-Identifier: Apache-2.0
"""pack_tree's kernel, emulated, against the serving policy and against the rule written out."""

import math

import pytest
import torch

from npu_ops.emulator import operators
from tests.ops.emulator.pack_tree_world import as_lists, random_trees, written_out
from treespark.tree.policy import CandidatePool, pack


def check(scores, parents, depths, counts, depth_bias, n, **options):
    arguments = (scores, parents, depths, counts, depth_bias, n)
    results, counters = operators.pack_tree(*arguments, **options)
    assert as_lists(results) == written_out(*arguments)
    assert not any(counters["unwritten_bytes"].values())
    return counters


def full(num_requests, count):
    return torch.full((num_requests,), count, dtype=torch.int32)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 3, 20, 24])
def test_same_at_every_core_count(blocks, strict):
    trees = random_trees(blocks, 12, 100, 7, ties=True)
    check(*trees, full(12, 100), torch.zeros(8), 32, blocks=blocks, strict=strict)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("num_requests", "num_candidates", "n", "max_depth"),
    [
        (1, 1, 1, 1),
        (1, 100, 32, 7),
        (12, 100, 32, 7),
        (3, 128, 127, 64),
        (2, 129, 63, 5),
        (2, 512, 64, 8),
        (1, 513, 127, 7),
        (1, 1024, 32, 3),
        (2, 33, 127, 33),
    ],
)
def test_sizes_across_every_level_of_sorting(num_requests, num_candidates, n, max_depth, ties):
    trees = random_trees(num_candidates, num_requests, num_candidates, max_depth, ties)
    bias = torch.linspace(0, -1, max_depth + 1)
    check(*trees, full(num_requests, num_candidates), bias, n, blocks=3)


def test_zero_bias_packs_as_serving_does():
    scores, parents, depths = random_trees(5, 6, 100, 7, ties=True)
    anchors, no_parent = torch.zeros(6).long(), torch.full((6, 1), -1)
    tokens = torch.zeros(6, 100).long()
    pool = CandidatePool(tokens, parents.long(), depths, scores, anchors, [no_parent] * 7)
    tree = pack(pool, 32)
    index, parent, depth, _, mask, count = operators.pack_tree(
        scores, parents, depths, full(6, 100), torch.zeros(8), 32
    ).results
    assert torch.equal(index, tree.pool_index[:, 1:].int())
    assert torch.equal(parent, tree.parents)
    assert torch.equal(depth, tree.depths)
    assert torch.equal(count, full(6, 32))
    seen = (mask[..., None] >> torch.arange(32)).bitwise_and(1).flatten(2)[..., :33].bool()
    assert torch.equal(seen, tree.ancestor_mask())


def test_ragged_and_empty_requests():
    scores, parents, depths = random_trees(6, 5, 40, 4, ties=True)
    counts = torch.tensor([0, 1, 7, 39, 40], dtype=torch.int32)
    # Columns behind a request's count hold anything.
    for request, count in enumerate(counts.tolist()):
        scores[request, count:] = torch.tensor([math.nan, math.inf, 5.0, 0.0]).repeat(10)[count:]
        parents[request, count:] = -77
        depths[request, count:] = 999
    arguments = (scores, parents, depths, counts, torch.zeros(5), 12)
    results, _ = operators.pack_tree(*arguments, blocks=2)
    assert as_lists(results) == written_out(*arguments)


def test_no_candidates_at_all():
    empty = torch.zeros(2, 0, dtype=torch.int32)
    check(torch.zeros(2, 0), empty, empty, full(2, 0), torch.zeros(2), 3, blocks=1)


def test_nan_and_infinite_scores_rank_last_but_stay_candidates():
    scores, parents, depths = random_trees(7, 3, 60, 5)
    scores[:, ::7] = math.nan
    scores[1, ::3] = -math.inf
    scores[2] = math.nan
    counters = check(scores, parents, depths, full(3, 60), torch.zeros(6), 50, blocks=2)
    assert counters["written_bytes"]["count"] == 12


def test_bias_may_lift_a_child_above_its_parent():
    # Without the smallest value on the path the child would come in without its parent.
    scores = torch.tensor([[-1.0, -5.0, -4.0, -5.5]])
    parents = torch.tensor([[-1, -1, -1, 1]], dtype=torch.int32)
    depths = torch.tensor([[1, 1, 1, 2]], dtype=torch.int32)
    bias = torch.tensor([0.0, 0.0, 3.0])
    (index, *_), _ = operators.pack_tree(scores, parents, depths, full(1, 4), bias, 3)
    assert index.tolist() == [[0, 1, 2]]


def test_inputs_may_have_any_strides():
    scores, parents, depths = random_trees(8, 4, 50, 6)
    transposed = scores.T.contiguous().T
    check(transposed, parents, depths, full(4, 50), torch.zeros(7), 20, blocks=3)


def test_traffic_is_inputs_and_outputs_once():
    trees = random_trees(9, 12, 100, 7)
    counters = check(*trees, full(12, 100), torch.zeros(8), 32, blocks=12)
    read, written = counters["read_bytes"], counters["written_bytes"]
    # The table of biases is read by each core.
    assert sum(read.values()) == 12 * (3 * 400 + 4 + 8 * 4)
    assert sum(written.values()) == 12 * 4 * (32 + 3 * 33 + 33 * 2 + 1)
    assert counters["peak"]["UB"] < 12 * 1024


@pytest.mark.parametrize(
    ("num_candidates", "n", "max_depth", "text"),
    [
        (8, 0, 1, "pack_tree: n must be in 1..127, got 0"),
        (8, 128, 1, "pack_tree: n must be in 1..127, got 128"),
        (1025, 8, 1, "pack_tree: C must be in 0..1024, got 1025"),
        (8, 8, 65, "pack_tree: the deepest depth must be in 1..64, got 65"),
    ],
)
def test_host_refuses_sizes_before_any_launch(num_candidates, n, max_depth, text):
    integers = torch.zeros(1, num_candidates, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=text):
        operators.pack_tree(
            integers.float(), integers, integers, full(1, 0), torch.zeros(max_depth + 1), n
        )


def test_kernel_compiles_without_warnings():
    assert operators.pack_tree_library().warnings == ""
