# SPDX-License-Identifier: Apache-2.0
"""Replay of the deployed tree policy on drafter outputs, and the two tree losses on its result.

The discrete part (candidates, frontiers, packing, reference masses) runs without a graph through
treespark.tree.policy, unchanged. The differentiable part walks the depths again, one at a time
under recomputation, and keeps only edge log-probabilities and a few logits of each parent.

Shapes: A tree anchors, B draft depths, W frontier width, K children per parent, M pool size,
N budget, J coverage width, H hidden size, r Markov rank, V vocabulary.
Source: TreeSpark B.2-B.3 (algorithms 2.4-2.5), total order of 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from treespark.errors import UsageError
from treespark.training.diagnostics import tree_diagnostics
from treespark.training.losses import (
    LossTerm,
    coverage_penalty,
    coverage_term,
    depth_weights,
    survival_term,
)
from treespark.tree.policy import expand, ordered_topk, pack

if TYPE_CHECKING:
    from treespark.tree.packed import PackedTree
    from treespark.tree.policy import CandidatePool, NodeLogits, TreePolicy

# depth d in 1..B -> reference distribution [A, V] of that depth, detached
TeacherProbs = Callable[[int], Tensor]


@dataclass(frozen=True)
class CoverageSettings:
    """Options of the coverage loss; defaults of the paper (B.3)."""

    top_j: int = 4
    margin: float = 1.0
    cap: float = 4.0
    gamma: float = 4.0

    def __post_init__(self) -> None:
        if self.top_j < 1:
            raise UsageError(f"losses.coverage.top_j {self.top_j}: need at least 1")
        if not self.cap > 0:
            raise UsageError(f"losses.coverage.cap {self.cap}: must be positive")
        if not self.gamma > 0:
            raise UsageError(f"losses.coverage.gamma {self.gamma}: must be positive")


@dataclass(frozen=True)
class _Reference:
    """What is kept of the teacher, so that it is evaluated once per depth."""

    mass: Tensor
    top_ids: list[Tensor]
    top_probs: list[Tensor]
    greedy: Tensor


@dataclass(frozen=True)
class ReplayPlan:
    """The trees the policy builds for a batch of anchors, and the weights of what counts in them.

    Nothing in it has a graph or a vocabulary dimension. packed_nodes [A, M] bool: candidates kept
    by packing. mass [A, M] float: reference path mass of every candidate, valid or not. node_weight
    [A, M]: the mass of packed valid nodes, else 0. depth_weight [A, B]: w of valid depths, else 0.
    diagnostics: per-depth pairs of [B] (see diagnostics.py).
    """

    pool: CandidatePool
    packed: PackedTree
    packed_nodes: Tensor
    reference: _Reference
    node_weight: Tensor
    depth_weight: Tensor
    settings: CoverageSettings
    diagnostics: dict[str, LossTerm]

    @property
    def mass(self) -> Tensor:
        """[A, M] reference path mass of every candidate."""
        return self.reference.mass

    def denominators(self) -> dict[str, Tensor]:
        """Return the denominators that `tree_terms` will have, "survival" and "coverage"."""
        by_depth = [
            self.pool.frontiers[d].shape[1] * self.depth_weight[:, d] @ top_probs.sum(-1)
            for d, top_probs in enumerate(self.reference.top_probs)
        ]
        return {"survival": self.node_weight.sum(), "coverage": torch.stack(by_depth).sum()}


@torch.no_grad()
def plan_replay(
    node_logits: NodeLogits,
    anchors: Tensor,
    policy: TreePolicy,
    teacher_probs: TeacherProbs | Tensor,
    valid: Tensor,
    *,
    labels: Tensor | None = None,
    coverage: CoverageSettings | None = None,
) -> ReplayPlan:
    """Return the trees the policy builds now, the discrete half of a replay.

    node_logits(d, parent_tokens [A, W]) -> z_d [A, W, V] float32 or float64. anchors [A] int64.
    teacher_probs: a function of the depth returning [A, V], or a tensor [A, B, V]. valid [A, B]
    bool, a prefix in depth: all depths are expanded and packed as deployed, then only valid nodes
    and parents count. labels [A, B] int64: reference tokens, for the diagnostic "reference_hit".
    Raises UsageError if valid does not have policy.depth columns.
    """
    if valid.shape[-1] != policy.depth:
        raise UsageError(f"policy.depth {policy.depth}: the batch has {valid.shape[-1]} depths")
    settings = CoverageSettings() if coverage is None else coverage
    pool = expand(node_logits, anchors, policy)
    packed = pack(pool, policy.budget)
    packed_nodes = _packed_nodes(pool, packed)
    reference = _reference(pool, policy, _as_function(teacher_probs), settings.top_j)
    node_valid = torch.zeros_like(packed_nodes)
    for d in range(1, policy.depth + 1):
        node_valid[:, pool.children_of(d)] = valid[:, d - 1 : d]
    return ReplayPlan(
        pool,
        packed,
        packed_nodes,
        reference,
        torch.where(packed_nodes & node_valid, reference.mass, 0.0),
        depth_weights(valid, settings.gamma, reference.mass.dtype),
        settings,
        tree_diagnostics(pool, packed_nodes, reference.mass, reference.greedy, valid, labels),
    )


def depth_logits(
    hidden: Tensor,
    head_weight: Tensor,
    latent: Callable[[Tensor, Tensor], Tensor] | None,
    w2: Tensor | None,
    keep_base: bool = False,
    base: Tensor | None = None,
) -> NodeLogits:
    """Return z_d(u) = base logits of depth d + w2 @ latent, one depth at a time.

    hidden [A, B, H]; head_weight [V, H] frozen; latent(parent_tokens [A, W], hidden_d [A, 1, H])
    -> [A, W, r]; w2 [V, r]; the last two None without a Markov head. The head product runs in the
    weights' dtype, the sum in float32 (float64 if the head is). The result broadcasts over W.
    base: the base logits of all depths [A, B, V] in the weights' dtype; keep_base=True computes and
    keeps them here, once; else every call computes its own.
    """
    dtype = torch.float64 if head_weight.dtype == torch.float64 else torch.float32
    if keep_base and base is None:
        table = hidden.flatten(0, 1).to(head_weight.dtype) @ head_weight.T
        base = table.unflatten(0, hidden.shape[:2])
    kept: Sequence[Tensor] = () if base is None else base.unbind(1)

    def node_logits(depth: int, parent_tokens: Tensor) -> Tensor:
        states = hidden[:, depth - 1]
        # two dimensions: a product with a strided [A, 1, H] copies the head once per anchor
        own = kept[depth - 1] if kept else states.to(head_weight.dtype) @ head_weight.T
        own = own.to(dtype).unsqueeze(1)
        if latent is None or w2 is None:
            return own.expand(-1, parent_tokens.shape[1], -1)
        codes = latent(parent_tokens, states.unsqueeze(1)).to(w2.dtype)
        return own + (codes.flatten(0, 1) @ w2.T).unflatten(0, parent_tokens.shape)

    return node_logits


def teacher_from_hidden(
    teacher_hidden: Tensor, rows: Tensor, head_weight: Tensor
) -> Callable[[int], Tensor]:
    """Return the function d -> softmax of the target's logits [A, V] at depth d, float32.

    teacher_hidden [u, H]: post-norm states of the target.  rows [A, B] int64: the row of each
    anchor and depth (any row where the depth is not valid).  head_weight [V, H].
    """
    dtype = torch.float64 if head_weight.dtype == torch.float64 else torch.float32

    @torch.no_grad()
    def teacher_probs(depth: int) -> Tensor:
        states = teacher_hidden[rows[:, depth - 1]].to(head_weight.dtype)
        return (states @ head_weight.T).to(dtype).softmax(-1)

    return teacher_probs


def teacher_from_logits(logits: Tensor) -> Callable[[int], Tensor]:
    """Return the function d -> softmax of the target's logits [A, B, V] at depth d, float32."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return lambda depth: logits[:, depth - 1].to(dtype).softmax(-1)


