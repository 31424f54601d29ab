# SPDX-License-Identifier: Apache-2.0
"""Replay reproduces the golden fixtures and the golden example with exact ties.

Tolerances: 1e-9 for float64 fixtures (same arithmetic, other summation order); 1e-5 for the golden
example (its numbers are printed with five or six digits).
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.whole_replay import Replay, replay
from treespark.training.replay import CoverageSettings
from treespark.tree.policy import TreePolicy


def table_logits(base, w1, w2):
    """NodeLogits of a vanilla Markov head on given base logits [A, B, V]."""
    return lambda d, parents: base[:, d - 1 : d] + w1[parents] @ w2.T


def replay_fixture(folder: Path):
    """Run one fixture folder: (input tensors, expected values, leaves, Replay)."""
    tensors = load_file(folder / "case.safetensors")
    expected = json.loads((folder / "expected.json").read_text())
    leaves = {
        name: tensors[name].clone().requires_grad_()
        for name in ("base_logits", "markov_w1", "markov_w2")
    }
    result = replay(
        table_logits(*leaves.values()),
        tensors["anchor_tokens"],
        TreePolicy(**expected["policy"]),
        tensors["teacher_probs"],
        tensors["valid"],
        coverage=CoverageSettings(**expected["coverage"]),
    )
    return tensors, expected, leaves, result


@pytest.fixture(scope="module")
def cases(fixtures_dir):
    folders = sorted(p for p in (fixtures_dir / "replay").iterdir() if p.is_dir())
    assert folders
    return {folder.name: replay_fixture(folder) for folder in folders}


def test_fixture_pool_and_packing_are_reproduced(cases):
    for name, (_, expected, _, result) in cases.items():
        for row, tree in enumerate(expected["trees"]):
            assert result.pool.tokens[row].tolist() == [n["token"] for n in tree["pool"]], name
            assert result.pool.parents[row].tolist() == [n["parent"] for n in tree["pool"]], name
            kept = result.packed_nodes[row].nonzero().squeeze(1).tolist()
            assert kept == sorted(tree["packed"]), name


def test_fixture_masses_and_scores_are_reproduced(cases):
    for _, expected, _, result in cases.values():
        for key, actual in (("mass", result.mass), ("score", result.pool.scores)):
            wanted = torch.tensor(
                [[n[key] for n in tree["pool"]] for tree in expected["trees"]], dtype=torch.float64
            )
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-9)


def test_fixture_sums_and_losses_are_reproduced(cases):
    for _, expected, _, result in cases.values():
        for name, term in (("survival", result.survival), ("coverage", result.coverage)):
            numerator, denominator = expected[f"{name}_numerator"], expected[f"{name}_denominator"]
            assert term.numerator.item() == pytest.approx(numerator, rel=0, abs=1e-9)
            assert term.denominator.item() == pytest.approx(denominator, rel=0, abs=1e-9)
            assert term.value.item() == pytest.approx(expected[f"{name}_loss"], rel=0, abs=1e-9)


def test_fixture_gradients_are_reproduced(cases):
    for tensors, _, leaves, result in cases.values():
        for name, term in (("survival", result.survival), ("coverage", result.coverage)):
            grads = torch.autograd.grad(term.value, list(leaves.values()), retain_graph=True)
            for leaf, grad in zip(leaves, grads, strict=True):
                wanted = tensors[f"grad_{name}.{leaf}"]
                torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-9)


# --- golden example (algorithms, appendix A) --------------------------------------------------

GOLDEN_BASE = [[2, 1, 0, -1, -2], [0, 2, 1.5, -1, 0.5], [1, 0, 0, 2, -1]]
GOLDEN_TEACHER = [
    [0.6, 0.3, 0.05, 0.03, 0.02],
    [0.1, 0.2, 0.5, 0.1, 0.1],
    [0.05, 0.05, 0.1, 0.2, 0.6],
]
GOLDEN_POOL = [
    # parent, token, depth, score, mass
    (-1, 0, 1, -0.593310, 0.6),
    (-1, 1, 1, -1.093310, 0.3),
    (0, 1, 2, -1.072952, 0.12),
    (0, 2, 2, -2.072952, 0.3),
    (1, 2, 2, -1.710735, 0.15),
    (1, 1, 2, -2.210735, 0.06),
    (2, 3, 3, -1.725736, 0.024),
    (2, 0, 3, -2.725736, 0.006),
    (4, 0, 3, -2.765428, 0.0075),
    (4, 3, 3, -2.765428, 0.03),
]


def golden(teacher=None, **options) -> tuple[torch.Tensor, Replay]:
    base = torch.tensor([GOLDEN_BASE], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(5, 5, dtype=torch.float64)
    bias[0, 1], bias[1, 2], bias[2, 3], bias[3, 4] = 0.5, 1.0, -1.0, 2.0
    if teacher is None:
        teacher = torch.tensor([GOLDEN_TEACHER], dtype=torch.float64)
    result = replay(
        table_logits(base, bias, torch.eye(5, dtype=torch.float64)),
        torch.tensor([0]),
        TreePolicy(depth=3, branching=2, budget=4),
        teacher,
        torch.ones(1, 3, dtype=torch.bool),
        coverage=CoverageSettings(top_j=2),
        **options,
    )
    return base, result


def test_golden_pool_frontiers_and_packing():
    _, result = golden()
    pool = result.pool
    got = zip(
        pool.parents[0].tolist(), pool.tokens[0].tolist(), pool.depths[0].tolist(), strict=True
    )
    assert list(got) == [node[:3] for node in GOLDEN_POOL]
    wanted = torch.tensor([node[3:] for node in GOLDEN_POOL], dtype=torch.float64)
    torch.testing.assert_close(
        torch.stack([pool.scores[0], result.mass[0]], 1), wanted, rtol=0, atol=1e-6
    )
    assert [f[0].tolist() for f in pool.frontiers] == [[-1], [0, 1], [2, 4]]
    assert result.packed_nodes[0].nonzero().squeeze(1).tolist() == [0, 1, 2, 4]


def test_golden_losses():
    _, result = golden()
    assert result.survival.numerator.item() == pytest.approx(0.834150, abs=1e-6)
    assert result.survival.denominator.item() == pytest.approx(1.17, abs=1e-12)
    assert result.survival.value.item() == pytest.approx(0.712948, abs=2e-6)
    assert result.coverage.numerator.item() == pytest.approx(3.644677, abs=1e-6)
    assert result.coverage.denominator.item() == pytest.approx(2.960770, abs=1e-6)
    assert result.coverage.value.item() == pytest.approx(1.230990, abs=2e-6)


def test_golden_gradients_fail_for_any_other_tie_rule():
    base, result = golden()
    survival = torch.autograd.grad(result.survival.value, base, retain_graph=True)[0]
    coverage = torch.autograd.grad(result.coverage.value, base)[0]
    wanted_survival = torch.tensor(
        [
            [-0.08782, 0.00136, 0.05752, 0.02116, 0.00778],
            [0.01089, 0.00286, -0.0357, 0.00401, 0.01795],
            [0, 0, 0, 0, 0],
        ],
        dtype=torch.float64,
    )
    wanted_coverage = torch.tensor(
        [
            [-0.20265, 0.20265, 0, 0, 0],
            [0, 0.13152, -0.13152, 0, 0],
            [0.12291, 0, 0, 0.12291, -0.24583],
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(survival[0], wanted_survival, rtol=0, atol=1e-5)
    torch.testing.assert_close(coverage[0], wanted_coverage, rtol=0, atol=1e-5)
