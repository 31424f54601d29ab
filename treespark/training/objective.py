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
from treespark.training.fused import Nodes, VocabLosses, VocabPass, vocab_losses, vocab_pass
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
    from treespark.tree.policy import TreePolicy

Terms = dict[str, LossTerm]


@dataclass(frozen=True)
class Objective:
    """What the losses need besides the batch; weights of 0 skip the work of their term."""

    policy: TreePolicy
    coverage: CoverageSettings
    confidence_stop_gradient: bool = False
    chunk_rows: int = 32
    # stored logits save a third of the time; they cost [n + u, V] in the head's dtype
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
    hidden, batch = _blocks(drafter, micro), micro.batch
    rows = _Rows.of(batch, drafter.config.block_size)
    grows = batch.tree_keep if _grows(objective, weights) else None
    terms, counters, found = {}, {}, None
    soft = bool(weights.get("soft_ce"))
    if grows is not None or not soft or any(weights[n] for n in ("ce", "l1", "confidence")):
        found = _vocab_pass(drafter, hidden, rows, grows, plan is None, micro, objective, weights)
    if plan is None:
        plan = _plan(drafter, hidden.detach(), micro, objective, weights, found)
    if found is not None:
        terms, counters = _terms(drafter, hidden, rows, found, plan.replay, objective, weights)
    if soft:
        soft_terms, overlap = _soft(drafter, hidden, rows, micro, objective)
        terms, counters = terms | soft_terms, counters | overlap
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
    found: _Pass | None = None,
) -> MicroBatchPlan:
    """Plan from block outputs [S, A, B, H] without a graph; None where no tree grows."""
    batch, depth = micro.batch, objective.policy.depth
    rows = _Rows.of(batch, drafter.config.block_size)
    replay, trees = None, {}
    if _grows(objective, weights):
        assert hidden is not None
        grows = batch.tree_keep
        base, teacher_logits = (None, None) if found is None else found.tree_logits()
        if teacher_logits is not None:
            teacher = teacher_from_logits(teacher_logits)
        else:
            states, positions = micro.last_hidden.flatten(0, 1), rows.flat_position()[grows]
            teacher = teacher_from_hidden(states, positions, drafter.lm_head.weight)
        replay = plan_replay(
            drafter.node_children(hidden[grows], base),
            rows.parents[grows][:, 0],
            objective.policy,
            teacher,
            rows.valid[grows][:, :depth],
            labels=rows.labels[grows][:, :depth],
            coverage=objective.coverage,
        )
        trees = replay.denominators()
    base_weight = depth_weights(rows.valid, objective.coverage.gamma).sum()
    zero = torch.zeros_like(base_weight)
    # Soft cross-entropy is a mean over all tokens, supervised or not (algorithms 2.7).
    others = {"survival": zero, "coverage": zero}
    others |= {"soft_ce": batch.lengths.sum().to(base_weight)} | trees
    return MicroBatchPlan({name: others.get(name, base_weight) for name in weights}, replay)


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
class _Pass:
    """The vocabulary losses of the rows `computed` [S, A, B], not in the graph yet.

    grows [S, A]: the anchors that grow trees.  tree_rows [T, B] int64: numbers of their rows among
    those computed.  Without trees grows is None, and T is 0.
    """

    vocab: VocabPass
    computed: Tensor
    grows: Tensor | None
    tree_rows: Tensor
    with_teacher: bool

    def tree_logits(self) -> tuple[Tensor | None, Tensor | None]:
        """Logits [T, B, V] of the trees' rows: the drafter's base and the teacher's, if there."""
        shape = self.tree_rows.shape
        base, teacher = (
            None if logits is None else logits.unflatten(0, shape)
            for logits in (self.vocab.base, self.vocab.teacher)
        )
        return base, teacher


