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
)
from treespark.training.replay import CoverageSettings, depth_logits, replay, teacher_from_hidden

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from treespark.data.batches import Batch
    from treespark.drafter.modeling import TreeSparkDrafter
    from treespark.tree.policy import TreePolicy

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


def micro_batch_terms(
    drafter: TreeSparkDrafter,
    batch: Batch,
    features: Tensor,
    last_hidden: Tensor,
    objective: Objective,
    weights: Mapping[str, float],
) -> tuple[Terms, Terms]:
    """Return the loss terms (scalars) and the per-depth diagnostics ([B] pairs) of a micro-batch.

    features [S, L, m*H] and last_hidden [S, L, H] are the target's; see data.features. One backbone
    pass serves both kinds of loss and the target is not called.
    """
    hidden = drafter.training_blocks(batch.input_ids, features, batch.anchors, batch.keep)
    rows = _Rows.of(batch, drafter.config.block_size)
    terms, counters = _base(drafter, hidden, rows, last_hidden, objective, weights)
    if (weights["survival"] or weights["coverage"]) and bool(batch.tree_keep.any()):
        tree_terms, tree_counters = _tree(drafter, hidden, rows, batch, last_hidden, objective)
        terms |= tree_terms
        counters |= tree_counters
    return terms, counters


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
    drafter: TreeSparkDrafter,
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


def _tree(
    drafter: TreeSparkDrafter,
    hidden: Tensor,
    rows: _Rows,
    batch: Batch,
    last_hidden: Tensor,
    objective: Objective,
) -> tuple[Terms, Terms]:
    grows, depth, head = batch.tree_keep, objective.policy.depth, drafter.markov_head
    head_weight = drafter.lm_head.weight
    positions = rows.flat_position()[grows]
    node_logits = depth_logits(
        hidden[grows],
        head_weight,
        None if head is None else head.latent,
        None if head is None else head.markov_w2.weight,
        keep_base=objective.keep_logits,
    )
    result = replay(
        node_logits,
        rows.parents[grows][:, 0],
        objective.policy,
        teacher_from_hidden(last_hidden.flatten(0, 1), positions, head_weight),
        rows.valid[grows][:, :depth],
        labels=rows.labels[grows][:, :depth],
        coverage=objective.coverage,
    )
    return {"survival": result.survival, "coverage": result.coverage}, result.diagnostics
