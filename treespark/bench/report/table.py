# SPDX-License-Identifier: Apache-2.0
"""A table before it has a format: cells of text that keep their unrounded numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from treespark.bench.report.results import Value

MISSING = "-"


@dataclass(frozen=True)
class Cell:
    """One cell.

    text: as printed.  spread: lowest and highest of the repeats as printed, "" where they are one.
    value: unrounded, None for text.  is_best: the largest of its column.
    """

    text: str = ""
    spread: str = ""
    value: Value | None = None
    is_best: bool = False

    @property
    def whole(self) -> str:
        """Text and spread."""
        return f"{self.text} ({self.spread})" if self.spread else self.text


@dataclass(frozen=True)
class Row:
    """One row.  kind: method, gain (of one method over another) or paper (not measured by us)."""

    label: str
    cells: list[Cell]
    kind: str = "method"


@dataclass(frozen=True)
class Table:
    """A table.  key: a name for files and links.  columns: heads, that of the labels first."""

    key: str
    title: str
    columns: list[str]
    rows: list[Row]
    caption: str = ""


def number_cell(value: Value | None, digits: int) -> Cell:
    """Return a number and its spread, rounded for print."""
    return _cell(value, lambda number: f"{number:.{digits}f}")


def gain_cell(value: Value | None) -> Cell:
    """Return a gain as a signed percentage."""
    return _cell(value, lambda number: f"{number:+.1%}")


def text_row(label: str, texts: Sequence[str], kind: str = "method") -> Row:
    """Return a row of plain texts."""
    return Row(label, [Cell(text) for text in texts], kind)


def marked(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the largest unrounded number of each column marked as best."""
    best = []
    for column in zip(*(row.cells for row in rows), strict=True):
        best.append(max((c.value.value for c in column if c.value is not None), default=None))
    return [
        replace(
            row,
            cells=[
                replace(cell, is_best=cell.value is not None and cell.value.value == most)
                for cell, most in zip(row.cells, best, strict=True)
            ],
        )
        for row in rows
    ]


def _cell(value: Value | None, shown: Callable[[float], str]) -> Cell:
    if value is None:
        return Cell(MISSING)
    low, high = shown(value.low), shown(value.high)
    return Cell(shown(value.value), "" if low == high else f"{low}..{high}", value)
