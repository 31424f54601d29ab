# SPDX-License-Identifier: Apache-2.0
"""Trees of the baselines: golden trees of public implementations, and the definition by a heap."""

import heapq
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tree.tree_oracle import table_logits
from treespark.errors import UsageError
from treespark.tree import TreePolicy, expand, pack
from treespark.tree.builder import (
    BUDGET,
    MARGINAL,
    SURVIVAL,
    THRESHOLD,
    TreeBuilder,
    marginal_children,
    surviving_children,
)
from treespark.tree.policy import Children, children_of_logits


def pytest_generate_tests(metafunc):
    """Run the golden tests on every tree below the fixtures folder."""
    folder = Path(metafunc.config.getoption("--fixtures")) / "trees"
    for kind in ("calibrated", "marginal_best_first"):
        if kind in metafunc.fixturenames and (folder / "trees.json").exists():
            cases = json.loads((folder / "trees.json").read_text())[kind]
            tables = load_file(folder / "tables.safetensors")
            pairs = [(case, tables) for case in cases]
            metafunc.parametrize(kind, pairs, ids=[f"{kind}-{i}" for i in range(len(pairs))])


def _anchors(token=0):
    return torch.tensor([token])


def _path(tokens, parents, node, root):
    path = []
    while node != root:
        path.append(tokens[node])
        node = parents[node]
    return tuple(reversed(path))


def _golden_paths(case):
    """Paths of a golden tree in creation order."""
    return [_path(case["tokens"], case["parents"], node, -1) for node in range(len(case["tokens"]))]


def _scored_paths(tree):
    """Paths of a packed tree, the best first, with their scores."""
    tree.check()
    valid = tree.valid[0].nonzero().flatten().tolist()[1:]
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    scores = tree.scores[0].tolist()
    ranked = sorted(valid, key=lambda node: -scores[node])
    return [(_path(tokens, parents, node, 0), scores[node]) for node in ranked]


def _assert_same_tree(tree, case):
    golden, ours = _golden_paths(case), _scored_paths(tree)
    assert {path for path, _ in ours} == set(golden)
    scores = dict(ours)
    for place, (path, score) in enumerate(ours):
        # Order is free between scores closer than 1e-5, as the fixture says.
        assert path == golden[place] or abs(scores[golden[place]] - score) < 1e-5


def _build(builder, children, policy, anchor=0):
    anchors = _anchors(anchor)
    pool = builder.expand(children, anchors, policy)
    return builder.pack(pool, policy, torch.tensor([policy.depth]))


def test_trees_over_marginals_are_the_golden_best_first_trees(marginal_best_first):
    case, tables = marginal_best_first
    logits = tables[f"U{case['table']}"][None]
    size = case["budget"]
    policy = TreePolicy(logits.shape[1], min(size, logits.shape[2]), size)
    builder = TreeBuilder(proposal=MARGINAL, stop=BUDGET)
    _assert_same_tree(_build(builder, marginal_children(logits), policy), case)


def test_trees_by_calibrated_survival_are_the_golden_ones(calibrated):
    case, tables = calibrated
    logits = tables[f"U{case['table']}"][None]
    w1, w2 = (tables[f"W{i}_{case['table']}"] for i in (1, 2))
    children = children_of_logits(table_logits(logits, w1 @ w2.T))
    policy = TreePolicy(logits.shape[1], case["branch_cap"], case["node_cap"])
    theta = case["theta"] or None
    builder = TreeBuilder(
        priority=SURVIVAL,
        stop=BUDGET if theta is None else THRESHOLD,
        threshold=theta,
        alpha=case["alpha"],
        beta=case["beta"],
    )
    _assert_same_tree(_build(builder, children, policy, case["anchor"]), case)


def _random_children(seed, vocab=6, depth=4):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(1, depth, vocab, generator=generator)
    bias = torch.randn(vocab, vocab, generator=generator)
    return children_of_logits(table_logits(base, bias)), base, bias


