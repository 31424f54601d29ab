# SPDX-License-Identifier: Apache-2.0
"""The one place that decides how much is drafted: which tree a round grows, and for whom."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from treespark.errors import UsageError
from treespark.serving.pricing import BudgetPricing
from treespark.tree.policy import TreePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treespark.drafter.auto import Drafter
    from treespark.serving.accept import Accepted
    from treespark.serving.rounds import RoundBatch
    from treespark.serving.scheduler import Request

AUTO = "auto"
# Few, so that a device that compiles or captures graphs by shape meets few shapes.
MODES = ("off", "chain", "15", "32", AUTO)
# What `auto` chooses among, beside the policy's own budget.
_AUTO_BUDGETS = (0, 3, 8, 16, 32)


class SpeculationControl:
    """Chooses the tree of each round, one for all its requests.

    shape: depth and branching of every tree, and its budget where `mode` is None.  mode: "off",
    "chain" (one node per depth) or a budget, fixed for the engine's life; or "auto": what has been
    fastest so far under the load of the round, from nothing up to the budget of `shape`.  drafter:
    None where nothing limits the drafts but the target.  Raises UsageError for an unknown mode.
    """

    def __init__(
        self, shape: TreePolicy, mode: str | None = None, drafter: Drafter | None = None
    ) -> None:
        if mode is not None and mode not in MODES:
            raise UsageError(f"--speculation {mode}: allowed: {', '.join(MODES)}")
        self.mode = mode
        self._policy = shape if mode is None else policy_of(mode, shape)
        self._block_size, self._context = 0, sys.maxsize
        if drafter is not None:
            self._block_size = drafter.config.block_size
            self._context = drafter.config.max_position_embeddings
        self._budget = self._policy.budget
        self._pricing = None
        if mode == AUTO:
            largest = self._policy.budget
            smaller = [budget for budget in _AUTO_BUDGETS if budget < largest]
            self._pricing = BudgetPricing([*smaller, largest])

    @property
    def largest(self) -> TreePolicy:
        """The policy of the largest tree that `choose` may return."""
        return self._policy

    @property
    def budget(self) -> int:
        """The budget that was chosen last."""
        return self._budget

    @property
    def learns(self) -> bool:
        """Whether `note` is told of every round."""
        return self._pricing is not None

    def choose(self, num_drafting: int, num_plain: int) -> TreePolicy:
        """Return the policy of a round of so many requests; budget 0 drafts nothing.

        num_drafting: those without a `plain_reason`, also where the end of the output leaves no
        room for a draft.  num_plain: the others.  Load and what rounds took and brought are all
        that a choice depends on: it is one for all requests of a round, and greedy output is the
        same whatever is chosen.
        """
        if self._pricing is None:
            return self._policy
        self._budget = self._pricing.choose(num_drafting, num_plain)
        return dataclasses.replace(self._policy, budget=self._budget)

    def note(
        self, batch: RoundBatch, rows: Sequence[int], accepted: Sequence[Accepted], seconds: float
    ) -> None:
        """Learn from a round that was chosen and committed, if that is what this control does.

        rows: which requests could use a draft.  accepted: of all.  seconds: what the round took,
        the reading of prompts not counted.
        """
        if self._pricing is None or not rows:
            return
        # What stands behind a stop was accepted in vain.
        kept = [batch.requests[i].record.rounds[-1].num_accepted for i in rows]
        ranks = [accepted[i].ranks[:n] for i, n in zip(rows, kept, strict=True)]
        self._pricing.note(batch.num_drafting, batch.num_plain, self._budget, seconds, ranks)

    def plain_reason(self, request: Request) -> str | None:
        """Return why a request decodes without drafts from here on, None if it drafts.

        The reasons are those of `RequestRecord.plain_decoding`, and each stays true once it is.
        """
        if not request.params.is_greedy:
            return "sampling"
        if self.largest.budget == 0:
            return "off"
        # The block behind the anchor would take positions that the drafter was not made for.
        anchor = max(request.length, len(request.prompt_token_ids))
        return "drafter_context" if anchor + self._block_size >= self._context else None


def policy_of(mode: str, shape: TreePolicy) -> TreePolicy:
    """Return the largest trees of a mode, of this depth and branching."""
    if mode == AUTO:
        # Budgets that no tree can fill would be tried one after the other.
        capacity = shape.branching * (1 + shape.frontier_width * (shape.depth - 1))
        return dataclasses.replace(shape, budget=min(shape.budget, capacity))
    if mode == "off":
        return dataclasses.replace(shape, budget=0)
    if mode == "chain":
        return TreePolicy(shape.depth, 1, shape.depth)
    return dataclasses.replace(shape, budget=int(mode))
