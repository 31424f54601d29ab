# SPDX-License-Identifier: Apache-2.0
"""Every way to grow drafts gives the target's own text, and grows what it says."""

import dataclasses
import functools

import pytest
import torch

from tests.serving_world import (
    answers_of,
    drafter,
    eagle3_drafter,
    prompts,
    requests_for,
    run,
    world,
)
from treespark.drafter.growing import Growth, confident_depths
from treespark.errors import UsageError
from treespark.serving.engine import Engine
from treespark.tree.builder import BUDGET, MARGINAL, SURVIVAL, THRESHOLD, TreeBuilder
from treespark.tree.policy import TreePolicy

CHAIN, TREE = TreePolicy(5, 1, 5), TreePolicy(5, 3, 12)
GROWTHS = {
    "frontier": (Growth(), TREE),
    "best-first": (Growth(TreeBuilder(stop=BUDGET)), TREE),
    "ddtree": (Growth(TreeBuilder(proposal=MARGINAL, stop=BUDGET)), TreePolicy(5, 12, 12)),
    "calibrated": (
        Growth(TreeBuilder(priority=SURVIVAL, stop=THRESHOLD, threshold=0.2)),
        TreePolicy(5, 8, 16),
    ),
    "quota": (Growth(TreeBuilder(priority=SURVIVAL, stop=BUDGET)), TREE),
    "chain": (Growth(), CHAIN),
    "marginal chain": (Growth(TreeBuilder(proposal=MARGINAL)), CHAIN),
    "confident chain": (Growth(min_confidence=0.5), CHAIN),
}


@pytest.mark.parametrize("shifted", [True, False], ids=["shifted", "in-place"])
@pytest.mark.parametrize("name", GROWTHS)
def test_greedy_text_does_not_depend_on_how_drafts_grow(name, shifted):
    growth, policy = GROWTHS[name]
    target = world(seed=2).target
    made = drafter(target, anchor_predicts_next=shifted)
    many = prompts(4, seed=5)
    plain = answers_of(run(Engine(target, max_num_seqs=4), requests_for(many, 24)))
    engine = Engine(target, made, policy, growth=growth, max_num_seqs=2)
    assert answers_of(run(engine, requests_for(many, 24))) == plain
    assert engine.totals.num_draft_tokens > 0


def _drafted(made, length=3):
    """Hidden states of one block behind `length` committed positions, and its anchor."""
    cache = made.new_cache(1, 64)
    torch.manual_seed(9)
    features = torch.randn(length, made.config.feature_size)
    made.extend_context(cache, 0, 0, features, torch.arange(length))
    anchors = torch.tensor([7])
    return made.draft_block(cache, [0], [length], anchors), anchors


@pytest.mark.parametrize("name", GROWTHS)
def test_what_cannot_be_packed_is_proposed_only_if_asked_for(name):
    growth, policy = GROWTHS[name]
    made = drafter(world(seed=2).target)
    hidden, anchors = _drafted(made)
    few, limits = dataclasses.replace(policy, budget=4), torch.tensor([4])
    pool, tree = growth.grow(made, hidden, anchors, few, limits)
    whole = dataclasses.replace(growth, whole_pool=True)
    everything, same = whole.grow(made, hidden, anchors, few, limits)
    assert pool.tokens.shape[1] < everything.tokens.shape[1]
    for part in ("tokens", "parents", "depths", "valid"):
        assert torch.equal(getattr(tree, part), getattr(same, part))
    # Products of fewer rows round differently.
    torch.testing.assert_close(tree.scores, same.scores)


