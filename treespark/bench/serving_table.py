# SPDX-License-Identifier: Apache-2.0
"""What the cells of `tools/bench_serving.py` add up to: medians, ratios, shares; as Markdown too.

A cell is one measurement of one mode at one concurrency. Ratios are taken inside a repeat, where
both modes met the same machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treespark.bench.statistics import ROUND_PHASES, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Cell = dict[str, Any]

OFF, CHAIN, PEER = "off", "chain", "hf-generate"
# Title, key of a cell, digits.
NUMBERS = (
    ("Output tokens per second, all requests together", "output_throughput", 1),
    ("Output tokens per second of one request, from its first token on",
     "per_request_throughput", 1),
    ("Milliseconds to the first token, median of the requests", "median_ttft_ms", 0),
    ("Milliseconds per output token behind the first, mean", "mean_tpot_ms", 1),
    ("Committed tokens per round", "acceptance_length", 2),
)  # fmt: skip


def summarize_cells(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the spreads over the repeats, JSON-ready.

    loads: {label: {mode: {number: median, min, max}}}, labels as `load_label`.  ratios: {label:
    {"A / B": spread of the throughputs' ratio}}.  rounds: {label: {mode: see `round_shares`}}.
    stalls: {mode: see `stall_summary`}.  failed: requests without an answer.
    """
    loads: dict[str, dict[str, list[Cell]]] = {}
    stalls: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell["part"] == "stall":
            stalls.setdefault(cell["mode"], []).append(cell)
        else:
            group = loads.setdefault(load_label(cell), {})
            group.setdefault(cell["mode"], []).append(cell)
    return {
        "loads": {label: _by_mode(modes, _numbers) for label, modes in loads.items()},
        "ratios": {label: _ratios(modes) for label, modes in loads.items()},
        "rounds": {label: _by_mode(modes, round_shares) for label, modes in loads.items()},
        "stalls": _by_mode(stalls, stall_summary),
        "failed": sum(cell.get("failed", 0) for cell in cells),
    }


def load_label(cell: Cell) -> str:
    """Return how the tables call a load: its concurrency, and the workers where there are some."""
    label = f"C={cell['concurrency']}"
    return f"{label}, {cell['workers']} workers" if cell.get("workers") else label


def _by_mode(
    modes: dict[str, list[Cell]], summary: Callable[[Sequence[Cell]], Any]
) -> dict[str, Any]:
    made = {mode: summary(cells) for mode, cells in modes.items()}
    return {mode: value for mode, value in made.items() if value is not None}


def _numbers(cells: Sequence[Cell]) -> dict[str, Any]:
    return {key: _spread(cell.get(key) for cell in cells) for _, key, _ in NUMBERS}


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return spread(known) if known else None


def _ratios(modes: dict[str, list[Cell]]) -> dict[str, dict[str, float]]:
    """Every own mode against off, and every tree against the chain."""
    found = {}
    for base in (OFF, CHAIN):
        for mode in modes:
            if mode in (base, PEER, OFF) or base not in modes:
                continue
            speeds = [_speed_by_repeat(modes[name]) for name in (mode, base)]
            both = sorted(speeds[0].keys() & speeds[1].keys())
            if both:
                found[f"{mode} / {base}"] = spread([speeds[0][r] / speeds[1][r] for r in both])
    return found


def _speed_by_repeat(cells: Sequence[Cell]) -> dict[int, float]:
    return {cell["repeat"]: cell["output_throughput"] for cell in cells}


