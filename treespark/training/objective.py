# SPDX-License-Identifier: Apache-2.0
"""One micro-batch: a drafter pass, the base losses on its blocks, and the tree losses by replay.

Shapes: S rows, L padded length, A anchors, B draft depths, T tree anchors of the micro-batch, n
valid (anchor, depth) pairs, u unique teacher positions, H hidden size, m taps, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treespark.training.diagnostics import overlap_per_depth
from treespark.training.fused import vocab_losses
from treespark.training.losses import (
    LossTerm,
    base_terms,
    depth_weights,
    overlap_rows,
    validity,
    weighted_term,
)
from treespark.training.replay import (
    CoverageSettings,
    ReplayPlan,
    depth_logits,
    plan_replay,
    teacher_from_hidden,
    tree_terms,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from treespark.data.batches import Batch
    from treespark.drafter.auto import AnyDrafter
    from treespark.tree.policy import NodeLogits, TreePolicy

Terms = dict[str, LossTerm]


@dataclass(frozen=True)
class Objective:
    """What the losses need besides the batch; weights of 0 skip the work of their term."""

    policy: TreePolicy
    coverage: CoverageSettings
    confidence_stop_gradient: bool = False
    chunk_rows: int = 32
    # stored logits save a third of the time and cost [n + u, V] in the head's dtype
    keep_logits: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """Rows with the target's view of them: features [S, L, m*H] and last_hidden [S, L, H]."""

    batch: Batch
    features: Tensor
    last_hidden: Tensor


@dataclass(frozen=True)
class MicroBatchPlan:
    """What is known of a micro-batch before its losses: every term's denominator, and the trees.

    denominators: name -> scalar, in the order of the loss weights, also for terms without rows.
    replay: None where no tree loss is active or no anchor grows a tree.
    """

    denominators: dict[str, Tensor]
    replay: ReplayPlan | None


@dataclass(frozen=True)
class MicroBatchTerms:
    """terms: scalars.  counters: per-depth diagnostics, pairs of [B].  plan: what they rest on."""

    terms: Terms
    counters: Terms
    plan: MicroBatchPlan


def plan_micro_batch(
    drafter: AnyDrafter,
    micro: MicroBatch,
    objective: Objective,
    weights: Mapping[str, float],
) -> MicroBatchPlan:
    """Return the plan of a micro-batch; a backbone pass without a graph if a tree loss is active.

    For a step of several micro-batches: each needs the denominators of all before its backward.
    """
    hidden = None
    if _grows(micro.batch, weights):
        with torch.no_grad():
            hidden = _blocks(drafter, micro)
    return _plan(drafter, hidden, micro, objective, weights)


def micro_batch_terms(
    drafter: AnyDrafter,
    micro: MicroBatch,
    objective: Objective,
    weights: Mapping[str, float],
    plan: MicroBatchPlan | None = None,
) -> MicroBatchTerms:
    """Return the losses of a micro-batch.

    One backbone pass serves both kinds of loss and the target is not called. plan None makes it
    from that pass.
    """
    hidden = _blocks(drafter, micro)
    if plan is None:
        plan = _plan(drafter, hidden.detach(), micro, objective, weights)
    rows = _Rows.of(micro.batch, drafter.config.block_size)
    terms, counters = {}, {}
    if not weights.get("soft_ce") or weights["ce"] or weights["l1"] or weights["confidence"]:
        terms, counters = _base(drafter, hidden, rows, micro.last_hidden, objective, weights)
    if weights.get("soft_ce"):
        soft_terms, overlap = _soft(drafter, hidden, rows, micro, objective)
        terms, counters = terms | soft_terms, counters | overlap
    if plan.replay is not None:
        grows = micro.batch.tree_keep
        terms |= tree_terms(plan.replay, _node_logits(drafter, hidden[grows], objective))
        counters |= plan.replay.diagnostics
    return MicroBatchTerms(terms, counters, plan)


def _blocks(drafter: AnyDrafter, micro: MicroBatch) -> Tensor:
    batch = micro.batch
    return drafter.training_blocks(batch.input_ids, micro.features, batch.anchors, batch.keep)


def _grows(batch: Batch, weights: Mapping[str, float]) -> bool:
    return bool((weights["survival"] or weights["coverage"]) and batch.tree_keep.any())


def _plan(
    drafter: AnyDrafter,
    hidden: Tensor | None,
    micro: MicroBatch,
    objective: Objective,
    weights: Mapping[str, float],
) -> MicroBatchPlan:
    """Plan from block outputs [S, A, B, H] without a graph; None where no tree grows."""
    batch, depth = micro.batch, objective.policy.depth
    rows = _Rows.of(batch, drafter.config.block_size)
    replay, trees = None, {}
    if _grows(batch, weights):
        assert hidden is not None
        grows = batch.tree_keep
        positions = rows.flat_position()[grows]
        replay = plan_replay(
            _node_logits(drafter, hidden[grows], objective),
            rows.parents[grows][:, 0],
            objective.policy,
            teacher_from_hidden(micro.last_hidden.flatten(0, 1), positions, drafter.lm_head.weight),
            rows.valid[grows][:, :depth],
            labels=rows.labels[grows][:, :depth],
            coverage=objective.coverage,
        )
        trees = replay.denominators()
    base = depth_weights(rows.valid, objective.coverage.gamma).sum()
    zero = torch.zeros_like(base)
    # Soft cross-entropy is a mean over all tokens, supervised or not (algorithms 2.7).
    others = {"survival": zero, "coverage": zero, "soft_ce": batch.lengths.sum().to(base)} | trees
    return MicroBatchPlan({name: others.get(name, base) for name in weights}, replay)


