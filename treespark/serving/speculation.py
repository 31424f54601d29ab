# SPDX-License-Identifier: Apache-2.0
"""The one place that decides how much is drafted: which tree a round grows, and for whom."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from treespark.errors import UsageError
from treespark.tree.policy import TreePolicy

if TYPE_CHECKING:
    from treespark.drafter.auto import Drafter
    from treespark.serving.scheduler import Request

# Few, so that a device that compiles or captures graphs by shape meets few shapes.
MODES = ("off", "chain", "15", "32")


class SpeculationControl:
    """Chooses the tree of each round, one for all its requests.

    shape: depth and branching of every tree, and its budget where `mode` is None.  mode: "off",
    "chain" (one node per depth) or a budget, fixed for the engine's life.  drafter: None where
    nothing limits the drafts but the target.  Raises UsageError for an unknown mode.
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

    @property
    def largest(self) -> TreePolicy:
        """The policy of the largest tree that `choose` may return."""
        return self._policy

    def choose(self, num_requests: int) -> TreePolicy:
        """Return the policy of a round in which `num_requests` may draft; budget 0 drafts nothing.

        Load is all that a choice may depend on: it is the same for all requests of a round, and
        greedy output is the same whatever is chosen. So far the choice is fixed.
        """
        return self._policy

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
    """Return the policy of a mode for trees of this depth and branching."""
    if mode == "off":
        return dataclasses.replace(shape, budget=0)
    if mode == "chain":
        return TreePolicy(shape.depth, 1, shape.depth)
    return dataclasses.replace(shape, budget=int(mode))
