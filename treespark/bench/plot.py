# SPDX-License-Identifier: Apache-2.0
"""Measured speeds as bars, with min..max as whiskers."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def check_matplotlib(verb: str) -> None:
    """Raise UsageError without matplotlib: before a measurement, not behind it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"treespark {verb} needs matplotlib: pip install 'treespark[bench]'")


def plot_bars(result: dict[str, Any], path: Path) -> None:
    """Write one group of bars per prompt file and overall; the format is that of path's suffix."""
    files = result["files"]
    groups = [*files, "overall"] if len(files) > 1 else files
    rows = {
        row["name"]: [row["by_file"].get(g, row["overall"])["tokens_per_s"] for g in groups]
        for row in result["methods"]
    }
    title = (
        f"{result['dtype']}, batch size {result['batch_size']}, {result['threads']} threads, "
        f"{result['repeats']} repeats (min..max)"
    )
    grouped_bars(path, groups, rows, "output tokens / s, prefill included", title)


def grouped_bars(
    path: Path,
    groups: Sequence[str],
    rows: Mapping[str, Sequence[dict[str, float] | None]],
    label: str,
    title: str,
) -> None:
    """Write bars of medians with min..max as whiskers; the format is that of path's suffix.

    rows: name -> median, min and max in each group, None where there is no bar.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 2.2 * len(groups), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.85 / len(rows)
    for number, (name, parts) in enumerate(rows.items()):
        shift = (number - (len(rows) - 1) / 2) * width
        bars = [(i + shift, part) for i, part in enumerate(parts) if part is not None]
        places, middle = [place for place, _ in bars], [part["median"] for _, part in bars]
        low = [part["median"] - part["min"] for _, part in bars]
        high = [part["max"] - part["median"] for _, part in bars]
        axes.bar(places, middle, width, yerr=[low, high], capsize=2, label=name)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
