# SPDX-License-Identifier: Apache-2.0
"""Verification by vectors accepts what walking down the tree accepts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.tree.tree_oracle import random_tree, walk_slowly
from treespark.tree import (
    PackedTree,
    TreePolicy,
    accept_greedy,
    accept_tokens,
    expand,
    pack,
    path_ranks,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    num_requests=st.integers(1, 4),
    num_nodes=st.integers(0, 40),
    num_tokens=st.integers(1, 4),
    extra=st.integers(0, 2),
)
def test_accepted_path_equals_the_sequential_walk(seed, num_requests, num_nodes, num_tokens, extra):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(num_nodes + 1, (num_requests,), generator=generator).tolist()
    rows = [random_tree(generator, size, 6, num_tokens) for size in sizes]
    tokens, parents = [row[0] for row in rows], [row[1] for row in rows]
    tree = PackedTree.from_parents(tokens, parents)
    target = torch.randint(num_tokens, tree.tokens.shape, generator=generator)
    depth = int(tree.depths.max()) + extra
    path = accept_tokens(tree, target, depth)
    for row in range(num_requests):
        slots, committed = walk_slowly(tokens[row], parents[row], target[row].tolist())
        padding = [-1] * (depth + 1 - len(slots))
        assert path.num_accepted[row] == len(slots) - 1
        assert path.retrieve_indices[row].tolist() == slots + padding
        assert path.tokens[row].tolist() == committed + padding
    assert path.num_accepted.dtype == path.tokens.dtype == path.retrieve_indices.dtype
    assert path.tokens.dtype == torch.int64


def test_a_target_that_follows_the_best_path_accepts_all_of_it():
    policy = TreePolicy(depth=4, branching=3, budget=20)
    logits = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
    pool = expand(
        lambda depth, tokens: logits[:, depth - 1, None].expand(-1, tokens.shape[1], -1),
        torch.tensor([0, 1]),
        policy,
    )
    tree = pack(pool, policy.budget)
    leaf = tree.scores.masked_fill(tree.depths < policy.depth, -torch.inf).argmax(1)
    wanted = tree.retrieve_table(policy.depth)[torch.arange(2), leaf]
    following = tree.tokens.gather(1, wanted[:, 1:])
    target = torch.full_like(tree.tokens, 6).scatter(1, wanted[:, :-1], following)
    path = accept_tokens(tree, target, policy.depth)
    assert path.num_accepted.tolist() == [4, 4]
    assert torch.equal(path.retrieve_indices, wanted)
    assert torch.equal(path.tokens[:, :4], following)
    assert path.tokens[:, 4].tolist() == [6, 6]


def test_a_tree_of_the_whole_vocabulary_always_accepts_every_depth():
    policy = TreePolicy(depth=3, branching=3, budget=39, frontier=9)
    pool = expand(lambda _, tokens: torch.zeros(5, tokens.shape[1], 3), torch.arange(5) % 3, policy)
    tree = pack(pool, policy.budget)
    target = torch.randint(3, tree.tokens.shape, generator=torch.Generator().manual_seed(1))
    path = accept_tokens(tree, target, policy.depth)
    assert path.num_accepted.tolist() == [3] * 5
    assert torch.equal(path.tokens, target.gather(1, path.retrieve_indices))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(2, 5),
    levels=st.sampled_from([1, 2, 50]),
    budget=st.integers(0, 30),
)
def test_places_of_accepted_nodes_tell_what_any_smaller_tree_accepts(seed, vocab, levels, budget):
    """Few levels of logits make many ties; one request has less room than the others."""
    generator = torch.Generator().manual_seed(seed)
    policy = TreePolicy(depth=4, branching=3, budget=budget, frontier=2)
    logits = torch.randint(levels, (3, 4, vocab), generator=generator).float()
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    pool = expand(
        lambda depth, tokens: logits[:, depth - 1, None].expand(-1, tokens.shape[1], -1),
        torch.zeros(3, dtype=torch.int64),
        policy,
    )
    limits = torch.tensor([4, 2, 4])
    # What the target says after a node, whatever slot it has in a tree; the anchor is the last.
    says = torch.randint(vocab, (3, pool.tokens.shape[1] + 1), generator=generator)

    def accepted(budget):
        tree = pack(pool, budget, limits)
        return tree, accept_tokens(tree, says.gather(1, tree.pool_index % says.shape[1]), 4)

    ranks = path_ranks(*accepted(budget))
    assert ranks.shape == (3, 5)
    assert not ranks[:, 0].any()
    for smaller in range(budget + 1):
        _, path = accepted(smaller)
        assert ((ranks >= 1) & (ranks <= smaller)).sum(1).tolist() == path.num_accepted.tolist()


def test_a_target_that_contradicts_the_tree_commits_the_bonus_alone():
    tree = PackedTree.from_parents([[5, 1, 2, 1]], [[-1, 0, 1, 2]])
    path = accept_tokens(tree, torch.tensor([[9, 2, 1, 7]]), 3)
    assert path.num_accepted.tolist() == [0]
    assert path.retrieve_indices.tolist() == [[0, -1, -1, -1]]
    assert path.tokens.tolist() == [[9, -1, -1, -1]]


def test_a_matching_node_below_a_rejected_one_is_not_accepted():
    tree = PackedTree.from_parents([[5, 1, 2, 3]], [[-1, 0, 1, 0]])
    path = accept_tokens(tree, torch.tensor([[3, 2, 0, 8]]), 2)
    assert path.retrieve_indices.tolist() == [[0, 3, -1]]
    assert path.tokens.tolist() == [[3, 8, -1]]


def test_empty_trees_commit_the_bonus():
    path = accept_tokens(PackedTree.root_only(torch.tensor([5, 6])), torch.tensor([[1], [2]]), 0)
    assert path.num_accepted.tolist() == [0, 0]
    assert path.tokens.tolist() == [[1], [2]]


def test_padding_is_never_accepted():
    # Padding holds token 0 and the target answers 0 everywhere.
    tree = PackedTree.from_parents([[5, 1, 2], [5]], [[-1, 0, 1], [-1]])
    path = accept_tokens(tree, torch.zeros(2, 3, dtype=torch.int64), 2)
    assert path.num_accepted.tolist() == [0, 0]
    assert path.retrieve_indices.tolist() == [[0, -1, -1]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vocab", [5, 2000])
def test_equal_target_logits_mean_the_lowest_id(dtype, vocab):
    tree = PackedTree.from_parents([[4, 3, 1, 2]], [[-1, 0, 0, 2]])
    logits = torch.zeros(1, 4, vocab, dtype=dtype)
    logits[0, 0, [3, 1]] = 2.0
    logits[0, 2, [4, 2]] = 1.0
    path = accept_greedy(tree, logits, 2)
    assert path.tokens.tolist() == [[1, 2, 0]]


def test_logits_and_their_best_tokens_give_the_same_path():
    generator = torch.Generator().manual_seed(1)
    tokens, parents = random_tree(generator, 20, 5, 3)
    tree = PackedTree.from_parents([tokens], [parents])
    logits = torch.randn(1, len(tokens), 3, generator=generator)
    by_logits, by_tokens = accept_greedy(tree, logits, 5), accept_tokens(tree, logits.argmax(-1), 5)
    assert torch.equal(by_logits.tokens, by_tokens.tokens)
    assert torch.equal(by_logits.retrieve_indices, by_tokens.retrieve_indices)


def test_a_round_needs_no_value_from_the_device():
    # Fake tensors have shapes but no values: reading one, or a shape that depends on one, raises.
    policy = TreePolicy(depth=3, branching=4, budget=12)
    with FakeTensorMode():
        anchors = torch.zeros(2, dtype=torch.int64)
        pool = expand(lambda _, t: torch.randn(*t.shape, 1031), anchors, policy)
        for limits in (None, torch.zeros(2, dtype=torch.int64)):
            tree = pack(pool, policy.budget, limits)
            path = accept_greedy(tree, torch.randn(2, 13, 1031), policy.depth)
            assert tree.ancestor_mask().shape == (2, 13, 13)
            assert tree.position_ids(anchors).shape == tree.tokens.shape == (2, 13)
            assert path.tokens.shape == (2, 4)
            assert tree.num_nodes.shape == (2,)