def _as_function(teacher_probs: TeacherProbs | Tensor) -> TeacherProbs:
    if isinstance(teacher_probs, Tensor):
        table = teacher_probs
        return lambda depth: table[:, depth - 1]
    return teacher_probs


def _packed_nodes(pool: CandidatePool, packed: PackedTree) -> Tensor:
    """[A, M] bool: True for candidates that packing kept."""
    num_rows, pool_size = pool.tokens.shape
    # root and padding carry -1 and land in the extra last column
    index = torch.where(packed.pool_index < 0, pool_size, packed.pool_index)
    marks = torch.zeros(num_rows, pool_size + 1, dtype=torch.bool, device=pool.tokens.device)
    return marks.scatter_(1, index, True)[:, :pool_size]


def _parent_tokens(pool: CandidatePool, depth: int) -> Tensor:
    """Tokens [A, W] of the parents expanded at `depth` (the anchors at depth 1)."""
    frontier = pool.frontiers[depth - 1]
    tokens = pool.tokens.gather(1, frontier.clamp(min=0))
    return torch.where(frontier < 0, pool.anchors.unsqueeze(1), tokens)


def _reference(
    pool: CandidatePool, policy: TreePolicy, teacher_probs: TeacherProbs, top_j: int
) -> _Reference:
    masses: list[Tensor] = []
    top_ids, top_probs, greedy = [], [], []
    for d in range(1, policy.depth + 1):
        probs = teacher_probs(d)
        columns = pool.children_of(d)
        edge = probs.gather(1, pool.tokens[:, columns])
        if masses:
            above = torch.cat(masses, 1)
            edge = edge * above.gather(1, pool.parents[:, columns])
        masses.append(edge)
        values, ids = ordered_topk(probs, min(top_j, probs.shape[-1]))
        top_ids.append(ids)
        top_probs.append(values)
        greedy.append(ids[:, 0])
    return _Reference(torch.cat(masses, 1), top_ids, top_probs, torch.stack(greedy, 1))


