# SPDX-License-Identifier: Apache-2.0
"""One builder for the trees of all methods, along three axes that combine freely.

- proposal: which distribution the children of a node come from. `conditioned`: given their parent.
  `marginal`: of their depth alone, the same for all parents.
- priority: what a node is worth. `probability`: the product of its path's draft probabilities.
  `survival`: the product of their calibrated acceptance estimates.
- stop: what ends the growth. `frontier`: per depth only the best nodes are expanded, then the best
  of all are kept (TreeSpark). `budget`: the N best of all prefixes. `threshold`: those of the N
  best that are worth at least `threshold`.

The N best of all prefixes are what a heap yields that pops the best node and pushes its children.
A child is worth no more than its parent, so of each depth only the N best can be among them: they
are found depth by depth, with a frontier as wide as the budget, without a heap and without a wait.

Source: algorithms 4.1 (calibrated survival; Zhou et al.), 4.2 (best first over marginals; DDTree),
4.3 (the axes).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from treespark.errors import UsageError
from treespark.tree.policy import (
    MAX_BRANCHING,
    CandidatePool,
    Children,
    NodeChildren,
    TreePolicy,
    children_of_logits,
    expand_children,
    pack,
)

if TYPE_CHECKING:
    from torch import Tensor

    from treespark.tree.packed import PackedTree

CONDITIONED, MARGINAL = "conditioned", "marginal"
PROBABILITY, SURVIVAL = "probability", "survival"
FRONTIER, BUDGET, THRESHOLD = "frontier", "budget", "threshold"
AXES = {
    "proposal": (CONDITIONED, MARGINAL),
    "priority": (PROBABILITY, SURVIVAL),
    "stop": (FRONTIER, BUDGET, THRESHOLD),
}
# Zhou et al., fitted for Qwen3-4B and greedy decoding (algorithms 4.1).
PUBLISHED_ALPHA, PUBLISHED_BETA = 0.6684, -0.4587


@dataclass(frozen=True)
class TreeBuilder:
    """How trees grow; the defaults are TreeSpark's.

    threshold: of `stop` threshold, in (0, 1).  alpha, beta: of `priority` survival, an edge of
    draft probability q counting as sigmoid(alpha * logit(q) + beta).
    Raises UsageError for a value that is not allowed.
    """

    proposal: str = CONDITIONED
    priority: str = PROBABILITY
    stop: str = FRONTIER
    threshold: float | None = None
    alpha: float = PUBLISHED_ALPHA
    beta: float = PUBLISHED_BETA

    def __post_init__(self) -> None:
        """Check the values."""
        for axis, allowed in AXES.items():
            if getattr(self, axis) not in allowed:
                raise UsageError(f"{axis} {getattr(self, axis)}: allowed: {', '.join(allowed)}")
        if (self.threshold is not None) != (self.stop == THRESHOLD):
            raise UsageError(f"threshold {self.threshold}: goes with stop {THRESHOLD} only")
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise UsageError(f"threshold {self.threshold}: allowed: numbers between 0 and 1")
        # A better draft must never be worth less.
        if not (math.isfinite(self.alpha) and self.alpha > 0 and math.isfinite(self.beta)):
            raise UsageError(
                f"alpha {self.alpha}, beta {self.beta}: need finite numbers, alpha > 0"
            )

    def shape(self, policy: TreePolicy) -> TreePolicy:
        """Return the policy with the frontier that this builder expands.

        Raises UsageError for a budget beyond what best-first growth is made for.
        """
        if self.stop == FRONTIER or policy.budget == 0:
            return policy
        if policy.budget > MAX_BRANCHING:
            raise UsageError(
                f"--budget {policy.budget}: allowed: 0..{MAX_BRANCHING} with stop {self.stop}"
            )
        return dataclasses.replace(policy, frontier=policy.budget)

    def expand(
        self,
        node_children: NodeChildren,
        anchors: Tensor,
        policy: TreePolicy,
        packed_depths: Tensor | None = None,
    ) -> CandidatePool:
        """Return the candidates of each request, with this builder's priority as scores.

        node_children: of this builder's proposal.  anchors: [R] int64.  packed_depths: see
        `policy.expand_children`.
        """
        if self.priority == SURVIVAL:
            node_children = surviving_children(node_children, self.alpha, self.beta)
        return expand_children(
            node_children, anchors, self.shape(policy), packed_depths, self.min_score
        )

    def pack(self, pool: CandidatePool, policy: TreePolicy, max_depths: Tensor) -> PackedTree:
        """Return the trees that are kept of the candidates; max_depths: see `policy.pack`."""
        return pack(pool, policy.budget, max_depths, self.min_score)

    @property
    def min_score(self) -> float | None:
        """The lowest score of a packed node; None without a threshold."""
        return None if self.threshold is None else math.log(self.threshold)


def marginal_children(logits: Tensor) -> NodeChildren:
    """Return the children by depth alone, the same for all parents.

    logits: [R, B, V], of the depths 1..B.
    """
    best = children_of_logits(lambda depth, _: logits[:, depth - 1 : depth])

    def node_children(
        depth: int, parent_tokens: Tensor, branching: int, needed: Tensor | None = None
    ) -> Children:
        tokens, log_probs, lse = best(depth, parent_tokens, branching)
        width = parent_tokens.shape[1]
        return Children(
            tokens.expand(-1, width, -1), log_probs.expand(-1, width, -1), lse.expand(-1, width)
        )

    return node_children


def surviving_children(node_children: NodeChildren, alpha: float, beta: float) -> NodeChildren:
    """Return the same children with the log of their calibrated acceptance as log-probability.

    Source: algorithms 4.1, log sigmoid(alpha * logit(q) + beta).
    """

    def calibrated(
        depth: int, parent_tokens: Tensor, branching: int, needed: Tensor | None = None
    ) -> Children:
        tokens, log_probs, lse = node_children(depth, parent_tokens, branching, needed)
        # log(1 - q) is -inf where q rounds to 1: then the edge is sure, at score 0.
        logits = log_probs - torch.log(-torch.expm1(log_probs))
        return Children(tokens, logsigmoid(alpha * logits + beta), lse)

    return calibrated
