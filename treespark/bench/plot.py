# SPDX-License-Identifier: Apache-2.0
"""The result of `compare` as bars: output tokens per second, with min..max as whiskers."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from treespark.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def check_matplotlib(verb: str) -> None:
    """Raise UsageError without matplotlib: before a measurement, not behind it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"treespark {verb} needs matplotlib: pip install 'treespark[bench]'")


def plot_bars(result: dict[str, Any], path: Path) -> None:
    """Write one group of bars per prompt file and overall; the format is that of path's suffix."""
    from matplotlib.figure import Figure

    files, methods = result["files"], result["methods"]
    groups = [*files, "overall"] if len(files) > 1 else files
    figure = Figure(figsize=(2.5 + 2.2 * len(groups), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.85 / len(methods)
    for number, row in enumerate(methods):
        parts = [row["by_file"].get(group, row["overall"])["tokens_per_s"] for group in groups]
        middle = [part["median"] for part in parts]
        low = [part["median"] - part["min"] for part in parts]
        high = [part["max"] - part["median"] for part in parts]
        places = [i + (number - (len(methods) - 1) / 2) * width for i in range(len(groups))]
        axes.bar(places, middle, width, yerr=[low, high], capsize=2, label=row["name"])
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("output tokens / s, prefill included")
    axes.set_title(
        f"{result['dtype']}, batch size {result['batch_size']}, {result['threads']} threads, "
        f"{result['repeats']} repeats (min..max)",
        fontsize=9,
    )
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
