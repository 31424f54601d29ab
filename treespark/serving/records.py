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
    plain_decoding: why rounds had no drafts although others may have: "sampling", "off" (no
    drafter, or a fixed budget of 0) or "drafter_context" (from some token on, the drafter's context
    being shorter than the target's); None while the request drafts.
    """

    num_prompt_tokens: int
    arrival_s: float
    num_prefill_tokens: int = 0
    rounds: list[RoundRecord] = field(default_factory=list)
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    plain_decoding: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens in the output."""
        return self.num_prefill_tokens + sum(r.num_committed for r in self.rounds)

    @property
    def num_rounds(self) -> int:
        """Rounds that the request took part in."""
        return len(self.rounds)

    @property
    def num_drafts(self) -> int:
        """Rounds with at least one proposed node."""
        return sum(r.num_proposed > 0 for r in self.rounds)

    @property
    def num_proposed(self) -> int:
        """Tree nodes sent to the target in all rounds."""
        return sum(r.num_proposed for r in self.rounds)

    @property
    def num_accepted(self) -> int:
        """Draft tokens in the output."""
        return sum(r.num_accepted for r in self.rounds)

    @property
    def accepted_per_depth(self) -> list[int]:
        """Rounds that accepted a draft token at depth 1, 2, ... down to the deepest proposed."""
        deepest = max((r.proposed_depth for r in self.rounds), default=0)
        return [sum(r.num_accepted > depth for r in self.rounds) for depth in range(deepest)]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's own judgement of one output token: raw log-softmax, before any sampling option.

    rank: 1 for the most likely token.  top: the most likely tokens and their log-probabilities,
    best first, equal ones by id; as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
