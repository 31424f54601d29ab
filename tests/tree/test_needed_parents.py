# SPDX-License-Identifier: Apache-2.0
"""Parents that no packed tree can use are not asked, and the trees stay the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tree.tree_oracle import assert_closed, random_tables, table_logits
from treespark.tree import TreePolicy, expand_children, pack
from treespark.tree.builder import AXES, CONDITIONED, THRESHOLD, TreeBuilder
from treespark.tree.policy import Children, children_of_logits


class Asked:
    """Children of tables that are garbage for parents nobody needs; counts the needed ones."""

    def __init__(self, base, bias, poison=None):
        logits = table_logits(base, bias)
        if poison is not None:
            token, value = poison
            logits = _poisoned(logits, token, value)
        self.children, self.num_asked = children_of_logits(logits), 0

    def __call__(self, depth, parent_tokens, branching, needed=None):
        tokens, log_probs, lse = self.children(depth, parent_tokens, branching)
        if needed is None:
            needed = torch.ones_like(parent_tokens, dtype=torch.bool)
        self.num_asked += int(needed.sum())
        garbage = ~needed[..., None]
        return Children(
            tokens.masked_fill(garbage, 0), log_probs.masked_fill(garbage, -torch.inf), lse
        )


def _poisoned(logits, token, value):
    """Logits of children below `token` are all `value`: NaN, infinite or of one sure child."""

    def changed(depth, parent_tokens):
        found = logits(depth, parent_tokens).clone()
        found[parent_tokens == token] = value
        return found

    return changed


@st.composite
def _cases(draw):
    policy = TreePolicy(
        depth=draw(st.integers(1, 6)),
        branching=draw(st.integers(1, 5)),
        budget=draw(st.integers(0, 24)),
        frontier=draw(st.none() | st.integers(1, 8)),
    )
    num_requests = draw(st.integers(0, 4))
    base, bias, anchors = random_tables(
        draw(st.integers(0, 2**31)),
        max(num_requests, 1),
        policy.depth,
        draw(st.integers(1, 9)),
        num_values=draw(st.integers(0, 3)),
        dtype=torch.float32,
    )
    # Differences of hundreds make edges of probability 1: children worth as much as their parent.
    scale = draw(st.sampled_from([1.0, 300.0]))
    poison = draw(
        st.none()
        | st.tuples(st.integers(0, 3), st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    )
    limits = draw(st.lists(st.integers(0, 7), min_size=num_requests, max_size=num_requests))
    tables = base[:num_requests] * scale, bias * scale, anchors[:num_requests]
    return policy, *tables, poison, torch.tensor(limits, dtype=torch.int64)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(case=_cases(), data=st.data())
def test_the_packed_trees_are_those_of_the_whole_pool(case, data):
    policy, base, bias, anchors, poison, limits = case
    stop = data.draw(st.sampled_from(AXES["stop"]))
    thresholds = st.sampled_from([1e-6, 0.02, 0.15, 0.6]) if stop == THRESHOLD else st.none()
    builder = TreeBuilder(
        priority=data.draw(st.sampled_from(AXES["priority"])),
        stop=stop,
        threshold=data.draw(thresholds),
    )
    assert builder.proposal == CONDITIONED
    everyone, needed = Asked(base, bias, poison), Asked(base, bias, poison)
    whole = builder.expand(everyone, anchors, policy)
    pool = builder.expand(needed, anchors, policy, packed_depths=limits)
    wanted, tree = (builder.pack(some, policy, limits) for some in (whole, pool))
    assert_closed(tree, pool)
    for name in ("tokens", "parents", "depths", "scores", "valid"):
        assert torch.equal(getattr(tree, name), getattr(wanted, name)), name
    assert needed.num_asked <= everyone.num_asked
    assert pool.tokens.shape[1] <= whole.tokens.shape[1]


def test_a_threshold_keeps_the_same_nodes():
    base, bias, anchors = random_tables(5, 3, 5, 9, num_values=0, dtype=torch.float32)
    builder = TreeBuilder(stop=THRESHOLD, threshold=0.05)
    policy, limits = TreePolicy(depth=5, branching=3, budget=8), torch.tensor([5, 3, 5])
    everyone, needed = Asked(base, bias), Asked(base, bias)
    trees = [
        builder.pack(builder.expand(asked, anchors, policy, depths), policy, limits)
        for asked, depths in ((everyone, None), (needed, limits))
    ]
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    assert 0 < trees[0].num_nodes.sum() < 24
    # Anchors, and nodes above the threshold at most: all of them are in the tree.
    assert needed.num_asked <= 3 + trees[0].num_nodes.sum() < everyone.num_asked


def test_only_nodes_better_than_the_last_of_the_tree_are_asked():
    # Below every node: token 0 with probability 0.6, 1 with 0.3, 2 with 0.1.
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    asked = []

    def children(depth, parent_tokens, branching, needed=None):
        asked.append(None if needed is None else needed.tolist())
        best = children_of_logits(lambda _, tokens: logits.expand(*tokens.shape, 3))
        return best(depth, parent_tokens, branching)

    policy = TreePolicy(depth=4, branching=3, budget=3)
    anchors, limits = torch.tensor([0, 0]), torch.tensor([4, 1])
    pool = expand_children(children, anchors, policy, limits)
    # Depth 1: .6 .3 .1, the third best is .1; of the second request nothing may grow deeper.
    # Depth 2: .36 .18 .06 below the first, .18 .09 .03 below the second; the third best is now .3.
    # Depth 3: .36 alone is better than that, its children .216 .108 .036 are not.
    assert asked == [None, [[True, True], [False, False]], [[True], [False]]]
    assert [frontier.shape[1] for frontier in pool.frontiers] == [1, 2, 1]
    tree = pack(pool, 3, limits)
    assert tree.tokens.tolist() == [[0, 0, 1, 0], [0, 0, 1, 2]]
    assert tree.depths.tolist() == [[0, 1, 1, 2], [0, 1, 1, 1]]


@pytest.mark.parametrize("budget", [3, 7])
def test_a_chain_ends_where_no_request_needs_more(budget):
    base, bias, anchors = random_tables(2, 2, 7, 9, num_values=0, dtype=torch.float32)
    policy, limits = TreePolicy(7, 1, budget), torch.tensor([2, 5])
    pool = expand_children(Asked(base, bias), anchors, policy, limits)
    assert pool.tokens.shape == (2, min(budget, 5))