class _Picked(torch.autograd.Function):
    """(z [..., V], index [..., n]) -> z at the index [..., n] and logsumexp of z [..., 1].

    The gradient of both needs one tensor of z's size, where autograd makes four.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        normaliser = z.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(z, index, normaliser)
        return z.gather(-1, index), normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_picked: Tensor, grad_normaliser: Tensor) -> tuple[Tensor, None]:
        z, index, normaliser = ctx.saved_tensors
        grad = (z - normaliser).exp_().mul_(grad_normaliser)
        return grad.scatter_add_(-1, index, grad_picked), None


def tree_terms(
    plan: ReplayPlan, node_logits: NodeLogits, *, recompute: bool = True
) -> dict[str, LossTerm]:
    """Return the terms "survival" and "coverage" of planned trees, the differentiable half.

    Gradients flow through node_logits, which is evaluated once per depth; twice with recompute,
    which keeps one depth's logits alive at a time.
    """
    pool, reference, settings = plan.pool, plan.reference, plan.settings

    def terms_at(depth: int, parents: Tensor, children: Tensor) -> tuple[Tensor, ...]:
        z = node_logits(depth, parents)
        top = reference.top_ids[depth - 1].unsqueeze(1).expand(-1, parents.shape[1], -1)
        num_children = children.shape[-1]
        picked, normaliser = _Picked.apply(z, torch.cat([children, top], -1))
        child_z, top_z = picked[..., :num_children], picked[..., num_children:]
        log_q = child_z - normaliser
        mass = plan.node_weight[:, pool.children_of(depth)].view_as(log_q)
        survival = survival_term(log_q, mass)
        # the last child is the k-th token of the total order: its logit is the boundary
        phi = coverage_penalty(top_z, child_z[..., -1], settings.margin, settings.cap)
        weights = plan.depth_weight[:, depth - 1]
        covered = coverage_term(phi, reference.top_probs[depth - 1], weights)
        return survival.numerator, survival.denominator, covered.numerator, covered.denominator

    by_depth: list[Tensor] = []
    for d in range(1, len(pool.frontiers) + 1):
        parents = _parent_tokens(pool, d)
        children = pool.tokens[:, pool.children_of(d)].unflatten(1, (parents.shape[1], -1))
        if recompute:
            parts = checkpoint(
                terms_at, d, parents, children, use_reentrant=False, preserve_rng_state=False
            )
        else:
            parts = terms_at(d, parents, children)
        by_depth.append(torch.stack(parts))
    totals = torch.stack(by_depth).sum(0)
    return {
        "survival": LossTerm(totals[0], totals[1].detach()),
        "coverage": LossTerm(totals[2], totals[3].detach()),
    }