def _heap_tree(base, bias, anchor, branching, budget, threshold):
    """The best-first definition, node by node: [(path, log-probability)]."""
    depth, kept, created = base.shape[1], [], 0
    heap = []

    def push(path, score):
        nonlocal created
        parent = path[-1] if path else anchor
        log_probs = (base[0, len(path)] + bias[parent]).log_softmax(-1)
        for token in log_probs.argsort(descending=True)[:branching].tolist():
            created += 1
            child = score + log_probs[token].item()
            heapq.heappush(heap, (-child, created, (*path, token)))

    push((), 0.0)
    while heap and len(kept) < budget:
        negative, _, path = heapq.heappop(heap)
        if threshold is not None and -negative < math.log(threshold):
            break
        kept.append((path, -negative))
        if len(path) < depth:
            push(path, -negative)
    return kept


@pytest.mark.parametrize("threshold", [None, 0.05])
@pytest.mark.parametrize("seed", range(5))
def test_growth_without_a_frontier_is_what_a_heap_yields(seed, threshold):
    children, base, bias = _random_children(seed)
    stop = BUDGET if threshold is None else THRESHOLD
    builder = TreeBuilder(stop=stop, threshold=threshold)
    ours = _scored_paths(_build(builder, children, TreePolicy(4, 3, 20)))
    expected = _heap_tree(base, bias, 0, 3, 20, threshold)
    assert [path for path, _ in ours] == [path for path, _ in expected]
    # 1e-5: sums of four float32 log-probabilities.
    for (_, score), (_, other) in zip(ours, expected, strict=True):
        assert score == pytest.approx(other, abs=1e-5)


def test_the_default_builder_is_the_policy_itself():
    children, base, bias = _random_children(7)
    policy = TreePolicy(4, 3, 9)
    tree = _build(TreeBuilder(), children, policy)
    expected = pack(expand(table_logits(base, bias), _anchors(), policy), 9)
    assert torch.equal(tree.pool_index, expected.pool_index)
    assert torch.equal(tree.scores, expected.scores)


def test_a_limit_on_depths_cuts_thresholded_trees_too():
    children, _, _ = _random_children(1)
    builder = TreeBuilder(stop=THRESHOLD, threshold=0.001)
    pool = builder.expand(children, _anchors(), TreePolicy(4, 3, 30))
    for limit in range(4):
        tree = builder.pack(pool, TreePolicy(4, 3, 30), torch.tensor([limit]))
        tree.check()
        assert int(tree.depths.max()) == limit


def test_survival_of_an_edge_is_the_calibrated_probability():
    probabilities = torch.tensor([[[0.9, 0.3, 0.01, 1.0, 0.0]]])

    def given(depth, parents, branching, needed):
        tokens, no_rest = torch.arange(5)[None, None], torch.zeros(1, 1)
        return Children(tokens, probabilities.log(), no_rest)

    scores = surviving_children(given, 0.5, -0.25)(1, _anchors()[None], 5).log_probs.exp()
    odds = [0.9 / 0.1, 0.3 / 0.7, 0.01 / 0.99]
    expected = [1 / (1 + math.exp(0.25) * odd**-0.5) for odd in odds] + [1.0, 0.0]
    assert scores.flatten().tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proposal": "joint"}, "proposal joint: allowed: conditioned, marginal"),
        ({"priority": "depth"}, "priority depth: allowed: probability, survival"),
        ({"stop": "never"}, "stop never: allowed: frontier, budget, threshold"),
        ({"threshold": 0.1}, "threshold 0.1: goes with stop threshold only"),
        ({"stop": THRESHOLD}, "threshold None: goes with stop threshold only"),
        ({"stop": THRESHOLD, "threshold": 1.5}, "threshold 1.5: allowed: numbers between 0 and 1"),
        ({"alpha": 0.0}, "alpha 0.0, beta -0.4587: need finite numbers, alpha > 0"),
    ],
)
def test_a_builder_refuses_what_it_does_not_know(options, message):
    with pytest.raises(UsageError, match=f"^{message}$"):
        TreeBuilder(**options)


def test_a_budget_beyond_best_first_growth_is_refused():
    with pytest.raises(UsageError, match=r"--budget 65: allowed: 0\.\.64 with stop budget"):
        TreeBuilder(stop=BUDGET).shape(TreePolicy(7, 4, 65))
