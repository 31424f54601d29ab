# SPDX-License-Identifier: Apache-2.0
"""Per-depth diagnostics on trees small enough to count by hand (float64, exact or 1e-12)."""

import itertools

import pytest
import torch

from tests.training.whole_replay import replay
from treespark.training.diagnostics import (
    expected_accepted,
    overlap_per_depth,
    path_hits,
    tree_diagnostics,
)
from treespark.training.losses import LossTerm
from treespark.tree.policy import CandidatePool, TreePolicy

F64 = torch.float64


def two_trees() -> tuple[CandidatePool, torch.Tensor]:
    """Two pools of depth 2, k = 2: tokens 1, 2 under the anchor, then 3, 4 under each of them."""
    pool = CandidatePool(
        tokens=torch.tensor([[1, 2, 3, 4, 3, 4]] * 2),
        parents=torch.tensor([[-1, -1, 0, 0, 1, 1]] * 2),
        depths=torch.tensor([[1, 1, 2, 2, 2, 2]] * 2, dtype=torch.int32),
        scores=torch.zeros(2, 6),
        anchors=torch.tensor([0, 0]),
        frontiers=[torch.tensor([[-1]] * 2), torch.tensor([[0, 1]] * 2)],
    )
    packed = torch.tensor([[1, 1, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0]]).bool()
    return pool, packed


def test_a_path_hits_only_while_it_stays_in_the_packed_tree():
    pool, packed = two_trees()
    for path, wanted in {
        (1, 3): [[True, True], [True, False]],
        (1, 4): [[True, False], [True, False]],
        (2, 4): [[True, True], [False, False]],
        # a packed node with the right token under another parent does not count
        (2, 3): [[True, False], [False, False]],
        (5, 3): [[False, False], [False, False]],
    }.items():
        assert path_hits(pool, packed, torch.tensor([path, path])).tolist() == wanted


def test_each_depth_divides_by_the_anchors_valid_at_it():
    pool, packed = two_trees()
    mass = torch.tensor([[0.5, 0.25, 0.125, 0.1, 0.1, 0.0625]] * 2, dtype=F64)
    valid = torch.tensor([[True, True], [True, False]])
    paths = torch.tensor([[1, 3], [2, 3]])
    pairs = tree_diagnostics(pool, packed, mass, paths, valid, labels=paths.flip(0))
    assert list(pairs) == ["survival_mass", "greedy_hit", "reference_hit"]
    survival = pairs["survival_mass"]
    assert survival.numerator.tolist() == [0.75 + 0.5, 0.125 + 0.0625]
    assert survival.denominator.tolist() == [2.0, 1.0]
    assert pairs["greedy_hit"].numerator.tolist() == [1.0, 1.0]
    # labels: (2, 3) for the first tree, (1, 3) for the second, whose depth 2 is not valid
    assert pairs["reference_hit"].numerator.tolist() == [2.0, 0.0]


def test_reference_hit_needs_labels():
    pool, packed = two_trees()
    paths, valid = torch.tensor([[1, 3], [2, 3]]), torch.ones(2, 2, dtype=torch.bool)
    assert "reference_hit" not in tree_diagnostics(pool, packed, torch.rand(2, 6), paths, valid)


def test_survival_mass_is_a_non_increasing_probability():
    torch.manual_seed(9)
    rows, depth, vocab = 16, 5, 13
    logits = torch.randn(rows, depth, vocab, dtype=F64)
    bias = torch.randn(vocab, vocab, dtype=F64)
    result = replay(
        lambda d, parents: logits[:, d - 1 : d] + bias[parents],
        torch.randint(0, vocab, (rows,)),
        TreePolicy(depth=depth, branching=3, budget=10),
        logits.mul(2).softmax(-1),
        torch.ones(rows, depth, dtype=torch.bool),
        labels=torch.randint(0, vocab, (rows, depth)),
    )
    values = result.diagnostics["survival_mass"].value
    assert bool((values >= 0).all() and (values <= 1).all())
    assert bool((values.diff() <= 0).all())
    for name in ("greedy_hit", "reference_hit"):
        assert bool((result.diagnostics[name].value.diff() <= 0).all())
    assert 0 < expected_accepted(result.diagnostics["survival_mass"]).item() < depth


def test_the_greedy_proxy_follows_the_teacher_argmax():
    depth, vocab = 3, 6
    torch.manual_seed(10)
    logits = torch.randn(4, depth, vocab, dtype=F64)
    result = replay(
        # no parent conditioning and the teacher's own logits: the chain is the greedy path
        lambda d, parents: logits[:, d - 1 : d].expand(-1, parents.shape[1], -1),
        torch.zeros(4, dtype=torch.long),
        TreePolicy(depth=depth, branching=1, budget=depth),
        logits.softmax(-1),
        torch.ones(4, depth, dtype=torch.bool),
    )
    assert result.diagnostics["greedy_hit"].numerator.tolist() == [4.0] * depth
    assert expected_accepted(result.diagnostics["greedy_hit"]).item() == pytest.approx(depth)


def test_overlap_is_averaged_per_depth_over_valid_rows():
    overlap = torch.tensor([[[0.5, 0.25], [1.0, 9.0]]], dtype=F64).requires_grad_()
    valid = torch.tensor([[[True, True], [True, False]]])
    pair = overlap_per_depth(overlap, valid)
    assert pair.numerator.tolist() == [1.5, 0.25]
    assert pair.denominator.tolist() == [2.0, 1.0]
    assert not pair.numerator.requires_grad


def test_pairs_of_two_batches_add_before_dividing():
    one = LossTerm(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))
    two = LossTerm(torch.tensor([1.0, 1.0]), torch.tensor([3.0, 2.0]))
    torch.testing.assert_close((one + two).value, torch.tensor([0.5, 0.5]), rtol=1e-5, atol=0)
    assert one.value[1].item() == 0.0


def test_masses_sum_to_the_expected_accepted_depth_of_reference_draws():
    """Prefix-coverage identity, by enumeration of all V^B reference draws."""
    torch.manual_seed(8)
    vocab, depth = 4, 3
    base = torch.randn(1, depth, vocab, dtype=F64)
    w1, w2 = torch.randn(vocab, 2, dtype=F64), torch.randn(vocab, 2, dtype=F64)
    teacher = torch.randn(1, depth, vocab, dtype=F64).softmax(-1)
    result = replay(
        lambda d, parents: base[:, d - 1 : d] + w1[parents] @ w2.T,
        torch.tensor([1]),
        TreePolicy(depth=depth, branching=2, budget=6),
        teacher,
        torch.ones(1, depth, dtype=torch.bool),
    )
    tree = result.packed
    nodes = [i for i in range(1, tree.tokens.shape[1]) if tree.valid[0, i]]
    reached = [0.0] * depth
    for path in itertools.product(range(vocab), repeat=depth):
        probability = 1.0
        for d, token in enumerate(path):
            probability *= teacher[0, d, token].item()
        node = 0
        for d, token in enumerate(path):
            matches = [
                i for i in nodes if tree.parents[0, i] == node and tree.tokens[0, i] == token
            ]
            if not matches:
                break
            node = matches[0]
            reached[d] += probability
    per_depth = result.diagnostics["survival_mass"].numerator
    torch.testing.assert_close(per_depth, torch.tensor(reached, dtype=F64), rtol=0, atol=1e-12)
    total = result.mass[result.packed_nodes].sum()
    assert total.item() == pytest.approx(sum(reached), abs=1e-12)
    assert reached[0] >= reached[1] >= reached[2]
