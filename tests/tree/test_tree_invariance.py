# SPDX-License-Identifier: Apache-2.0
"""The tree depends on a request's logits alone: not on batch, caller, device rounding or dtype."""

import pytest
import torch

from tests.tree.tree_oracle import assert_closed, assert_same_tree, random_tables, table_logits
from treespark.tree import TreePolicy, expand, pack
from treespark.tree import policy as policy_module


def test_a_device_that_rounds_up_cannot_lift_a_child_over_its_parent(monkeypatch):
    base = torch.zeros(1, 4, 5)
    base[..., 2] = 500.0
    monkeypatch.setattr(policy_module, "log_softmax", lambda z, dim: z.log_softmax(dim) + 1e-6)
    pool = expand(table_logits(base, torch.zeros(5, 5)), torch.tensor([0]), TreePolicy(depth=4))
    for budget in range(5):
        assert_closed(pack(pool, budget), pool)


def test_permuted_vocabulary_permutes_the_tree():
    policy = TreePolicy(depth=5, branching=3, budget=14)
    base, bias, anchors = random_tables(7, 4, policy.depth, 31, dtype=torch.float64)
    order = torch.randperm(31, generator=torch.Generator().manual_seed(8))
    renamed = order.argsort()
    tree = pack(expand(table_logits(base, bias), anchors, policy), policy.budget)
    twin_logits = table_logits(base[..., order], bias[order][:, order])
    twin = pack(expand(twin_logits, renamed[anchors], policy), policy.budget)
    assert torch.equal(twin.tokens, renamed[tree.tokens])
    assert torch.equal(twin.parents, tree.parents)
    assert torch.equal(twin.pool_index, tree.pool_index)


@pytest.mark.parametrize("num_values", [0, 2])
def test_a_batch_gives_the_trees_of_its_requests_alone(num_values):
    policy = TreePolicy(depth=4, branching=3, budget=12)
    base, bias, anchors = random_tables(9, 5, policy.depth, 300, num_values=num_values)
    limits = torch.tensor([0, 4, 2, 1, 3])
    batch = pack(expand(table_logits(base, bias), anchors, policy), policy.budget, limits)
    for row in range(5):
        one = slice(row, row + 1)
        alone = expand(table_logits(base[one], bias), anchors[one], policy)
        assert_same_tree(batch, pack(alone, policy.budget, limits[one]), one)


def test_batch_position_does_not_matter():
    policy = TreePolicy(depth=4, branching=3, budget=12)
    base, bias, anchors = random_tables(10, 6, policy.depth, 300, num_values=2)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    tree = pack(expand(table_logits(base, bias), anchors, policy), policy.budget)
    moved = expand(table_logits(base[order], bias), anchors[order], policy)
    assert_same_tree(tree, pack(moved, policy.budget), order)


def test_training_and_serving_choose_the_same_nodes():
    policy = TreePolicy(depth=5, branching=4, budget=16)
    base, bias, anchors = random_tables(13, 16, policy.depth, 700)
    leaf, head = base.clone().requires_grad_(), bias.clone().requires_grad_()
    replayed = expand(table_logits(leaf, head), anchors, policy)
    trained = pack(replayed, policy.budget)
    assert not replayed.scores.requires_grad
    for row in range(16):
        one = slice(row, row + 1)
        with torch.inference_mode():
            served = expand(table_logits(base[one], bias), anchors[one], policy)
            tree = pack(served, policy.budget)
        assert_same_tree(trained, tree, one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_scored_as_their_float32_values(dtype):
    policy = TreePolicy(depth=3, branching=3, budget=9)
    base, bias, anchors = random_tables(15, 2, policy.depth, 50)
    low = table_logits(base.to(dtype), bias.to(dtype))
    tree = pack(expand(low, anchors, policy), 9)
    exact = pack(expand(lambda d, tokens: low(d, tokens).float(), anchors, policy), 9)
    assert tree.scores.dtype == torch.float32
    assert_same_tree(tree, exact)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("position", [0, 5])
def test_a_poisoned_row_ranks_its_children_last_and_spoils_nothing_else(poison, position):
    policy = TreePolicy(depth=3, branching=3, budget=12)
    base, bias, anchors = random_tables(16, 2, policy.depth, 9)
    clean = expand(table_logits(base, bias), anchors, policy)

    def poisoned(depth, tokens):
        logits = table_logits(base, bias)(depth, tokens)
        if depth == 2:
            logits[0, 1, position] = poison
        return logits

    pool = expand(poisoned, anchors, policy)
    second_parent = pool.parents[0] == pool.frontiers[1][0, 1]
    assert pool.scores[0, second_parent].isneginf().all()
    assert not pool.scores.isnan().any()
    tree = pack(pool, policy.budget)
    assert_closed(tree, pool)
    assert not set(tree.pool_index[0].tolist()) & set(second_parent.nonzero().flatten().tolist())
    one = slice(1, 2)
    assert torch.equal(pool.scores[one], clean.scores[one])
    assert torch.equal(pool.tokens[one], clean.tokens[one])


def test_rows_without_any_finite_logit_still_give_a_tree():
    policy = TreePolicy(depth=3, branching=2, budget=5)
    pool = expand(
        lambda _, t: torch.full((2, t.shape[1], 4), -torch.inf), torch.zeros(2).long(), policy
    )
    tree = pack(pool, policy.budget)
    assert_closed(tree, pool)
    assert tree.num_nodes.tolist() == [5, 5]


def test_an_empty_batch_gives_an_empty_tree():
    policy = TreePolicy(depth=3, branching=2, budget=5)
    base, bias, anchors = random_tables(17, 0, policy.depth, 7)
    tree = pack(expand(table_logits(base, bias), anchors, policy), policy.budget)
    assert tree.tokens.shape == (0, 6)