@pytest.mark.parametrize("budget", [0, 1, 3, 5, 8])
@pytest.mark.parametrize("name", GROWTHS)
def test_no_logits_are_made_of_depths_that_the_budget_cannot_reach(name, budget, monkeypatch):
    growth, policy = GROWTHS[name]
    made, asked = drafter(world(seed=2).target), []
    hidden, anchors = _drafted(made)
    base_logits = made.base_logits
    monkeypatch.setattr(made, "base_logits", lambda h: asked.append(h.shape[1]) or base_logits(h))
    few, limits = dataclasses.replace(policy, budget=budget), torch.tensor([policy.depth])
    _, tree = growth.grow(made, hidden, anchors, few, limits)
    whole = dataclasses.replace(growth, whole_pool=True)
    _, same = whole.grow(made, hidden, anchors, few, limits)
    assert asked == [min(policy.depth, max(budget, 1)), policy.depth]
    for part in ("tokens", "parents", "depths", "valid"):
        assert torch.equal(getattr(tree, part), getattr(same, part))


def test_a_marginal_chain_takes_the_best_token_of_each_depth():
    made = drafter(world(seed=2).target)
    hidden, anchors = _drafted(made)
    growth = Growth(TreeBuilder(proposal=MARGINAL))
    _, tree = growth.grow(made, hidden, anchors, CHAIN, torch.tensor([5]))
    assert tree.tokens[0, 1:].tolist() == made.base_logits(hidden)[0].argmax(-1).tolist()
    conditioned, _ = made.chain(hidden, anchors)
    # The Markov head of this drafter does change the chain.
    assert tree.tokens[0, 1:].tolist() != conditioned[0].tolist()


def test_a_chain_ends_before_the_first_unsure_draft():
    made = drafter(world(seed=2).target)
    hidden, anchors = _drafted(made)
    tokens, _ = made.chain(hidden, anchors)
    parents = torch.cat([anchors[:, None], tokens[:, :-1]], 1)
    confidence = made.confidence_logits(hidden, parents).sigmoid()[0].tolist()
    for threshold in (*confidence, min(confidence) / 2, 1.0):
        expected = next((d for d, c in enumerate(confidence) if c < threshold), 5)
        growth = Growth(min_confidence=threshold)
        pool, tree = growth.grow(made, hidden, anchors, CHAIN, torch.tensor([5]))
        assert confident_depths(made, hidden, anchors, pool, threshold).tolist() == [expected]
        assert tree.num_nodes.tolist() == [expected]
        assert tree.tokens[0, 1 : expected + 1].tolist() == tokens[0, :expected].tolist()


@pytest.mark.parametrize("policy", [TreePolicy(3, 1, 3), TreePolicy(5, 1, 3), TreePolicy(3, 1, 5)])
@pytest.mark.parametrize(
    "make", [drafter, eagle3_drafter, functools.partial(drafter, markov_head_type="rnn")]
)
def test_a_short_chain_is_the_beginning_of_the_whole_one(make, policy):
    made = make(world(seed=2).target)
    hidden, anchors = _drafted(made)
    tokens, _ = made.chain(hidden, anchors)
    _, tree = Growth().grow(made, hidden, anchors, policy, torch.tensor([5]))
    assert tree.tokens[0][tree.valid[0]].tolist() == [7, *tokens[0, :3].tolist()]


def test_a_limit_below_the_confident_depth_stands():
    made = drafter(world(seed=2).target)
    hidden, anchors = _drafted(made)
    _, tree = Growth(min_confidence=1e-9).grow(made, hidden, anchors, CHAIN, torch.tensor([2]))
    assert tree.num_nodes.tolist() == [2]


@pytest.mark.parametrize(
    ("growth", "policy", "make", "message"),
    [
        (Growth(TreeBuilder(proposal=MARGINAL)), CHAIN, eagle3_drafter, "needs a block drafter"),
        (Growth(min_confidence=0.5), TREE, drafter, "cuts chains, use branching 1"),
        (Growth(min_confidence=0.5), CHAIN, eagle3_drafter, "has no confidence head"),
        (Growth(min_confidence=1.5), CHAIN, drafter, r"allowed: numbers in 0\.\.1"),
        (Growth(TreeBuilder(stop=BUDGET)), TreePolicy(5, 3, 65), drafter, r"allowed: 0\.\.64"),
    ],
)
def test_an_engine_refuses_growth_that_its_drafter_has_not(growth, policy, make, message):
    target = world(seed=2).target
    with pytest.raises(UsageError, match=message):
        Engine(target, make(target), policy, growth=growth)
