# SPDX-License-Identifier: Apache-2.0
"""Replay of the deployed tree policy on drafter outputs, and the two tree losses on its result.

The discrete part (candidates, frontiers, packing, reference masses) runs without a graph through
treespark.tree.policy and the children that serving expands, unchanged. It says of which tokens
after which parents the losses need logits; whoever has those with a graph (fused.py) gets the
losses.

Shapes: A tree anchors, B draft depths, W frontier width, K children per parent, P parents of all
depths, M = P * K pool size, N budget, J coverage width, H hidden size, V vocabulary.
Source: TreeSpark B.2-B.3 (algorithms 2.4-2.5), total order of 3.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treespark.errors import UsageError
from treespark.training.diagnostics import tree_diagnostics
from treespark.training.losses import (
    LossTerm,
    coverage_penalty,
    coverage_term,
    depth_weights,
    survival_term,
)
from treespark.tree.policy import expand_children, ordered_topk, pack

if TYPE_CHECKING:
    from treespark.tree.packed import PackedTree
    from treespark.tree.policy import CandidatePool, Children, NodeChildren, TreePolicy

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
    """What is kept of the teacher, so that it is evaluated once per depth.

    mass [A, M].  top_ids and top_probs [A, B, J]: its best tokens, the best one first.
    """

    mass: Tensor
    top_ids: Tensor
    top_probs: Tensor


@dataclass(frozen=True)
class ReplayPlan:
    """The trees the policy builds for a batch of anchors, and the weights of what counts in them.

    Nothing in it has a graph or a vocabulary dimension. packed_nodes [A, M] bool: candidates kept
    by packing. lse [A, P] float: log-sum-exp of the logits of every expanded parent. mass [A, M]
    float: reference path mass of every candidate, valid or not. node_weight [A, M]: the mass of
    packed valid nodes, else 0. depth_weight [A, B]: w of valid depths, else 0. diagnostics:
    per-depth pairs of [B] (see diagnostics.py).
    """

    pool: CandidatePool
    packed: PackedTree
    packed_nodes: Tensor
    lse: Tensor
    reference: _Reference
    node_weight: Tensor
    depth_weight: Tensor
    settings: CoverageSettings
    diagnostics: dict[str, LossTerm]

    @property
    def mass(self) -> Tensor:
        """[A, M] reference path mass of every candidate."""
        return self.reference.mass

    @property
    def parent_depths(self) -> Tensor:
        """[P] int64: at which depth, from 0 on, each parent was expanded."""
        widths = [frontier.shape[1] for frontier in self.pool.frontiers]
        return (
            torch.arange(len(widths)).repeat_interleave(torch.tensor(widths)).to(self.mass.device)
        )

    @property
    def parents(self) -> Tensor:
        """[A, P] int64: tokens of the parents, best first at every depth."""
        frontier = torch.cat(self.pool.frontiers, 1)
        tokens = self.pool.tokens.gather(1, frontier.clamp(min=0))
        return torch.where(frontier < 0, self.pool.anchors.unsqueeze(1), tokens)

    @property
    def tokens(self) -> Tensor:
        """[A, P, K + J] int64: children of each parent, and the teacher's best tokens there."""
        children = self.pool.tokens.unflatten(1, (-1, self.pool.num_children))
        return torch.cat([children, self.reference.top_ids[:, self.parent_depths]], -1)

    def coverage(self, phi: Tensor) -> LossTerm:
        """Return the coverage term of penalties phi [A, P, J]."""
        depths = self.parent_depths
        top_probs, weights = self.reference.top_probs[:, depths], self.depth_weight[:, depths]
        # parents of one anchor at different depths have different weights: a row of one parent each
        return coverage_term(
            phi.flatten(0, 1).unsqueeze(1), top_probs.flatten(0, 1), weights.flatten()
        )

    def denominators(self) -> dict[str, Tensor]:
        """Return the denominators that `tree_terms` will have, "survival" and "coverage"."""
        by_depth = (self.depth_weight.unsqueeze(-1) * self.reference.top_probs).sum(-1)
        covered = by_depth[:, self.parent_depths].sum()
        return {"survival": self.node_weight.sum(), "coverage": covered}


@torch.no_grad()
def plan_replay(
    node_children: NodeChildren,
    anchors: Tensor,
    policy: TreePolicy,
    teacher_probs: TeacherProbs | Tensor,
    valid: Tensor,
    *,
    labels: Tensor | None = None,
    coverage: CoverageSettings | None = None,
) -> ReplayPlan:
    """Return the trees the policy builds now, the discrete half of a replay.

    node_children: as deployed, `node_children` of the drafter. anchors [A] int64.
    teacher_probs: a function of the depth returning [A, V], or a tensor [A, B, V]. valid [A, B]
    bool, a prefix in depth: all depths are expanded and packed as deployed, then only valid nodes
    and parents count. labels [A, B] int64: reference tokens, for the diagnostic "reference_hit".
    Raises UsageError if valid does not have policy.depth columns.
    """
    if valid.shape[-1] != policy.depth:
        raise UsageError(f"policy.depth {policy.depth}: the batch has {valid.shape[-1]} depths")
    settings = CoverageSettings() if coverage is None else coverage
    lse: list[Tensor] = []

    def remembered(
        depth: int, parent_tokens: Tensor, branching: int, needed: Tensor | None = None
    ) -> Children:
        children = node_children(depth, parent_tokens, branching, needed)
        lse.append(children.lse)
        return children

    pool = expand_children(remembered, anchors, policy)
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
        torch.cat(lse, 1),
        reference,
        torch.where(packed_nodes & node_valid, reference.mass, 0.0),
        depth_weights(valid, settings.gamma, reference.mass.dtype),
        settings,
        tree_diagnostics(
            pool, packed_nodes, reference.mass, reference.top_ids[..., 0], valid, labels
        ),
    )


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


def _reference(
    pool: CandidatePool, policy: TreePolicy, teacher_probs: TeacherProbs, top_j: int
) -> _Reference:
    masses: list[Tensor] = []
    top_ids, top_probs = [], []
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
    return _Reference(torch.cat(masses, 1), torch.stack(top_ids, 1), torch.stack(top_probs, 1))


def tree_terms(plan: ReplayPlan, logits: Tensor, lse: Tensor) -> dict[str, LossTerm]:
    """Return the terms "survival" and "coverage" of planned trees, the differentiable half.

    Gradients flow through logits [A, P, K + J], those of `plan.tokens` after each parent, and
    lse [A, P], the log-sum-exp of all logits of the parent.
    """
    num_children = plan.pool.num_children
    children, top = logits[..., :num_children], logits[..., num_children:]
    log_q = children - lse.unsqueeze(-1)
    # the last child is the k-th token of the total order: its logit is the boundary
    phi = coverage_penalty(top, children[..., -1], plan.settings.margin, plan.settings.cap)
    return {
        "survival": survival_term(log_q, plan.node_weight.view_as(log_q)),
        "coverage": plan.coverage(phi),
    }
