# SPDX-License-Identifier: Apache-2.0
"""What the records of served requests add up to. Every number's definition is in its docstring.

A "round" is one request's share of one draft-verify-commit; the token that prefill yields belongs
to none. Sums run over all rounds of all requests, never over per-request means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from treespark.serving.records import RequestRecord, RoundRecord

__all__ = [
    "PositionRates",
    "RequestRecord",
    "RoundRecord",
    "acceptance_length",
    "acceptance_rate",
    "output_throughput",
    "position_rates",
    "summarize",
    "tpot_s",
    "ttft_s",
]

Records = Sequence[RequestRecord]


def _rounds(records: Records) -> list[RoundRecord]:
    return [round_ for record in records for round_ in record.rounds]


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def acceptance_length(records: Records) -> float | None:
    """Committed tokens per round: sum of num_committed / number of rounds; None without a round.

    The bonus counts when it is output, the anchor and the prefill token do not. Tokens cut at a
    stop or at the limit do not count, so a last round counts what it really added. At most B + 1.
    Source: TreeSpark E.2.
    """
    rounds = _rounds(records)
    return _ratio(sum(r.num_committed for r in rounds), len(rounds))


def acceptance_rate(records: Records) -> float | None:
    """Accepted draft tokens / proposed tree nodes; None if nothing was proposed.

    A tree proposes siblings of which at most one can be accepted: compare it only between equal
    budgets.
    """
    rounds = _rounds(records)
    return _ratio(sum(r.num_accepted for r in rounds), sum(r.num_proposed for r in rounds))


@dataclass(frozen=True)
class PositionRates:
    """Cumulative acceptance at positions j = 0..B-1, where position j is depth j + 1.

    num_accepting[j]: rounds that accepted at least j + 1 draft tokens.  num_proposing[j]: rounds
    whose tree has a node at depth j + 1; behind an accepted stop nothing counts as proposed.
    num_rounds: all rounds.
    """

    num_accepting: list[int]
    num_proposing: list[int]
    num_rounds: int

    @property
    def over_proposing(self) -> list[float | None]:
        """num_accepting / num_proposing; None where no round proposed.

        For a chain this is the usual position-wise acceptance rate. A tree of few nodes goes deep
        only where the drafter is sure, which flatters its deep positions.
        """
        pairs = zip(self.num_accepting, self.num_proposing, strict=True)
        return [_ratio(accepting, proposing) for accepting, proposing in pairs]

    @property
    def over_rounds(self) -> list[float | None]:
        """num_accepting / num_rounds: equal denominators, so trees and chains compare.

        The sum over j plus one is the acceptance length, but for rounds without a bonus.
        """
        return [_ratio(accepting, self.num_rounds) for accepting in self.num_accepting]


def position_rates(records: Records, num_positions: int) -> PositionRates:
    """Count acceptance per position for `num_positions` (B) draft depths."""
    rounds, positions = _rounds(records), range(num_positions)
    return PositionRates(
        num_accepting=[sum(r.num_accepted > j for r in rounds) for j in positions],
        num_proposing=[sum(r.proposed_depth > j for r in rounds) for j in positions],
        num_rounds=len(rounds),
    )


def ttft_s(record: RequestRecord) -> float | None:
    """Time to first token in seconds: from arrival, waiting for a slot included."""
    return None if record.first_token_s is None else record.first_token_s - record.arrival_s


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token in seconds behind the first; None for fewer than two tokens.

    (finish - first token) / (output tokens - 1). A round yields several tokens at once, so this is
    a mean, not the time between two tokens.
    """
    if record.first_token_s is None or record.finished_s is None or record.num_output_tokens < 2:
        return None
    return (record.finished_s - record.first_token_s) / (record.num_output_tokens - 1)


def output_throughput(records: Records, wall_s: float) -> float | None:
    """Output tokens of all requests per second of wall time."""
    return _ratio(sum(record.num_output_tokens for record in records), wall_s)


def summarize(records: Records, wall_s: float, num_positions: int) -> dict[str, Any]:
    """Return all metrics as a JSON-ready dict; what cannot be computed is None.

    The num_drafts, num_draft_tokens and num_accepted_tokens counters have vLLM's meanings; vLLM's
    own acceptance length, 1 + accepted / drafts, follows from them.
    """
    rounds, rates = _rounds(records), position_rates(records, num_positions)
    ttfts = [s for record in records if (s := ttft_s(record)) is not None]
    tpots = [s for record in records if (s := tpot_s(record)) is not None]
    return {
        "num_requests": len(records),
        "num_prompt_tokens": sum(record.num_prompt_tokens for record in records),
        "num_output_tokens": sum(record.num_output_tokens for record in records),
        "wall_s": wall_s,
        "output_throughput": output_throughput(records, wall_s),
        "mean_ttft_ms": 1000 * fmean(ttfts) if ttfts else None,
        "mean_tpot_ms": 1000 * fmean(tpots) if tpots else None,
        "acceptance_length": acceptance_length(records),
        "acceptance_rate": acceptance_rate(records),
        "num_drafts": sum(r.num_proposed > 0 for r in rounds),
        "num_draft_tokens": sum(r.num_proposed for r in rounds),
        "num_accepted_tokens": sum(r.num_accepted for r in rounds),
        "positions": asdict(rates)
        | {"over_proposing": rates.over_proposing, "over_rounds": rates.over_rounds},
    }
