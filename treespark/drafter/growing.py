# SPDX-License-Identifier: Apache-2.0
"""From drafted blocks to trees: how a method uses what its drafter proposes.

Shapes: R requests, B depths, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from treespark.device import is_host
from treespark.drafter.auto import drafted_children
from treespark.errors import UsageError
from treespark.tree.builder import MARGINAL, TreeBuilder, marginal_children

if TYPE_CHECKING:
    from torch import Tensor

    from treespark.drafter.auto import Drafter
    from treespark.tree.packed import PackedTree
    from treespark.tree.policy import CandidatePool, TreePolicy


@dataclass(frozen=True)
class Growth:
    """A builder of trees and, for chains, the confidence below which they are cut.

    min_confidence: a chain ends before the first draft whose confidence is lower; 0 cuts nothing.
    whole_pool: propose also candidates that cannot be packed, for who wants to look at them.
    Source: algorithms 3.7 (static threshold), DeepSpec's evaluator.
    """

    builder: TreeBuilder = field(default_factory=TreeBuilder)
    min_confidence: float = 0.0
    whole_pool: bool = False

    def check(self, drafter: Drafter, policy: TreePolicy) -> None:
        """Raise UsageError for a drafter that cannot grow like this."""
        self.builder.shape(policy)
        config = drafter.config
        if self.builder.proposal == MARGINAL and not hasattr(config, "anchor_predicts_next"):
            raise UsageError(
                f"proposal {MARGINAL}: needs a block drafter, this one has {config.chain_only}"
            )
        if not 0 <= self.min_confidence <= 1:
            raise UsageError(f"min_confidence {self.min_confidence}: allowed: numbers in 0..1")
        if self.min_confidence and policy.branching > 1:
            raise UsageError(f"min_confidence {self.min_confidence}: cuts chains, use branching 1")
        if self.min_confidence and not getattr(config, "enable_confidence_head", False):
            raise UsageError(
                f"min_confidence {self.min_confidence}: the drafter has no confidence head"
            )

    def num_depths(self, policy: TreePolicy) -> int:
        """Return how many depths of a block `grow` looks at."""
        # All nodes above a packed one are packed too: none is deeper than there are nodes.
        return policy.depth if self.whole_pool else min(policy.depth, max(policy.budget, 1))

    def grow(
        self,
        drafter: Drafter,
        hidden: Tensor,
        anchors: Tensor,
        policy: TreePolicy,
        max_depths: Tensor,
    ) -> tuple[CandidatePool, PackedTree]:
        """Return candidates and trees of one drafted block per request.

        hidden [R, D, H] of `draft_block`, of `num_depths` depths or more; anchors, max_depths [R]
        int64. Depths that no tree of the policy's budget can reach cost nothing.
        """
        policy = replace(policy, depth=self.num_depths(policy))
        hidden = hidden[:, : policy.depth]
        if self.builder.proposal == MARGINAL:
            children = marginal_children(drafter.base_logits(hidden))
        else:
            children = drafted_children(drafter, hidden, anchors)
        # On an accelerator a wait at every depth would cost more than the candidates left out.
        leaves_out = is_host(anchors.device) and not self.whole_pool
        pool = self.builder.expand(children, anchors, policy, max_depths if leaves_out else None)
        if self.min_confidence:
            confident = confident_depths(drafter, hidden, anchors, pool, self.min_confidence)
            max_depths = torch.minimum(max_depths, confident)
        return pool, self.builder.pack(pool, policy, max_depths)


def confident_depths(
    drafter: Drafter, hidden: Tensor, anchors: Tensor, chains: CandidatePool, threshold: float
) -> Tensor:
    """Return how many drafts of each chain stand before the first unsure one, [R] int64.

    Confidence is asked with the parent of the draft it judges, the anchor for the first one.
    """
    depth = chains.tokens.shape[1]
    parents = torch.cat([anchors[:, None], chains.tokens[:, :-1]], 1)
    logits = drafter.confidence_logits(hidden[:, :depth], parents)
    return (logits.sigmoid() >= threshold).long().cumprod(1).sum(1)
