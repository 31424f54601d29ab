# SPDX-License-Identifier: Apache-2.0
"""Both halves of a replay in one call, as most tests want it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treespark.training.losses import LossTerm
from treespark.training.replay import ReplayPlan, plan_replay, tree_terms
from treespark.tree.packed import PackedTree
from treespark.tree.policy import CandidatePool, children_of_logits


@dataclass(frozen=True)
class Replay:
    """A plan and the terms on it."""

    plan: ReplayPlan
    survival: LossTerm
    coverage: LossTerm

    @property
    def pool(self) -> CandidatePool:
        return self.plan.pool

    @property
    def packed(self) -> PackedTree:
        return self.plan.packed

    @property
    def packed_nodes(self) -> Tensor:
        return self.plan.packed_nodes

    @property
    def mass(self) -> Tensor:
        return self.plan.mass

    @property
    def diagnostics(self) -> dict[str, LossTerm]:
        return self.plan.diagnostics


def replay(node_logits: Any, *args: Any, **options: Any) -> Replay:
    """Plan, compute the terms by plain autograd, and check that the plan knew their denominators.

    node_logits(depth, parent_tokens [A, W]) -> logits [A, W, V].
    """
    plan = plan_replay(children_of_logits(node_logits), *args, **options)
    widths = [frontier.shape[1] for frontier in plan.pool.frontiers]
    parents = plan.parents.split(widths, 1)
    by_depth = [node_logits(depth, tokens) for depth, tokens in enumerate(parents, start=1)]
    logits = torch.cat(by_depth, 1)
    terms = tree_terms(plan, logits.gather(-1, plan.tokens), logits.logsumexp(-1))
    for name, expected in plan.denominators().items():
        found = terms[name].denominator
        assert abs(found - expected) <= 1e-6 * abs(expected), (name, found, expected)
    return Replay(plan, **terms)
