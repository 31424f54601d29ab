# SPDX-License-Identifier: Apache-2.0
"""Replay chooses the very trees that serving expands, by the same operator, bit for bit."""

import pytest
import torch

import npu_ops
from tests.drafter.helpers import features, tiny_drafter
from tests.drafter.test_children import Operators
from treespark.data.batches import Batch
from treespark.drafter.auto import drafted_children
from treespark.training.losses import combine
from treespark.training.objective import (
    MicroBatch,
    Objective,
    micro_batch_terms,
    plan_micro_batch,
)
from treespark.training.replay import CoverageSettings, tree_terms
from treespark.tree.policy import TreePolicy, expand_children

POLICY = TreePolicy(depth=5, branching=4, budget=12)
TREES = {"ce": 0.0, "l1": 0.0, "confidence": 0.0, "survival": 0.1, "coverage": 0.1}
HEADS = {
    "by the operator": {"markov_rank": 16},
    "gated, by the operator": {"markov_rank": 16, "markov_head_type": "gated"},
    "from logits": {"markov_rank": 8},
    "without a head": {
        "markov_rank": 0,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    },
}


def micro_batch(grows=((True, False, True), (True, True, False))):
    """Two rows of 20 tokens with three anchors each."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 90, (2, 20), generator=generator)
    anchors = torch.tensor([[2, 7, 11], [4, 9, 17]])
    mask, keep = torch.ones_like(ids, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)
    batch = Batch([], ids, torch.tensor([20, 20]), mask, anchors, keep, torch.tensor(grows))
    return MicroBatch(batch, features(1, 2, 20), features(5, 2, 20, taps=1))


def objective(keep_logits=False):
    return Objective(POLICY, CoverageSettings(), chunk_rows=4, keep_logits=keep_logits)


def blocks(drafter, micro):
    batch = micro.batch
    return drafter.training_blocks(batch.input_ids, micro.features, batch.anchors, batch.keep)


@torch.no_grad()
def served_pool(drafter, micro):
    """The candidates that the engine expands from the hidden states of the growing anchors."""
    batch = micro.batch
    hidden = blocks(drafter, micro)[batch.tree_keep]
    anchors = batch.input_ids.gather(1, batch.anchors)[batch.tree_keep]
    return expand_children(drafted_children(drafter, hidden, anchors), anchors, POLICY)


@pytest.mark.parametrize("name", HEADS)
def test_planned_trees_are_those_of_serving_bit_for_bit(name):
    drafter, micro = tiny_drafter(**HEADS[name]), micro_batch()
    with Operators() as operators:
        pool = plan_micro_batch(drafter, micro, objective(), TREES).replay.pool
    assert ("markov_topk" in operators.names) is name.endswith("by the operator")
    served = served_pool(drafter, micro)
    for field in ("tokens", "parents", "depths", "scores", "anchors"):
        assert torch.equal(getattr(pool, field), getattr(served, field)), field
    for one, other in zip(pool.frontiers, served.frontiers, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_trees_on_the_logits_of_the_base_losses_are_those_of_serving(name, keep_logits):
    drafter, micro = tiny_drafter(**HEADS[name]), micro_batch()
    with Operators() as operators:
        found = micro_batch_terms(drafter, micro, objective(keep_logits), TREES)
    assert ("markov_topk" in operators.names) is name.endswith("by the operator")
    pool, served = found.plan.replay.pool, served_pool(drafter, micro)
    assert torch.equal(pool.tokens, served.tokens)
    assert torch.equal(pool.parents, served.parents)
    # 1e-5: float32 products with the head in blocks of other sizes.
    torch.testing.assert_close(pool.scores, served.scores, rtol=0, atol=1e-5)


def eager_logits(drafter, micro, replay):
    """Logits [T, P, V] of all expanded parents under plain autograd."""
    hidden = blocks(drafter, micro)[micro.batch.tree_keep]
    at_parents = hidden[:, replay.parent_depths]
    bias = drafter.markov_bias(replay.parents, at_parents)
    base = drafter.base_logits(at_parents)
    return base if bias is None else base + bias


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_tree_gradients_are_those_of_plain_autograd(name, keep_logits):

    drafter, micro = tiny_drafter(**HEADS[name]), micro_batch()
    trained = [p for p in drafter.parameters() if p.requires_grad]
    found = micro_batch_terms(drafter, micro, objective(keep_logits), TREES)
    replay = found.plan.replay
    z = eager_logits(drafter, micro, replay)
    wanted = tree_terms(replay, z.gather(-1, replay.tokens), z.logsumexp(-1))
    for term in ("survival", "coverage"):
        one, other = found.terms[term].value, wanted[term].value
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    totals = [combine(terms, TREES)[0] for terms in (found.terms, wanted)]
    grads = [torch.autograd.grad(t, trained, allow_unused=True) for t in totals]
    used = 0
    for one, other in zip(*grads, strict=True):
        if other is None:
            assert one is None or not one.any()
            continue
        used += bool(other.any())
        # 1e-5 of the largest entry: float32 sums in another order.
        scale = other.abs().max().clamp(min=1e-3)
        assert ((one - other).abs().max() / scale).item() < 1e-5
    assert used > 10


def test_a_plan_made_before_gives_the_losses_of_one_made_on_the_way():
    drafter, micro = tiny_drafter(markov_rank=16), micro_batch()
    plan = plan_micro_batch(drafter, micro, objective(), TREES)
    one = micro_batch_terms(drafter, micro, objective(), TREES, plan)
    two = micro_batch_terms(drafter, micro, objective(), TREES)
    for name, term in two.terms.items():
        torch.testing.assert_close(one.terms[name].value, term.value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(plan.denominators[name], term.denominator, rtol=1e-5, atol=0)


def test_where_a_kernel_serves_replay_takes_the_operator_in_half_precision(monkeypatch):
    drafter, micro = tiny_drafter(markov_rank=16).to(torch.bfloat16), micro_batch()
    for served in (False, True):
        monkeypatch.setattr(npu_ops, "has_kernel", lambda *_, served=served: served)
        with Operators() as operators:
            micro_batch_terms(drafter, micro, objective(), TREES)
        assert ("markov_topk" in operators.names) is served


@pytest.mark.parametrize("name", HEADS)
def test_a_batch_in_which_no_anchor_grows_calls_the_same_modules(name):
    """With weights spread over ranks a call of a module is a collective one."""
    drafter = tiny_drafter(**HEADS[name])
    called = []
    for part in drafter.modules():
        part.register_forward_hook(lambda module, *_: called.append(module))
    sequences = []
    for grows in (((True,) * 3,) * 2, ((False,) * 3,) * 2):
        called.clear()
        found = micro_batch_terms(drafter, micro_batch(grows), objective(), TREES)
        combine(found.terms, TREES)[0].backward()
        sequences.append([module for module in called if module is not drafter.lm_head])
    assert sequences[0] == sequences[1]
    assert found.terms["survival"].value.item() == 0.0
