# SPDX-License-Identifier: Apache-2.0
"""Why a wanted token was missing, and what the chain would have added, on hand-made drafts."""

import pytest
import torch

from treespark.bench.suite_records import CUT, DEPTH_LIMIT, NOT_IN_TOP_K, PRUNED, WRONG_PARENT
from treespark.bench.suite_trace import Draft, chain_committed, missing_reason
from treespark.tree.policy import TreePolicy, expand, pack

# Two children per node, two nodes expanded per depth, three kept. Probabilities by depth of the
# tokens 0..4, whatever the parent.
PROBABILITIES = torch.tensor(
    [[0.5, 0.4, 0.05, 0.03, 0.02], [0.05, 0.03, 0.5, 0.4, 0.02], [0.02, 0.5, 0.05, 0.03, 0.4]]
)
POLICY = TreePolicy(depth=3, branching=2, budget=3)


def _logits(depth, parents):
    return PROBABILITIES[depth - 1].log().expand(1, parents.shape[1], -1)


def _drafted(max_depth=3):
    """Kept: 0 (.5), 1 (.4), and 2 below 0 (.25); the frontier of depth 2 is 0-2 and one of .2."""
    pool = expand(_logits, torch.tensor([4]), POLICY)
    tree = pack(pool, POLICY.budget)
    assert tree.tokens.tolist() == [[4, 0, 1, 2]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1]]
    return tree, Draft(pool, [0, 2, 1][:max_depth], max_depth)


@pytest.mark.parametrize(
    ("node", "wanted", "reason"),
    [
        # Neither child of the anchor.
        (0, 3, NOT_IN_TOP_K),
        # 0-3 is a candidate of probability .2.
        (1, 3, CUT),
        (1, 4, NOT_IN_TOP_K),
        # 2 stands below 0, but is wanted below 1, where it is a candidate as well.
        (2, 2, CUT),
        # 0-2-1 is a candidate.
        (3, 1, CUT),
        (3, 0, NOT_IN_TOP_K),
    ],
)
def test_the_reason_of_a_missing_token(node, wanted, reason):
    tree, draft = _drafted()
    assert missing_reason(tree, draft, node, wanted) == reason


def test_a_node_that_was_not_expanded_was_pruned():
    pool = expand(_logits, torch.tensor([4]), TreePolicy(3, 2, 5, frontier=1))
    tree = pack(pool, 4)
    draft = Draft(pool, [0, 2, 1], 3)
    # Node 2 is token 1 at depth 1, which the frontier of one node left out.
    assert tree.tokens[0].tolist() == [4, 0, 1, 2, 3]
    assert tree.parents[0].tolist() == [-1, 0, 0, 1, 1]
    assert missing_reason(tree, draft, 2, 4) == PRUNED
    # The tree has 2 at depth 2, below the other node.
    assert missing_reason(tree, draft, 2, 2) == WRONG_PARENT


def test_nothing_is_missing_beyond_the_depth_that_could_be_of_use():
    tree, draft = _drafted(max_depth=2)
    assert missing_reason(tree, draft, 3, 1) == DEPTH_LIMIT
    assert missing_reason(tree, None, 0, 3) == DEPTH_LIMIT


@pytest.mark.parametrize(
    ("rest", "committed"),
    [
        ([0, 2, 1, 9, 9], 4),
        ([0, 2, 9, 9], 3),
        ([9, 9], 1),
        # The output ends inside the chain, at a stop or at the limit.
        ([0, 2], 2),
        ([0, 2, 1], 3),
    ],
)
def test_the_chain_adds_what_it_shares_with_the_output_and_a_bonus(rest, committed):
    _, draft = _drafted()
    assert chain_committed(draft, rest) == committed


def test_without_a_draft_one_token_is_added():
    assert chain_committed(None, [5]) == 1
