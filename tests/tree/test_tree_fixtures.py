# SPDX-License-Identifier: Apache-2.0
"""The golden trees: the worked example of the algorithms text and the replay fixtures."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tree.tree_oracle import pool_rows, table_logits
from treespark.tree import TreePolicy, expand, pack


def pytest_generate_tests(metafunc):
    """Run the replay tests on every case below the fixtures folder."""
    if "replay_case" in metafunc.fixturenames:
        folder = Path(metafunc.config.getoption("--fixtures")) / "replay"
        cases = sorted(path for path in folder.glob("*") if (path / "case.safetensors").exists())
        metafunc.parametrize("replay_case", cases, ids=[case.name for case in cases])


def _worked_example():
    base = torch.tensor(
        [[[2, 1, 0, -1, -2], [0, 2, 1.5, -1, 0.5], [1, 0, 0, 2, -1]]], dtype=torch.float64
    )
    bias = torch.zeros(5, 5, dtype=torch.float64)
    bias[0, 1], bias[1, 2], bias[2, 3], bias[3, 4] = 0.5, 1, -1, 2
    return expand(table_logits(base, bias), torch.tensor([0]), TreePolicy(3, 2, 4))


def test_worked_example_pool():
    pool = _worked_example()
    assert pool.parents.tolist() == [[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]]
    assert pool.tokens.tolist() == [[0, 1, 1, 2, 2, 1, 3, 0, 0, 3]]
    assert pool.depths.tolist() == [[1, 1, 2, 2, 2, 2, 3, 3, 3, 3]]
    scores = [-0.593310, -1.093310, -1.072952, -2.072952, -1.710735]
    scores += [-2.210735, -1.725736, -2.725736, -2.765428, -2.765428]
    # 1e-6: the text prints six decimals.
    expected = torch.tensor([scores], dtype=torch.float64)
    torch.testing.assert_close(pool.scores, expected, rtol=0, atol=1e-6)


def test_worked_example_frontiers():
    frontiers = [frontier[0].tolist() for frontier in _worked_example().frontiers]
    assert frontiers == [[-1], [0, 1], [2, 4]]


def test_worked_example_packed_order():
    pool = _worked_example()
    tree = pack(pool, 4)
    assert tree.pool_index.tolist() == [[-1, 0, 1, 2, 4]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2]]
    assert tree.tokens.tolist() == [[0, 0, 1, 1, 2]]
    by_score = [pack(pool, budget).pool_index[0].tolist() for budget in (1, 2, 3, 4)]
    assert by_score == [[-1, 0], [-1, 0, 2], [-1, 0, 1, 2], [-1, 0, 1, 2, 4]]


def test_worked_example_ties_at_depth_three():
    # Equal scores 8 and 9: the children 0 and 3 tie, and so does token 0 against 2 below node 2.
    pool = _worked_example()
    assert pool.scores[0, 8] == pool.scores[0, 9]
    assert pack(pool, 9).pool_index[0].tolist()[1:] == [0, 1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def replay(replay_case):
    """Pool, expected trees and policy of one replay case."""
    case = load_file(replay_case / "case.safetensors")
    expected = json.loads((replay_case / "expected.json").read_text())
    bias = case["markov_w1"] @ case["markov_w2"].T
    policy = TreePolicy(**expected["policy"])
    logits = table_logits(case["base_logits"], bias)
    return expand(logits, case["anchor_tokens"], policy), expected["trees"], policy


def test_replay_pools_are_reproduced(replay):
    pool, trees, _ = replay
    assert pool.scores.dtype == torch.float64
    assert len(trees) == pool.tokens.shape[0]
    for nodes, tree in zip(pool_rows(pool), trees, strict=True):
        expected = [(n["parent"], n["token"], n["depth"]) for n in tree["pool"]]
        assert [(n.parent, n.token, n.depth) for n in nodes] == expected
        scores = torch.tensor([n["score"] for n in tree["pool"]], dtype=torch.float64)
        actual = torch.tensor([n.score for n in nodes], dtype=torch.float64)
        # 1e-9: float64 on both sides, sums of at most seven terms.
        torch.testing.assert_close(actual, scores, rtol=0, atol=1e-9)


def test_replay_packed_sets_are_reproduced(replay):
    pool, trees, policy = replay
    packed = pack(pool, policy.budget)
    packed.check()
    for kept, tree in zip(packed.pool_index.tolist(), trees, strict=True):
        assert [index for index in kept if index >= 0] == sorted(tree["packed"])
