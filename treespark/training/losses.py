# SPDX-License-Identifier: Apache-2.0
"""Loss terms as pure functions; each returns sums, so that normalisation can be global.

Shapes: S sequences, L sequence length, A anchors, B draft depths, V vocabulary, n rows (any set of
(anchor, depth) pairs), W frontier width, J coverage width.
Source of the formulas: TreeSpark B.2-B.4 (algorithms 2.1-2.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

# added to every denominator: paper B.4
NORMALISER_EPS = 1e-6


@dataclass(frozen=True)
class LossTerm:
    """A weighted sum and the sum of its weights (scalars; [B] for per-depth diagnostics)."""

    numerator: Tensor
    denominator: Tensor

    @property
    def value(self) -> Tensor:
        """numerator / (denominator + 1e-6); exactly 0, zero gradients, where nothing counts."""
        return normalise(self.numerator, self.denominator)

    def __add__(self, other: LossTerm) -> LossTerm:
        """Sum of two sets of rows."""
        return LossTerm(self.numerator + other.numerator, self.denominator + other.denominator)

    def detach(self) -> LossTerm:
        """The same pair outside the graph, for metrics."""
        return LossTerm(self.numerator.detach(), self.denominator.detach())


def normalise(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return numerator / (denominator + 1e-6); an exact 0, in the graph, for denominator 0."""
    counted = torch.where(denominator > 0, numerator, torch.zeros_like(numerator))
    return counted / (denominator + NORMALISER_EPS)


