# SPDX-License-Identifier: Apache-2.0
"""What an engine has done since it started, and what it is doing now, for a metrics page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treespark.serving.records import RoundRecord
    from treespark.serving.scheduler import Request


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine.

    num_running: requests that hold a slot.  kv_usage: share of the cache's rows that hold committed
    tokens, 0..1.  tree_budget: nodes a tree may have now.  The totals never fall; they count what
    has been output for good, which while stop strings are watched lags a few tokens.
    num_cached_tokens: prompt tokens whose rows were there already.  num_drafts: rounds of a request
    with at least one node.  num_draft_tokens: nodes verified.  num_accepted_per_position[j]: rounds
    that accepted at least j + 1 draft tokens.  phase_s: seconds by phase, as in `PhaseClock`, of
    `num_timed_rounds` rounds of the whole batch; None and 0 in an engine without `profile`.
    """

    num_running: int
    num_waiting: int
    num_free_slots: int
    kv_usage: float
    tree_budget: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_rounds: int
    num_committed_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_per_position: list[int]
    num_cached_tokens: int = 0
    phase_s: dict[str, float] | None = None
    num_timed_rounds: int = 0


@dataclass
class Totals:
    """Sums over all requests since the start; each field means what `EngineStats` says."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_rounds: int = 0
    num_committed_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)

    def count(self, request: Request, num_tokens: int) -> None:
        """Add what is new in a request whose first `num_tokens` output tokens are final.

        A round counts once all its tokens are final: a stop string may still cut the newest ones.
        """
        seen, record = request.counted, request.record
        if seen.num_rounds == 0:
            seen.round_end = record.num_prefill_tokens
        self.num_generation_tokens += num_tokens - seen.num_tokens
        seen.num_tokens = num_tokens
        for round_ in record.rounds[seen.num_rounds :]:
            end = seen.round_end + round_.num_committed
            if request.finish_reason is None and end > num_tokens:
                break
            seen.round_end = end
            seen.num_rounds += 1
            self._add(round_)

    def _add(self, round_: RoundRecord) -> None:
        self.num_rounds += 1
        self.num_committed_tokens += round_.num_committed
        self.num_drafts += round_.num_proposed > 0
        self.num_draft_tokens += round_.num_proposed
        self.num_accepted_tokens += round_.num_accepted
        # A proposer in a drafter's place may go deeper than the policy.
        positions = self.num_accepted_per_position
        positions += [0] * (round_.num_accepted - len(positions))
        for depth in range(round_.num_accepted):
            positions[depth] += 1


@dataclass
class Counted:
    """How far `Totals` has counted one request: output tokens, rounds, and their last token."""

    num_tokens: int = 0
    num_rounds: int = 0
    round_end: int = 0
