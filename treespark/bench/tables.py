# SPDX-License-Identifier: Apache-2.0
"""The result of `compare` as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from treespark.bench.statistics import ROUND_PHASES
from treespark.data.terminal import plain_console

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


_WIDTH = 110


def wide_console() -> Console:
    """Return a console on stdout that is wide enough for the tables where it is no terminal."""
    console = plain_console()
    return console if console.is_terminal else plain_console(_WIDTH)


def print_result(console: Console, result: dict[str, Any], out: Path) -> None:
    """Print setting, one table per prompt file and overall, equality, phases if there are any."""
    load = result["load_average"]
    lines = [
        f"{result['num_prompts']} prompts, at most {result['max_tokens']} tokens, batch size "
        f"{result['batch_size']}, {result['dtype']} on {result['device']}, {result['threads']} "
        f"threads, {result['repeats']} repeats, load {load['start'][0]:.1f} to "
        f"{load['end'][0]:.1f}",
        f"tok/s = {result['throughput']}; median (min..max) over the repeats",
    ]
    console.print(Text("\n".join(lines)))
    for file in result["files"] if len(result["files"]) > 1 else []:
        console.print(speed_table(result, file))
    console.print(speed_table(result, None))
    if any("profile" in row for row in result["methods"]):
        console.print(profile_table(result))
    written = f"written: {out}/compare.json, .svg, .png"
    for line in [*equality_lines(result), *result["notes"], written]:
        console.print(Text(line))


def speed_table(result: dict[str, Any], file: str | None) -> Table:
    """Return the table of one prompt file, or of all prompts."""
    table = Table(title=file or "overall", title_justify="left", box=box.SIMPLE)
    table.add_column("method")
    for name in ("tok/s", "x autoregressive", "x chain", "acceptance", "nodes"):
        table.add_column(name, justify="right")
    for row in result["methods"]:
        part = row["overall"] if file is None else row["by_file"][file]
        table.add_row(
            row["name"],
            _spread(part["tokens_per_s"], 1),
            _spread(part["ratio_to_autoregressive"], 2),
            _spread(part["ratio_to_chain"], 2),
            _number(part["acceptance_length"], 2),
            _number(part["mean_nodes"], 1),
        )
    return table


def profile_table(result: dict[str, Any]) -> Table:
    """Return milliseconds per round by phase."""
    table = Table(
        title="ms per round by phase (prefill apart)", title_justify="left", box=box.SIMPLE
    )
    table.add_column("method")
    for name in (*ROUND_PHASES, "round", "host share", "rounds", "prefill s"):
        table.add_column(name, justify="right")
    for row in result["methods"]:
        if "profile" in row:
            phases = row["profile"]
            share = phases["host_share"]
            table.add_row(
                row["name"],
                *(f"{phases['ms_per_round'][phase]:.2f}" for phase in ROUND_PHASES),
                f"{phases['round_ms']:.2f}",
                "-" if share is None else f"{share:.1%}",
                str(phases["num_rounds"]),
                f"{phases['prefill_s']:.2f}",
            )
    return table


def equality_lines(result: dict[str, Any]) -> list[str]:
    """Say which answers differ from autoregressive ones, and what that means."""
    lines = []
    for row in result["methods"]:
        different, first = row["equality"]["num_different"], row["equality"]["first"]
        if different:
            lines.append(
                f"{row['name']}: {different} of {result['num_prompts']} answers differ from "
                f"autoregressive, first {first['prompt']} at output token {first['position']}"
            )
    if not lines:
        return [f"All {result['num_prompts']} answers are equal, token by token, by all methods."]
    if result["dtype"] not in ("float32", "float64"):
        lines.append(
            f"{result['dtype']} rounds differently when a forward has more rows: near ties may "
            "fall either way. float32 must be equal."
        )
    return lines


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread(values: dict[str, float] | None, digits: int) -> str:
    if values is None:
        return "-"
    text = f"{values['median']:.{digits}f}"
    if values["min"] == values["max"]:
        return text
    return f"{text} ({values['min']:.{digits}f}..{values['max']:.{digits}f})"