def combine(
    terms: Mapping[str, LossTerm],
    weights: Mapping[str, float],
    *,
    world_size: int = 1,
    denominators: Mapping[str, Tensor] | None = None,
    accumulation_steps: int = 1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted total of globally normalised terms, and each term's detached value.

    Each term becomes numerator / (D + 1e-6). `denominators` gives D per term, summed over ranks and
    over the micro-batches of the optimizer step; without it D is the term's own. The total is
    multiplied by world_size * accumulation_steps because the reducer averages over ranks and the
    engine divides by the accumulation count; pass these counts only together with denominators of
    the whole step. A weight of 0 keeps its term out of the graph. Values are this rank's shares,
    not multiplied: their sum over ranks and micro-batches is the loss of the whole step.
    Raises UsageError if a term has no weight.  Source: TreeSpark B.4.
    """
    for name in terms:
        if name not in weights:
            raise UsageError(f"losses.{name}: no weight given; known weights: {sorted(weights)}")
    if not terms:
        raise UsageError("losses: no term to combine")
    if denominators is None:
        denominators = {name: term.denominator.detach() for name, term in terms.items()}
    values = {name: normalise(t.numerator, denominators[name]) for name, t in terms.items()}
    active = [weights[name] * value for name, value in values.items() if weights[name] != 0]
    # no active term: a zero without a graph
    zero = torch.zeros_like(next(iter(values.values())).detach())
    total = sum(active[1:], active[0]) if active else zero
    values = {name: value.detach() for name, value in values.items()}
    return total * (world_size * accumulation_steps), values


def validity(loss_mask: Tensor, anchors: Tensor, keep: Tensor, depth: int) -> Tensor:
    """Return e [S, A, depth] bool: tokens a+1..a+d lie in the sequence and are all supervised.

    loss_mask: [S, L] 0/1, 0 on padding.  anchors: [S, A] int64.  keep: [S, A] bool, False for
    dummy blocks (nothing is valid there).  Source: algorithms 2.1.
    """
    offsets = torch.arange(1, depth + 1, device=anchors.device)
    positions = anchors.unsqueeze(-1) + offsets
    length = loss_mask.shape[-1]
    flat = positions.clamp(0, length - 1).flatten(1)
    supervised = loss_mask.bool().gather(1, flat).view_as(positions) & (positions < length)
    return supervised.cumprod(-1).bool() & keep.bool().unsqueeze(-1)


def depth_weights(valid: Tensor, gamma: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return w [..., B] = e * exp(-(d - 1) / gamma).

    valid: [..., B] bool.  Raises UsageError if gamma is not positive.  Source: TreeSpark B.4.
    """
    if not gamma > 0:
        raise UsageError(f"losses.gamma {gamma}: must be positive")
    depths = torch.arange(valid.shape[-1], device=valid.device, dtype=dtype)
    return valid.to(dtype) * torch.exp(-depths / gamma)


def weighted_term(rows: Tensor, weights: Tensor) -> LossTerm:
    """Return (sum of weights * rows, sum of weights); rows of weight 0 may hold anything."""
    weights = weights.detach()
    counted = torch.where(weights != 0, rows, torch.zeros_like(rows))
    return LossTerm((weights * counted).sum(), weights.sum())


def cross_entropy_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log softmax(logits)[label] per row [n].  logits [n, V], labels [n] int64."""
    return cross_entropy(logits, labels, reduction="none")


def soft_cross_entropy_rows(logits: Tensor, teacher_probs: Tensor) -> Tensor:
    """Return -sum(p * log softmax(logits)) per row [n] with p = teacher_probs, a constant.

    logits, teacher_probs: [n, V].  Source: algorithms 2.7.
    """
    return -(teacher_probs.detach() * logits.log_softmax(-1)).sum(-1)


def l1_rows(logits: Tensor, teacher_probs: Tensor) -> Tensor:
    """Return ||softmax(logits) - teacher_probs||_1 per row [n], in [0, 2]; no factor 1/2.

    logits, teacher_probs: [n, V]; the teacher is treated as a constant.
    """
    return (logits.softmax(-1) - teacher_probs.detach()).abs().sum(-1)


def overlap_rows(l1: Tensor) -> Tensor:
    """Return 1 - l1 / 2 clamped to [0, 1] (= sum of min(q, p)), detached.  l1 [n]."""
    return (1 - 0.5 * l1.detach()).clamp(0, 1)


def confidence_rows(confidence_logits: Tensor, overlap: Tensor) -> Tensor:
    """Return binary cross-entropy of confidence_logits [n] against the constant overlap [n]."""
    target = overlap.detach().to(confidence_logits.dtype)
    return binary_cross_entropy_with_logits(confidence_logits, target, reduction="none")


def base_terms(
    ce: Tensor, l1: Tensor | None, weights: Tensor, confidence_logits: Tensor | None = None
) -> dict[str, LossTerm]:
    """Return the terms "ce", "l1" and "confidence" (those whose inputs are given).

    ce, l1, weights, confidence_logits: [n]; weights = w of depth_weights(). ce and l1 come from
    fused.vocab_losses or from the row functions above.  Source: algorithms 2.2.
    """
    terms = {"ce": weighted_term(ce, weights)}
    if l1 is not None:
        terms["l1"] = weighted_term(l1, weights)
    if confidence_logits is not None:
        if l1 is None:
            raise UsageError("losses.confidence: needs the overlap with the teacher (losses.l1)")
        rows = confidence_rows(confidence_logits.to(ce.dtype), overlap_rows(l1))
        terms["confidence"] = weighted_term(rows, weights)
    return terms


def survival_term(edge_log_probs: Tensor, mass: Tensor) -> LossTerm:
    """Return (-sum m * log q, sum m) over packed valid nodes.

    edge_log_probs: any shape, log q(t_v | parent).  mass: same shape, detached reference path
    mass, 0 for nodes that do not count.  Source: TreeSpark B.2.
    """
    return weighted_term(-edge_log_probs, mass)


def coverage_penalty(top_logits: Tensor, boundary: Tensor, margin: float, cap: float) -> Tensor:
    """Return phi = min(cap, max(0, margin + boundary - z)), gradient 0 at and beyond both kinks.

    top_logits: [..., J] logits of supervised tokens.  boundary: [...] the k-th logit of the same
    parent.  Source: TreeSpark B.3.
    """
    gap = margin + boundary.unsqueeze(-1) - top_logits
    # torch.clamp would pass gradient at the kinks, where the penalty is defined to be flat
    inside = (gap > 0) & (gap < cap)
    return torch.where(inside, gap, gap.detach().clamp(0, cap))


def coverage_term(phi: Tensor, top_probs: Tensor, weights: Tensor) -> LossTerm:
    """Return (sum w * sum_J p * phi, sum w * sum_J p) over expanded parents.

    phi: [A, W, J].  top_probs: [A, J] probabilities of the teacher's J best tokens.
    weights: [A] depth weight of the anchors, 0 where the depth is not valid; each of the W parents
    counts once.  Source: TreeSpark B.3-B.4.
    """
    weighted = (weights.unsqueeze(-1) * top_probs).detach().unsqueeze(1)
    return weighted_term(phi, weighted.expand_as(phi))
