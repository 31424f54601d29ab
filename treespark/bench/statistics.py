# SPDX-License-Identifier: Apache-2.0
"""What the measured times, ids and phases of `compare` amount to; JSON-ready dicts."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from treespark.bench.methods import AUTOREGRESSIVE, CHAIN
from treespark.bench.metrics import acceptance_length

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from treespark.bench.compare import Measured
    from treespark.bench.workload import Prompt
    from treespark.serving.clock import PhaseClock
    from treespark.serving.records import RequestRecord

ROUND_PHASES = ("draft", "expand", "verify", "commit", "host")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, min and max."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def statistics(measured: Mapping[str, Measured], name: str, files: Sequence[str]) -> dict[str, Any]:
    """Return throughput, ratios and acceptance of one method by file and overall, and all repeats.

    A ratio is taken inside each repeat, where both methods met the same machine, and then summed up
    as median, min and max.
    """
    own = measured[name]
    return {
        "by_file": {file: _summary(measured, name, [file]) for file in files},
        "overall": _summary(measured, name, files),
        "measurements": [
            {"repeat": repeat, "file": file, "wall_s": wall_s, "num_output_tokens": num_tokens}
            for ((repeat, file), wall_s), num_tokens in zip(
                own.walls.items(), own.tokens.values(), strict=True
            )
        ],
    }


def _summary(measured: Mapping[str, Measured], name: str, files: Sequence[str]) -> dict[str, Any]:
    speeds = _speeds(measured[name], files)
    records = [r for file in files for r in measured[name].records.get(file, [])]
    summary: dict[str, Any] = {
        "tokens_per_s": spread(speeds),
        "acceptance_length": acceptance_length(records),
        "mean_nodes": mean_nodes(records),
    }
    for base in (AUTOREGRESSIVE, CHAIN):
        ratio = None
        if base in measured:
            others = _speeds(measured[base], files)
            ratio = spread([a / b for a, b in zip(speeds, others, strict=True)])
        summary[f"ratio_to_{base}"] = ratio
    return summary


def _speeds(own: Measured, files: Sequence[str]) -> list[float]:
    """Output tokens per second, one value per repeat."""
    return [
        sum(own.tokens[repeat, file] for file in files)
        / sum(own.walls[repeat, file] for file in files)
        for repeat in range(len(own.answers))
    ]


def mean_nodes(records: Sequence[RequestRecord]) -> float | None:
    """Return the mean number of tree nodes verified per round; None without a round."""
    rounds = [round_ for record in records for round_ in record.rounds]
    return sum(r.num_proposed for r in rounds) / len(rounds) if rounds else None


def equality(base: Measured, other: Measured, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Compare the token ids of every repeat with the first autoregressive ones, exactly.

    num_different: prompts that differ in any repeat.  first: the first of them, with the output
    position from 0 at which the ids part.
    """
    different = []
    for index, prompt in enumerate(prompts):
        expected = base.answers[0][index]
        wrong = [answers[index] for answers in other.answers if answers[index] != expected]
        if wrong:
            pairs = enumerate(zip(expected, wrong[0], strict=False))
            shorter = min(len(expected), len(wrong[0]))
            position = next((i for i, (a, b) in pairs if a != b), shorter)
            different.append({"file": prompt.file, "prompt": prompt.name, "position": position})
    return {"num_different": len(different), "first": different[0] if different else None}


def phase_profile(clock: PhaseClock) -> dict[str, Any]:
    """Return milliseconds per round by phase and the host's share of a round; prefill is apart."""
    rounds = max(clock.num_rounds, 1)
    per_round = {phase: 1000 * clock.seconds[phase] / rounds for phase in ROUND_PHASES}
    whole = sum(per_round.values())
    return {
        "num_rounds": clock.num_rounds,
        "mean_batch": clock.num_rows / rounds,
        "ms_per_round": per_round,
        "round_ms": whole,
        "host_share": per_round["host"] / whole if whole else None,
        "prefill_s": clock.seconds["prefill"],
    }
