# SPDX-License-Identifier: Apache-2.0
"""What one decode round and one request leave behind for the metrics: plain counts and times.

Only `treespark.serving.commit` writes the counts; `treespark.bench.metrics` says what they mean
together.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RoundRecord:
    """One request's share of one round.

    num_committed: tokens the round added to the output (accepted path plus bonus, after every cut).
    num_accepted: draft tokens among them, the bonus excluded.
    num_proposed: tree nodes sent to the target, the anchor excluded.
    proposed_depth: depth of the deepest proposed node; where the round ended inside its accepted
    path at a stop, the depth of that stop.
    """

    num_committed: int
    num_accepted: int
    num_proposed: int
    proposed_depth: int


@dataclass(slots=True)
class RequestRecord:
    """Counts and times of one request; times are `time.perf_counter` seconds, None until reached.

    num_output_tokens = num_prefill_tokens + sum of the rounds' num_committed, at every moment:
    the token that prefill yields is output but belongs to no round.
    """

    num_prompt_tokens: int
    arrival_s: float
    num_prefill_tokens: int = 0
    rounds: list[RoundRecord] = field(default_factory=list)
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens in the output."""
        return self.num_prefill_tokens + sum(r.num_committed for r in self.rounds)