def _vocab_pass(
    drafter: AnyDrafter,
    hidden: Tensor,
    rows: _Rows,
    grows: Tensor | None,
    plans: bool,
    micro: MicroBatch,
    objective: Objective,
    weights: Mapping[str, float],
) -> _Pass:
    """Compute the base losses; of the anchors that grow trees [S, A] at all depths, of which only
    the valid ones count here.  plans: whether trees are planned on the result.
    """
    computed = rows.valid if grows is None else rows.valid | grows.unsqueeze(-1)
    number = computed.flatten().cumsum(0).sub_(1).view_as(computed)
    tree_rows = number[:0, 0] if grows is None else number[grows]
    with_teacher = bool(weights["l1"] or weights["confidence"])
    head = drafter.markov_head
    teacher_hidden = teacher_row = None
    if with_teacher:
        positions, teacher_row = rows.flat_position()[computed].unique(return_inverse=True)
        teacher_hidden = micro.last_hidden.flatten(0, 1)[positions]
    vocab = vocab_pass(
        hidden[computed],
        None if head is None else head.latent(rows.parents, hidden)[computed],
        drafter.lm_head.weight,
        None if head is None else head.markov_w2.weight,
        teacher_hidden,
        teacher_row,
        rows.labels[computed],
        chunk_rows=objective.chunk_rows,
        keep_logits=objective.keep_logits,
        shared=tree_rows.flatten() if plans and grows is not None else None,
    )
    return _Pass(vocab, computed, grows, tree_rows, with_teacher)


def _terms(
    drafter: AnyDrafter,
    hidden: Tensor,
    rows: _Rows,
    found: _Pass,
    replay: ReplayPlan | None,
    objective: Objective,
    weights: Mapping[str, float],
) -> tuple[Terms, Terms]:
    """Return the base losses and those of planned trees, with their diagnostics."""
    nodes = None
    if replay is not None:
        assert found.grows is not None
        nodes = _nodes(drafter, hidden[found.grows], found, replay)
    losses = found.vocab.losses(nodes)
    terms, counters = _base_terms(drafter, hidden, rows, found, losses, objective, weights)
    if replay is not None:
        logits, lse = losses.node_logits, losses.node_lse
        assert logits is not None
        assert lse is not None
        terms |= tree_terms(replay, logits.view(replay.tokens.shape), lse.view(replay.lse.shape))
        counters |= replay.diagnostics
    return terms, counters


def _nodes(drafter: AnyDrafter, hidden: Tensor, found: _Pass, replay: ReplayPlan) -> Nodes:
    """Return the expanded parents of planned trees, from the block outputs [T, B, H]."""
    head, depths = drafter.markov_head, replay.parent_depths
    latent = None if head is None else head.latent(replay.parents, hidden[:, depths])
    return Nodes(
        found.tree_rows[:, depths].flatten(),
        None if latent is None else latent.flatten(0, 1),
        replay.tokens.flatten(0, 1),
        replay.lse.flatten(),
    )


def _base_terms(
    drafter: AnyDrafter,
    hidden: Tensor,
    rows: _Rows,
    found: _Pass,
    losses: VocabLosses,
    objective: Objective,
    weights: Mapping[str, float],
) -> tuple[Terms, Terms]:
    row_weights = depth_weights(rows.valid, objective.coverage.gamma)[found.computed]
    if not found.with_teacher:
        return base_terms(losses.ce, None, row_weights), {}
    confidence = None
    if weights["confidence"] and drafter.confidence_head is not None:
        inputs = hidden[found.computed]
        if objective.confidence_stop_gradient:
            inputs = inputs.detach()
        confidence = drafter.confidence_logits(inputs, rows.parents[found.computed])
    overlap = torch.zeros_like(found.computed, dtype=losses.ce.dtype)
    overlap[found.computed] = overlap_rows(losses.l1)
    counters = {"overlap": overlap_per_depth(overlap, rows.valid)}
    return base_terms(losses.ce, losses.l1, row_weights, confidence), counters


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
