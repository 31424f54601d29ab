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
from treespark.training.fused import VocabLosses, vocab_losses, vocab_losses_sharing
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
    teacher_from_logits,
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
    # stored logits save a third of the time, and trees use those of their blocks, too; they cost
    # [n + u, V] in the head's dtype, and those of T trees [T * parents of a tree, V] in float32
    keep_logits: bool = False
    # whether micro-batches have anchors that grow trees; where one has none by chance, the same
    # modules are called with nothing, because with ZeRO 3 a module call is a collective one
    grows_trees: bool = True


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
    if _grows(objective, weights):
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
    hidden, grows = _blocks(drafter, micro), micro.batch.tree_keep
    rows = _Rows.of(micro.batch, drafter.config.block_size)
    shares = grows if objective.keep_logits and _grows(objective, weights) else None
    terms, counters, shared = {}, {}, None
    soft = bool(weights.get("soft_ce"))
    if not soft or shares is not None or any(weights[n] for n in ("ce", "l1", "confidence")):
        terms, counters, shared = _base(drafter, hidden, rows, shares, micro, objective, weights)
    if soft:
        soft_terms, overlap = _soft(drafter, hidden, rows, micro, objective)
        terms, counters = terms | soft_terms, counters | overlap
    if plan is None:
        plan = _plan(drafter, hidden.detach(), micro, objective, weights, shared)
    if plan.replay is not None:
        node_logits = _node_logits(drafter, hidden[grows], objective, shared)
        terms |= tree_terms(plan.replay, node_logits, recompute=not objective.keep_logits)
        counters |= plan.replay.diagnostics
    return MicroBatchTerms(terms, counters, plan)


def _blocks(drafter: AnyDrafter, micro: MicroBatch) -> Tensor:
    batch = micro.batch
    return drafter.training_blocks(batch.input_ids, micro.features, batch.anchors, batch.keep)


def _grows(objective: Objective, weights: Mapping[str, float]) -> bool:
    return bool((weights["survival"] or weights["coverage"]) and objective.grows_trees)


def _plan(
    drafter: AnyDrafter,
    hidden: Tensor | None,
    micro: MicroBatch,
    objective: Objective,
    weights: Mapping[str, float],
    shared: _Shared | None = None,
) -> MicroBatchPlan:
    """Plan from block outputs [S, A, B, H] without a graph; None where no tree grows."""
    batch, depth = micro.batch, objective.policy.depth
    rows = _Rows.of(batch, drafter.config.block_size)
    replay, trees = None, {}
    if _grows(objective, weights):
        assert hidden is not None
        grows = batch.tree_keep
        if shared is not None and shared.teacher is not None:
            teacher = teacher_from_logits(shared.teacher)
        else:
            states, positions = micro.last_hidden.flatten(0, 1), rows.flat_position()[grows]
            teacher = teacher_from_hidden(states, positions, drafter.lm_head.weight)
        replay = plan_replay(
            _node_logits(drafter, hidden[grows], objective, shared),
            rows.parents[grows][:, 0],
            objective.policy,
            teacher,
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


@dataclass(frozen=True)
class _Shared:
    """Logits [T, B, V] of the anchors that grow trees: the drafter's base, and the teacher's."""

    base: Tensor
    teacher: Tensor | None


def _base(
    drafter: AnyDrafter,
    hidden: Tensor,
    rows: _Rows,
    shares: Tensor | None,
    micro: MicroBatch,
    objective: Objective,
    weights: Mapping[str, float],
) -> tuple[Terms, Terms, _Shared | None]:
    """Return the base losses, their diagnostics, and the logits of the blocks that share them.

    shares [S, A] bool: computed at all depths, of which only the valid ones count here.
    """
    computed = rows.valid if shares is None else rows.valid | shares.unsqueeze(-1)
    with_teacher = bool(weights["l1"] or weights["confidence"])
    found = _vocab_losses(drafter, hidden, rows, computed, shares, micro, objective, with_teacher)
    shared = None
    if shares is not None:
        shape = (-1, rows.valid.shape[2])
        teacher = None if found.teacher is None else found.teacher.unflatten(0, shape)
        shared = _Shared(found.base.unflatten(0, shape), teacher)
    row_weights = depth_weights(rows.valid, objective.coverage.gamma)[computed]
    if not with_teacher:
        return base_terms(found.ce, None, row_weights), {}, shared
    confidence = None
    if weights["confidence"] and drafter.confidence_head is not None:
        inputs = hidden[computed]
        if objective.confidence_stop_gradient:
            inputs = inputs.detach()
        confidence = drafter.confidence_logits(inputs, rows.parents[computed])
    overlap = torch.zeros_like(computed, dtype=found.ce.dtype)
    overlap[computed] = overlap_rows(found.l1)
    counters = {"overlap": overlap_per_depth(overlap, rows.valid)}
    return base_terms(found.ce, found.l1, row_weights, confidence), counters, shared


def _vocab_losses(
    drafter: AnyDrafter,
    hidden: Tensor,
    rows: _Rows,
    computed: Tensor,
    shares: Tensor | None,
    micro: MicroBatch,
    objective: Objective,
    with_teacher: bool,
) -> VocabLosses:
    """Return the losses over the vocabulary of the rows `computed` [S, A, B]."""
    head = drafter.markov_head
    latent = None if head is None else head.latent(rows.parents, hidden)[computed]
    teacher_hidden = teacher_row = None
    if with_teacher:
        positions, teacher_row = rows.flat_position()[computed].unique(return_inverse=True)
        teacher_hidden = micro.last_hidden.flatten(0, 1)[positions]
    inputs = (
        hidden[computed],
        latent,
        drafter.lm_head.weight,
        None if head is None else head.markov_w2.weight,
        teacher_hidden,
        teacher_row,
        rows.labels[computed],
    )
    chunk = objective.chunk_rows
    if shares is None:
        ce, l1 = vocab_losses(*inputs, chunk_rows=chunk, keep_logits=objective.keep_logits)
        return VocabLosses(ce, l1, None, None)
    number = computed.flatten().cumsum(0).sub_(1).view_as(computed)
    return vocab_losses_sharing(*inputs, shared=number[shares].flatten(), chunk_rows=chunk)


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


def _node_logits(
    drafter: AnyDrafter, hidden: Tensor, objective: Objective, shared: _Shared | None = None
) -> NodeLogits:
    """Logits per depth and parent from the block outputs [T, B, H] of the anchors that grow."""
    head = drafter.markov_head
    return depth_logits(
        hidden,
        drafter.lm_head.weight,
        None if head is None else head.latent,
        None if head is None else head.markov_w2.weight,
        keep_base=objective.keep_logits,
        base=None if shared is None else shared.base,
    )