def round_shares(cells: Sequence[Cell]) -> dict[str, Any] | None:
    """Return where the engine's time went; None for cells that did not take it.

    ms_per_round: per phase of `PhaseClock`, summed over the repeats; `between` is the time of the
    measurement that no step accounts for: the hand-over of requests and answers, and waiting.
    outside_share: commit, host and between, that is all but the forwards of target and drafter,
    over the round; the head's and the Markov products of the drafter are in `expand`, beside the
    choice of nodes, so outside_share_with_expand is an upper bound.
    """
    timed = [cell for cell in cells if cell.get("phase_s")]
    rounds = sum(cell["num_timed_rounds"] for cell in timed)
    if not rounds:
        return None
    per_round = {
        phase: 1000 * sum(cell["phase_s"][phase] for cell in timed) / rounds
        for phase in ("prefill", *ROUND_PHASES)
    }
    whole = 1000 * sum(cell["duration"] for cell in timed) / rounds
    between = max(0.0, whole - sum(per_round.values()))
    base = whole - per_round["prefill"]
    outside = per_round["commit"] + per_round["host"] + between
    return {
        "num_rounds": rounds,
        "ms_per_round": per_round | {"between": between},
        "outside_share": outside / base,
        "outside_share_with_expand": (outside + per_round["expand"]) / base,
    }


def stall_summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return how long a stream waits while another prompt is read, in chunks of prefill.

    extra_chunks: (worst gap - median gap of the undisturbed stream) / time of one chunk.
    """
    keys = ("quiet_gap_ms", "worst_gap_ms", "chunk_ms", "extra_chunks")
    return {key: spread([cell[key] for cell in cells]) for key in keys}


# ------------------------------------------------------------------ Markdown


def markdown(setting: dict[str, Any], summary: dict[str, Any]) -> str:
    """Return the page of a measurement."""
    labels = list(summary["loads"])
    modes = list(dict.fromkeys(mode for label in labels for mode in summary["loads"][label]))
    parts = ["# Serving throughput", _setting_lines(setting), "Median (min..max) of the repeats."]
    for title, key, digits in NUMBERS:
        rows = []
        for mode in modes:
            values = [summary["loads"][label].get(mode, {}).get(key) for label in labels]
            rows.append([mode, *(_cell(value, digits) for value in values)])
        parts += [f"## {title}", _table(["mode", *labels], rows)]
    names = list(dict.fromkeys(name for label in labels for name in summary["ratios"][label]))
    rows = [[n, *(_cell(summary["ratios"][label].get(n), 2) for label in labels)] for n in names]
    parts += ["## Ratios of the throughputs, inside each repeat", _table(["", *labels], rows)]
    parts += _round_parts(summary["rounds"])
    parts += _stall_parts(summary["stalls"])
    parts.append(f"Requests that failed: {summary['failed']}.")
    return "\n\n".join(parts) + "\n"


def _setting_lines(setting: dict[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in setting.items())


def _round_parts(rounds: dict[str, dict[str, Any]]) -> list[str]:
    """Milliseconds of a round of the whole batch, by phase."""
    phases = ("prefill", *ROUND_PHASES, "between")
    rows = [
        [
            f"{mode}, {label}",
            *(f"{shares['ms_per_round'][phase]:.1f}" for phase in phases),
            f"{shares['outside_share']:.1%}",
            f"{shares['outside_share_with_expand']:.1%}",
        ]
        for label, modes in rounds.items()
        for mode, shares in modes.items()
    ]
    if not rows:
        return []
    note = (
        "`outside` is commit, host and the time between two steps over the round without prefill: "
        "everything but the forwards of target and drafter. `with expand` counts the expansion "
        "too, most of which is the drafter's own matrix products."
    )
    head = ["mode, load", *phases, "outside", "with expand"]
    return ["## Milliseconds of a round by phase", _table(head, rows), note]


def _stall_parts(stalls: dict[str, Any]) -> list[str]:
    rows = [
        [mode, *(_cell(row[key], 1) for key in ("quiet_gap_ms", "worst_gap_ms", "chunk_ms")),
         _cell(row["extra_chunks"], 2)]
        for mode, row in stalls.items()
    ]  # fmt: skip
    if not rows:
        return []
    head = ["mode", "usual gap, ms", "worst gap, ms", "one chunk, ms", "extra, in chunks"]
    return ["## A stream's gaps while another prompt is read", _table(head, rows)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(values: dict[str, float] | None, digits: int) -> str:
    if values is None:
        return "-"
    low, high = (f"{values[name]:.{digits}f}" for name in ("min", "max"))
    middle = f"{values['median']:.{digits}f}"
    return middle if low == high else f"{middle} ({low}..{high})"
