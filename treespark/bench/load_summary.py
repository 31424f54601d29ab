# SPDX-License-Identifier: Apache-2.0
"""What a load measurement adds up to, under the keys of `vllm bench serve`.

System throughput (`output_throughput`): output tokens of all requests over the elapsed time.
Per-request throughput (`per_request_throughput`): (output tokens - 1) / (finish - first token),
averaged over requests.  Source: evaluation protocol of TreeSpark.  TTFT: send to first text.
TPOT: (finish - first token) / (output tokens - 1).  ITL: between two events of a stream; a round
commits several tokens, so with drafts an event holds several.  E2EL: send to finish.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.table import Table

from treespark.data.jsonl import parse_object

if TYPE_CHECKING:
    from collections.abc import Sequence

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between two events",
    "e2el": "end to end",
}
# vLLM's, which our server exports too.
_COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens_total": "spec_decode_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "spec_decode_accepted_tokens",
}
_SAMPLE = re.compile(r"^([\w:]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass
class Outcome:
    """One request: `time.perf_counter` seconds of its events, counts of its usage, or its error."""

    start_s: float
    end_s: float = 0.0
    event_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_rounds: int = 0
    num_committed_tokens: int = 0
    error: str | None = None
    is_done: bool = False

    def read(self, line: str) -> None:
        """Take one line of the stream. Raises UsageError for one that is not an event's."""
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            self.is_done = True
            return
        body = parse_object(data.encode(), "event") or {}
        if "error" in body:
            self.error = f"error event: {body['error']}"[:200]
        choices = body.get("choices") or []
        if choices and (choices[0].get("text") or (choices[0].get("delta") or {}).get("content")):
            self.event_s.append(time.perf_counter())
            self.end_s = self.event_s[-1]
        usage = body.get("usage")
        if usage:
            self.num_prompt_tokens = usage["prompt_tokens"]
            self.num_output_tokens = usage["completion_tokens"]
        tree = ((body.get("metrics") or {}).get("speculative_decoding") or {}).get("tree")
        if tree:
            self.num_rounds = tree["num_rounds"]
            self.num_committed_tokens = tree["num_committed_tokens"]

    def close(self) -> None:
        """End it now; an answer without its end is an error."""
        if self.error is None and not self.is_done:
            self.error = "the stream ended without [DONE]"
        if not self.event_s or self.error is not None:
            self.end_s = time.perf_counter()

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last; 0 without text."""
        return self.end_s - self.event_s[0] if self.event_s else 0.0


def counters_of(text: str) -> dict[str, float]:
    """Return the sums of the speculative counters in a page of /metrics, by result key."""
    found: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        if name in _COUNTERS:
            found[_COUNTERS[name]] = found.get(_COUNTERS[name], 0.0) + float(value)
    return found


def summarize_load(
    outcomes: Sequence[Outcome],
    seconds: float,
    counters: dict[str, float],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """Return the result of a measurement, JSON-ready; what cannot be computed is None.

    counters: what the server counted meanwhile. Times are of completed requests only.
    """
    done = [outcome for outcome in outcomes if outcome.error is None]
    num_prompt = sum(outcome.num_prompt_tokens for outcome in done)
    num_output = sum(outcome.num_output_tokens for outcome in done)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(errors),
        "total_input_tokens": num_prompt,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_prompt + num_output) / seconds,
        "per_request_throughput": _mean([1 / s for s in _tpots(done) if s > 0]),
        "errors": errors[:10],
    }
    times = {
        "ttft": [o.event_s[0] - o.start_s for o in done if o.event_s],
        "tpot": _tpots(done),
        "itl": [b - a for o in done for a, b in zip(o.event_s, o.event_s[1:], strict=False)],
        "e2el": [o.end_s - o.start_s for o in done],
    }
    for name, values in times.items():
        result |= _spread(name, [1000 * value for value in values], percentiles)
    return result | _acceptance(done, counters)


def _tpots(done: Sequence[Outcome]) -> list[float]:
    later = [(o.decode_s, o.num_output_tokens - 1) for o in done if o.num_output_tokens > 1]
    return [decode_s / num_later for decode_s, num_later in later]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _spread(name: str, values: list[float], percentiles: Sequence[float]) -> dict[str, Any]:
    """Mean, median, standard deviation and percentiles of milliseconds, by vLLM's keys."""
    names = [f"p{percentile:g}" for percentile in percentiles]
    if not values:
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "std", *names)}
    numbers = [np.mean(values), np.median(values), np.std(values)]
    numbers += [np.percentile(values, percentile) for percentile in percentiles]
    kinds = ("mean", "median", "std", *names)
    return {f"{kind}_{name}_ms": float(n) for kind, n in zip(kinds, numbers, strict=True)}


def _acceptance(done: Sequence[Outcome], counters: dict[str, float]) -> dict[str, Any]:
    """Acceptance from the answers' own counts where they have them, else from /metrics.

    acceptance_length: committed tokens per round.  spec_decode_acceptance_length: vLLM's,
    1 + accepted / drafts, which over-counts a round that was cut.
    """
    rounds = sum(outcome.num_rounds for outcome in done)
    committed = sum(outcome.num_committed_tokens for outcome in done)
    result: dict[str, Any] = {"acceptance_length": committed / rounds if rounds else None}
    drafts = counters.get("spec_decode_num_drafts", 0)
    drafted, accepted = (
        counters.get(f"spec_decode_{name}_tokens", 0) for name in ("draft", "accepted")
    )
    if drafts:
        result |= counters
        result["spec_decode_acceptance_length"] = 1 + accepted / drafts
        result["spec_decode_acceptance_rate"] = accepted / drafted if drafted else None
    return result


def load_table(
    result: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]
) -> Table:
    """Return the result as a table for a terminal."""
    table = Table(title="load", title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    rows = [
        ("requests completed, failed", f"{result['completed']}, {result['failed']}"),
        ("duration, s", f"{result['duration']:.2f}"),
        ("prompt tokens", str(result["total_input_tokens"])),
        ("output tokens", str(result["total_output_tokens"])),
        ("output tokens / s, system", _number(result["output_throughput"])),
        ("output tokens / s, per request", _number(result["per_request_throughput"])),
        ("committed tokens per round", _number(result["acceptance_length"])),
    ]
    for name in metrics:
        for kind in ("mean", "median", *(f"p{percentile:g}" for percentile in percentiles)):
            label = f"{METRICS[name]}, ms, {kind}"
            rows.append((label, _number(result[f"{kind}_{name}_ms"])))
    for row in rows:
        table.add_row(*row)
    for error in result["errors"][:3]:
        table.add_row("error", error)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
