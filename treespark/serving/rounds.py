# SPDX-License-Identifier: Apache-2.0
"""What a round knows of its requests, and who may look at it or stand in for the drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treespark.serving.accept import Accepted
from treespark.tree.packed import PackedTree

if TYPE_CHECKING:
    from torch import Tensor

    from treespark.serving.scheduler import Request


@dataclass(frozen=True)
class RoundBatch:
    """The running requests as a round begins.

    slots: their cache rows.  lengths: committed tokens in front of each anchor.  anchors [R] int64.
    max_depths: deepest draft depth whose tokens could still be output, per request.  plain_reasons:
    why a request decodes without drafts, None where it drafts.
    """

    requests: list[Request]
    slots: list[int]
    lengths: list[int]
    anchors: Tensor
    max_depths: list[int]
    plain_reasons: list[str | None]

    @property
    def num_drafting(self) -> int:
        """Requests without a reason to decode plainly, whatever room their outputs have left."""
        return self.plain_reasons.count(None)

    @property
    def num_plain(self) -> int:
        """The others."""
        return len(self.plain_reasons) - self.num_drafting

    def drafting_rows(self, *, needs_room: bool = True) -> list[int]:
        """Return which requests draft; with `needs_room` those whose outputs have room for it."""
        pairs = enumerate(zip(self.plain_reasons, self.max_depths, strict=True))
        return [i for i, (why, depth) in pairs if why is None and (depth > 0 or not needs_room)]

    def select(self, rows: list[int]) -> RoundBatch:
        """Return the batch of these rows only, which ascend."""
        if len(rows) == len(self.requests):
            return self
        return RoundBatch(
            requests=[self.requests[i] for i in rows],
            slots=[self.slots[i] for i in rows],
            lengths=[self.lengths[i] for i in rows],
            anchors=self.anchors[rows],
            max_depths=[self.max_depths[i] for i in rows],
            plain_reasons=[self.plain_reasons[i] for i in rows],
        )


# Stands in for the drafter, for tests and experiments: any tree with at most `policy.budget` nodes.
Propose = Callable[[RoundBatch], PackedTree]
# Sees each round between verification and commit, for display; it changes nothing.
OnRound = Callable[[RoundBatch, PackedTree, list[Accepted]], None]
