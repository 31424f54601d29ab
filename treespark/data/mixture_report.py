# SPDX-License-Identifier: Apache-2.0
"""What a mixture was made from: where every row of every source went, and its composition."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from treespark.data.jsonl import Row
from treespark.data.terminal import plain_console

# Counts of a source that part its rows: their sum is `read`.
FATES = (
    "filtered_out",
    "bad_or_empty",
    "duplicate",
    "contaminated_exact",
    "too_long",
    "contaminated_trigram",
    "not_drawn",
    "duplicate_of_other_source",
    "cut",
    "written",
)


@dataclass
class SourceReport:
    """Counts of one source; `drawn` is what is written, cut or was drawn by another source too.

    near_duplicates: written rows that some other written row resembles, of any source.
    first_bad: why the first row of `bad_or_empty` is one.
    """

    name: str
    category: str
    quota: int
    read: int = 0
    filtered_out: int = 0
    bad_or_empty: int = 0
    duplicate: int = 0
    contaminated_exact: int = 0
    too_long: int = 0
    contaminated_trigram: int = 0
    not_drawn: int = 0
    drawn: int = 0
    duplicate_of_other_source: int = 0
    cut: int = 0
    written: int = 0
    near_duplicates: int = 0
    first_bad: str | None = None

    def drops(self) -> dict[str, int]:
        """Return the counts above 0, without the written ones."""
        return {name: getattr(self, name) for name in FATES[:-1] if getattr(self, name)}

    def check(self) -> None:
        """Assert that every row read is in exactly one count."""
        assert self.read == sum(getattr(self, name) for name in FATES)
        assert self.drawn == self.duplicate_of_other_source + self.cut + self.written


@dataclass
class MixtureReport:
    """The recipe with all its defaults, the sources' counts, and what the file is made of.

    composition: {category: {count, percent}}; percent of the rows written, two decimals.
    near_duplicate_examples: pairs of ids.
    """

    recipe: dict[str, Any]
    sources: list[SourceReport] = field(default_factory=list)
    written: int = 0
    composition: dict[str, dict[str, float]] = field(default_factory=dict)
    near_duplicate_pairs: int = 0
    near_duplicate_examples: list[list[str]] = field(default_factory=list)

    def close(self, rows: list[Row]) -> None:
        """Enter the composition of the rows written, and check that all counts add up."""
        for counts in self.sources:
            counts.check()
        self.written = len(rows)
        found = Counter(row["category"] for row in rows)
        self.composition = {
            category: {"count": found[category], "percent": round(100 * num / len(rows), 2)}
            for category, num in sorted(found.items())
        }
        assert self.written == sum(counts.written for counts in self.sources)


def print_report(report: MixtureReport, out: Path) -> None:
    """Print where the rows of each source went, and the composition."""
    console = plain_console()
    names = ("read", *FATES, "near_duplicates")
    table = Table(title=f"{out}: {report.written} prompts", title_justify="left")
    table.add_column("rows")
    for counts in report.sources:
        table.add_column(counts.name, justify="right")
    for name in names:
        values = [getattr(counts, name) for counts in report.sources]
        # A line of zeros says nothing; the report file holds it.
        if any(values):
            table.add_row(name.replace("_", " "), *map(str, values))
    console.print(table)
    console.print(f"near duplicates: {report.near_duplicate_pairs} pairs", highlight=False)
    shares = Table(title="Composition", title_justify="left")
    shares.add_column("category")
    shares.add_column("prompts", justify="right")
    shares.add_column("percent", justify="right")
    for category, part in report.composition.items():
        shares.add_row(category, str(part["count"]), f"{part['percent']:.2f} %")
    console.print(shares)
