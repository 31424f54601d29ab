# SPDX-License-Identifier: Apache-2.0
"""expand and pack follow the written rules on every input, ties included."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tree.tree_oracle import (
    assert_closed,
    assert_same_tree,
    expand_slowly,
    first_entries,
    pack_slowly,
    path_to,
    pool_rows,
    random_tables,
    table_logits,
)
from treespark.errors import UsageError
from treespark.tree import TreePolicy, expand, pack
from treespark.tree import policy as policy_module


@st.composite
def _cases(draw):
    policy = TreePolicy(
        depth=draw(st.integers(1, 5)),
        branching=draw(st.integers(1, 5)),
        budget=draw(st.integers(0, 40)),
        frontier=draw(st.none() | st.integers(1, 6)),
    )
    tables = random_tables(
        draw(st.integers(0, 2**31)),
        draw(st.integers(1, 3)),
        policy.depth,
        draw(st.integers(1, 9)),
        num_values=draw(st.integers(0, 3)),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
    )
    return policy, *tables


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=_cases(), data=st.data())
def test_pool_and_tree_equal_the_slow_rules(case, data):
    policy, base, bias, anchors = case
    pool = expand(table_logits(base, bias), anchors, policy)
    limit = data.draw(st.none() | st.lists(st.integers(0, 6), min_size=3, max_size=3))
    max_depths = None if limit is None else torch.tensor(limit[: len(anchors)])
    tree = pack(pool, policy.budget, max_depths)
    assert_closed(tree, pool)
    assert pool.scores.dtype == base.dtype
    for row, anchor in enumerate(anchors.tolist()):
        nodes, frontiers = expand_slowly(base[row], bias, anchor, policy)
        assert pool_rows(pool)[row] == nodes
        assert [f[row].tolist() for f in pool.frontiers] == frontiers
        kept = pack_slowly(nodes, policy.budget, None if limit is None else limit[row])
        padding = [-1] * (policy.budget - len(kept))
        assert tree.pool_index[row].tolist() == [-1, *kept, *padding]
        assert tree.num_nodes[row] == len(kept)
        assert tree.tokens[row, 0] == anchor
        for slot, index in enumerate(kept, start=1):
            node, parent = nodes[index], int(tree.parents[row, slot])
            assert tree.tokens[row, slot] == node.token
            assert tree.depths[row, slot] == node.depth
            assert tree.scores[row, slot].item() == node.score
            assert parent == (0 if node.parent < 0 else kept.index(node.parent) + 1)


@pytest.mark.parametrize("vocab", [1, 2, 3, 4, 11])
@pytest.mark.parametrize("frontier", [None, 1, 2, 7, 50])
def test_pool_size_follows_from_the_policy_and_the_vocabulary(vocab, frontier):
    policy = TreePolicy(depth=4, branching=3, frontier=frontier)
    base, bias, anchors = random_tables(0, 2, policy.depth, vocab)
    pool = expand(table_logits(base, bias), anchors, policy)
    children = min(3, vocab)
    widths = [1]
    while len(widths) < policy.depth:
        widths.append(min(policy.frontier_width, children * widths[-1]))
    assert [f.shape[1] for f in pool.frontiers] == widths
    assert pool.num_children == children
    assert pool.tokens.shape == pool.parents.shape == (2, children * sum(widths))
    assert pool.tokens.dtype == pool.parents.dtype == torch.int64
    assert pool.depths.dtype == torch.int32


def test_default_policy_proposes_one_hundred_candidates():
    policy = TreePolicy()
    base, bias, anchors = random_tables(0, 1, policy.depth, 97)
    assert expand(table_logits(base, bias), anchors, policy).tokens.shape == (1, 100)


def test_children_of_a_depth_line_up_with_its_frontier():
    policy = TreePolicy(depth=4, branching=3, frontier=5)
    base, bias, anchors = random_tables(1, 3, policy.depth, 11)
    pool = expand(table_logits(base, bias), anchors, policy)
    covered = []
    for depth in range(1, policy.depth + 1):
        columns = pool.children_of(depth)
        covered += range(pool.tokens.shape[1])[columns]
        assert (pool.depths[:, columns] == depth).all()
        by_parent = pool.parents[:, columns].unflatten(1, (-1, pool.num_children))
        assert torch.equal(by_parent, pool.frontiers[depth - 1][..., None].expand_as(by_parent))
    assert covered == list(range(pool.tokens.shape[1]))


def test_node_logits_are_asked_once_per_depth_for_the_frontier():
    policy = TreePolicy(depth=3, branching=2)
    base, bias, anchors = random_tables(2, 2, policy.depth, 7)
    logits_of, calls = table_logits(base, bias), []

    def recorded(depth, tokens):
        calls.append((depth, tokens.clone()))
        return logits_of(depth, tokens)

    pool = expand(recorded, anchors, policy)
    assert [depth for depth, _ in calls] == [1, 2, 3]
    assert torch.equal(calls[0][1], anchors[:, None])
    for depth, tokens in calls[1:]:
        assert torch.equal(tokens, pool.tokens.gather(1, pool.frontiers[depth - 1]))


@pytest.mark.parametrize("budget", range(0, 30, 3))
@pytest.mark.parametrize("kind", ["tied", "saturated", "random", "minus infinity"])
def test_packed_nodes_have_their_parents(kind, budget):
    policy = TreePolicy(depth=5, branching=3, budget=budget)
    base, bias, anchors = random_tables(3, 4, policy.depth, 7)
    if kind == "tied":
        base, bias = torch.zeros_like(base), torch.zeros_like(bias)
    if kind == "saturated":
        base, bias = 200 * base.sign(), 300 * torch.eye(7)
    if kind == "minus infinity":
        base = torch.where(base > 0, base, -torch.inf)
    pool = expand(table_logits(base, bias), anchors, policy)
    assert_closed(pack(pool, budget), pool)
    assert_closed(pack(pool, budget, torch.tensor([0, 1, 3, 9])), pool)


def test_edges_of_probability_one_keep_the_shallower_nodes():
    base = torch.zeros(1, 6, 5)
    base[..., 2] = 500.0
    pool = expand(table_logits(base, torch.zeros(5, 5)), torch.tensor([0]), TreePolicy(depth=6))
    chain = pack(pool, 3)
    assert (chain.scores == 0).all()
    assert chain.tokens.tolist() == [[0, 2, 2, 2]]
    assert chain.depths.tolist() == [[0, 1, 2, 3]]


def test_one_child_per_node_gives_the_greedy_chain():
    policy = TreePolicy(depth=6, branching=1, budget=6)
    base, bias, anchors = random_tables(4, 3, policy.depth, 19)
    tree = pack(expand(table_logits(base, bias), anchors, policy), policy.budget)
    chain = [anchors]
    for depth in range(policy.depth):
        chain.append((base[:, depth] + bias[chain[-1]]).argmax(-1))
    assert torch.equal(tree.tokens, torch.stack(chain, 1))
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3, 4, 5]] * 3


def test_one_depth_gives_the_best_siblings():
    policy = TreePolicy(depth=1, branching=4, budget=4)
    base, bias, anchors = random_tables(5, 3, 1, 19, num_values=3)
    tree = pack(expand(table_logits(base, bias), anchors, policy), policy.budget)
    logits = (base[:, 0] + bias[anchors]).tolist()
    assert tree.tokens[:, 1:].tolist() == [first_entries(row, 4) for row in logits]
    assert (tree.parents[:, 1:] == 0).all()


def test_budget_above_the_pool_keeps_all_and_pads():
    policy = TreePolicy(depth=2, branching=2, budget=9)
    base, bias, anchors = random_tables(6, 2, 2, 7)
    tree = pack(expand(table_logits(base, bias), anchors, policy), policy.budget)
    assert tree.pool_index.tolist() == [[-1, 0, 1, 2, 3, 4, 5, -1, -1, -1]] * 2
    assert tree.valid.sum(1).tolist() == [7, 7]


def test_equal_logits_propose_the_lowest_ids_and_fill_by_depth():
    policy = TreePolicy(depth=3, branching=2, budget=4)
    pool = expand(lambda _, tokens: torch.zeros(1, tokens.shape[1], 7), torch.tensor([6]), policy)
    assert pool.tokens.tolist() == [[0, 1] * 5]
    assert [f.tolist() for f in pool.frontiers] == [[[-1]], [[0, 1]], [[2, 3]]]
    assert pack(pool, 4).pool_index.tolist() == [[-1, 0, 1, 2, 3]]


def test_frontier_tie_goes_to_the_lower_creation_index():
    # Both depth-1 nodes have probability 1/2 and one certain child each: 2, 4 tie, so do 3, 5.
    base = torch.tensor([[[0.0, 0.0, -torch.inf], [-torch.inf, -torch.inf, 0.0], [0.0, 0, 0]]])
    policy = TreePolicy(depth=3, branching=2)
    pool = expand(table_logits(base, torch.zeros(3, 3)), torch.tensor([0]), policy)
    assert pool.frontiers[2].tolist() == [[2, 4]]
    # Depth 1 (0, 1) and depth 2 (2, 4) all score log(1/2): the shallower come first.
    assert pack(pool, 3).pool_index.tolist() == [[-1, 0, 1, 2]]


def test_depth_limits_are_those_of_each_request():
    policy = TreePolicy(depth=4, branching=3, budget=30)
    base, bias, anchors = random_tables(11, 4, policy.depth, 9)
    pool = expand(table_logits(base, bias), anchors, policy)
    tree = pack(pool, policy.budget, torch.tensor([0, 2, 4, 99]))
    assert tree.num_nodes.tolist() == [0, 12, 30, 30]
    assert tree.depths.max(1).values.tolist() == [0, 2, 4, 4]
    assert_same_tree(pack(pool, policy.budget), pack(pool, 30, torch.tensor([4, 4, 4, 4])))


def test_depth_limit_frees_budget_for_shallower_nodes():
    base = torch.zeros(1, 3, 4)
    base[..., 0] = 2.0
    pool = expand(table_logits(base, torch.zeros(4, 4)), torch.tensor([0]), TreePolicy(depth=3))
    assert pack(pool, 3).depths.tolist() == [[0, 1, 2, 3]]
    assert pack(pool, 3, torch.tensor([1])).depths.tolist() == [[0, 1, 1, 1]]


def test_nodes_of_score_minus_infinity_come_before_refused_ones():
    base = torch.full((1, 3, 4), -torch.inf)
    base[..., 0] = 0.0
    pool = expand(table_logits(base, torch.zeros(4, 4)), torch.tensor([0]), TreePolicy(depth=3))
    tree = pack(pool, 6, torch.tensor([1]))
    assert tree.pool_index.tolist() == [[-1, 0, 1, 2, 3, -1, -1]]


@pytest.mark.parametrize("num_values", [0, 1, 2])
def test_a_larger_budget_only_adds_nodes(num_values):
    policy = TreePolicy(depth=4, branching=3)
    base, bias, anchors = random_tables(12, 3, policy.depth, 7, num_values=num_values)
    pool = expand(table_logits(base, bias), anchors, policy)
    trees = [pack(pool, budget).pool_index for budget in range(pool.tokens.shape[1] + 2)]
    for smaller, larger in itertools.pairwise(trees):
        for few, more in zip(smaller.tolist(), larger.tolist(), strict=True):
            assert set(few) <= set(more)


def test_unlimited_frontier_packs_the_best_of_all_paths():
    policy = TreePolicy(depth=3, branching=6, budget=20, frontier=64)
    base, bias, anchors = random_tables(14, 1, policy.depth, 6, dtype=torch.float64)
    scores = {}
    for length in (1, 2, 3):
        for path in itertools.product(range(6), repeat=length):
            score = torch.zeros((), dtype=torch.float64)
            for depth, (parent, token) in enumerate(itertools.pairwise([int(anchors), *path])):
                score = score + (base[0, depth] + bias[parent]).log_softmax(0)[token]
            scores[path] = float(score)
    best = sorted(scores, key=lambda path: -scores[path])[:20]
    tree = pack(expand(table_logits(base, bias), anchors, policy), policy.budget)
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    packed = [tuple(tokens[s] for s in path_to(parents, slot)[1:]) for slot in range(1, 21)]
    assert set(packed) == set(best)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("depth", 0),
        ("branching", 0),
        ("budget", -1),
        ("frontier", 0),
        ("depth", 2.0),
        ("budget", True),
        ("branching", None),
        ("depth", 65),
        ("branching", 100_000),
        ("frontier", 65),
        ("budget", 1025),
        ("budget", 10**20 - 1),
    ],
)
def test_a_wrong_policy_value_is_named(field, value):
    match = rf"--{field} {value!r}.*at least.*at most.*policy\.{field}"
    with pytest.raises(UsageError, match=match):
        TreePolicy(**{field: value})


@pytest.mark.parametrize("budget", [-1, 1025])
def test_a_budget_out_of_range_is_refused(budget):
    pool = expand(lambda _, t: torch.zeros(1, 1, 3), torch.tensor([2]), TreePolicy(depth=1))
    with pytest.raises(UsageError, match=f"--budget {budget}"):
        pack(pool, budget)


def test_frontier_width_defaults_to_branching():
    assert TreePolicy(branching=3).frontier_width == 3
    assert TreePolicy(branching=3, frontier=5).frontier_width == 5


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("num_values", [0, 2])
def test_packing_by_the_operator_and_beyond_its_limits_is_the_same(
    monkeypatch, num_values, limited
):
    base, bias, anchors = random_tables(31, 5, 4, 13, num_values=num_values)
    pool = expand(table_logits(base, bias), anchors, TreePolicy(depth=4, branching=3))
    limits = torch.tensor([0, 1, 2, 3, 4]) if limited else None
    by_operator = [pack(pool, budget, limits) for budget in (1, 5, 30, 60)]
    monkeypatch.setattr(policy_module, "within_limits", lambda *_: False)
    for tree, budget in zip(by_operator, (1, 5, 30, 60), strict=True):
        assert_same_tree(tree, pack(pool, budget, limits))