@dataclass(frozen=True)
class _Rows:
    """Token ids and validity of every (anchor, depth) pair, [S, A, B] each; `position` is a + d -
    1.
    """

    valid: Tensor
    parents: Tensor
    labels: Tensor
    position: Tensor
    length: int

    @classmethod
    def of(cls, batch: Batch, depth: int) -> _Rows:
        length = batch.input_ids.shape[1]
        position = batch.anchors.unsqueeze(-1) + torch.arange(depth, device=batch.anchors.device)

        def tokens(at: Tensor) -> Tensor:
            return batch.input_ids.gather(1, at.clamp(max=length - 1).flatten(1)).view_as(at)

        valid = validity(batch.loss_mask, batch.anchors, batch.keep, depth)
        return cls(
            valid, tokens(position), tokens(position + 1), position.clamp(max=length - 1), length
        )

    def flat_position(self) -> Tensor:
        """Position in the micro-batch flattened to [S * L]."""
        row = torch.arange(self.position.shape[0], device=self.position.device)
        return self.position + (row * self.length).view(-1, 1, 1)


def _base(
    drafter: AnyDrafter,
    hidden: Tensor,
    rows: _Rows,
    last_hidden: Tensor,
    objective: Objective,
    weights: Mapping[str, float],
) -> tuple[Terms, Terms]:
    valid, head = rows.valid, drafter.markov_head
    latent = None if head is None else head.latent(rows.parents, hidden)[valid]
    row_weights = depth_weights(valid, objective.coverage.gamma)[valid]
    with_teacher = bool(weights["l1"] or weights["confidence"])
    teacher_hidden = teacher_row = None
    if with_teacher:
        positions, teacher_row = rows.flat_position()[valid].unique(return_inverse=True)
        teacher_hidden = last_hidden.flatten(0, 1)[positions]
    ce, l1 = vocab_losses(
        hidden[valid],
        latent,
        drafter.lm_head.weight,
        None if head is None else head.markov_w2.weight,
        teacher_hidden,
        teacher_row,
        rows.labels[valid],
        chunk_rows=objective.chunk_rows,
        keep_logits=objective.keep_logits,
    )
    if not with_teacher:
        return base_terms(ce, None, row_weights), {}
    confidence = None
    if weights["confidence"] and drafter.confidence_head is not None:
        inputs = hidden[valid]
        if objective.confidence_stop_gradient:
            inputs = inputs.detach()
        confidence = drafter.confidence_logits(inputs, rows.parents[valid])
    overlap = torch.zeros_like(valid, dtype=ce.dtype)
    overlap[valid] = overlap_rows(l1)
    return base_terms(ce, l1, row_weights, confidence), {
        "overlap": overlap_per_depth(overlap, valid)
    }


def _soft(
    drafter: AnyDrafter, hidden: Tensor, rows: _Rows, micro: MicroBatch, objective: Objective
) -> tuple[Terms, Terms]:
    """Cross-entropy with the target's distributions, over all tokens (algorithms 2.7)."""
    valid, head = rows.valid, drafter.markov_head
    positions, teacher_row = rows.flat_position()[valid].unique(return_inverse=True)
    soft_ce, l1 = vocab_losses(
        hidden[valid],
        None if head is None else head.latent(rows.parents, hidden)[valid],
        drafter.lm_head.weight,
        None if head is None else head.markov_w2.weight,
        micro.last_hidden.flatten(0, 1)[positions],
        teacher_row,
        None,
        chunk_rows=objective.chunk_rows,
        keep_logits=objective.keep_logits,
    )
    row_weights = depth_weights(valid, objective.coverage.gamma)[valid]
    numerator = weighted_term(soft_ce, row_weights).numerator
    overlap = torch.zeros_like(valid, dtype=l1.dtype)
    overlap[valid] = overlap_rows(l1)
    return (
        {"soft_ce": LossTerm(numerator, micro.batch.lengths.sum().to(numerator))},
        {"overlap": overlap_per_depth(overlap, valid)},
    )


def _node_logits(drafter: AnyDrafter, hidden: Tensor, objective: Objective) -> NodeLogits:
    """Logits per depth and parent from the block outputs [T, B, H] of the anchors that grow."""
    head = drafter.markov_head
    return depth_logits(
        hidden,
        drafter.lm_head.weight,
        None if head is None else head.latent,
        None if head is None else head.markov_w2.weight,
        keep_base=objective.keep_logits,
    )
