# SPDX-License-Identifier: Apache-2.0
"""What all figures of a report share: colours, axes, lines and bars with whiskers."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from treespark.bench.report.results import Results, Value
    from treespark.bench.suite_records import MethodRow

# Told apart also by most of those who see fewer colours, and on light and dark grounds. The page
# replaces them, and INK, by its own colours; hence all differ.
PALETTE = (
    "#7d8590",
    "#8a63d2",
    "#2f81f7",
    "#1b998b",
    "#0fb5c7",
    "#d99000",
    "#e5534b",
    "#c75ba0",
    "#7fa928",
    "#a3714a",
    "#5a6fd6",
    "#b8574f",
    "#4f9d4c",
)
INK = "#24292f"
_GROUND = "#fefefe"
# What would reach beyond the figure, and what nobody reads.
_NOT_INLINE = re.compile(r"<(style|metadata)\b.*?</\1>\s*", re.DOTALL)
# Where an id begins, and a reference to one.
_ID = re.compile(r'(?<= id=")|(?<=href="#)|(?<=url\(#)')


@dataclass(frozen=True)
class Drawing:
    """A figure.  key: a name for files and links."""

    key: str
    title: str
    caption: str
    figure: Figure

    @cached_property
    def svg(self) -> str:
        """The figure on white, its text as text; its ids begin with `key`."""
        import matplotlib

        stream = io.StringIO()
        # A fixed salt and no date: equal records give equal files.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.key}):
            self.figure.savefig(
                stream, format="svg", facecolor=_GROUND, metadata={"Date": None, "Creator": None}
            )
        return _ID.sub(f"{self.key}-", stream.getvalue())

    @property
    def inline_svg(self) -> str:
        """The figure inside a page: without a ground, in the page's own colours."""
        text = self.svg[self.svg.index("<svg") :].replace(_GROUND, "none")
        text = _NOT_INLINE.sub("", text)
        for place, shade in enumerate(PALETTE):
            text = text.replace(shade, f"var(--s{place})")
        return text.replace(INK, "var(--ink)")


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels side by side, on a transparent ground."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(1, columns, squeeze=False)
    for axes in grid[0]:
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(INK)
        axes.tick_params(colors=INK, labelsize=8)
        axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, list(grid[0])


def label_axes(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Write a panel's title and axes."""
    axes.set_title(title, fontsize=9, color=INK, loc="left")
    axes.set_xlabel(x_label, fontsize=8, color=INK)
    axes.set_ylabel(y_label, fontsize=8, color=INK)


def count_ticks(axes: Axes) -> None:
    """Give an axis of depths or tokens ticks at whole numbers only."""
    axes.xaxis.get_major_locator().set_params(integer=True)


def legend(figure: Figure, axes: Axes) -> None:
    """Put the labels of a panel below the figure."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 5),
        fontsize=8,
        frameon=False,
        labelcolor=INK,
    )


def colour(results: Results, method: str) -> str:
    """Return the colour of a method."""
    names = [m.name for m in results.study.methods]
    return PALETTE[names.index(method) % len(PALETTE)]


def line(
    axes: Axes, x: Sequence[float], values: Sequence[Value | None], colour: str, label: str
) -> None:
    """Draw a line through the values, with whiskers over the repeats."""
    points = [(place, value) for place, value in zip(x, values, strict=True) if value is not None]
    axes.errorbar(
        [place for place, _ in points],
        [value.value for _, value in points],
        yerr=_whiskers([value for _, value in points]),
        color=colour,
        marker="o",
        markersize=3.5,
        linewidth=1.5,
        capsize=2,
        label=label,
    )


def _whiskers(values: Sequence[Value]) -> list[list[float]]:
    return [[v.value - v.low for v in values], [v.high - v.value for v in values]]


def bars(
    results: Results,
    axes: Axes,
    groups: Sequence[str],
    methods: Sequence[MethodRow],
    value: Callable[[str, MethodRow], Value | None],
) -> None:
    """Draw one group of bars a name, one bar a method, whiskers over the repeats."""
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        found = [(i, v) for i, g in enumerate(groups) if (v := value(g, method)) is not None]
        axes.bar(
            [i + (number - (len(methods) - 1) / 2) * width for i, _ in found],
            [v.value for _, v in found],
            width * 0.92,
            yerr=_whiskers([v for _, v in found]),
            error_kw={"elinewidth": 0.8, "ecolor": INK},
            color=colour(results, method.name),
            label=method.title,
        )
    turned = {"rotation": 30, "ha": "right"} if len(groups) > 8 else {}
    axes.set_xticks(range(len(groups)), groups, **turned)
    axes.axhline(0, color=INK, linewidth=0.6)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:+.0%}" if y else "0%")
