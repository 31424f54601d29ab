# SPDX-License-Identifier: Apache-2.0
"""Tables as Markdown, LaTeX (booktabs), HTML and JSON. Every text is escaped for its format."""

from __future__ import annotations

import html
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treespark.bench.report.table import Cell, Row, Table

_MARKDOWN = re.compile(r"([\\`*_\[\]<>|])")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def escape_markdown(text: str) -> str:
    """Return Markdown that shows the text on one line."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def markdown(table: Table) -> str:
    """Return the table with its title and caption."""
    text = escape_markdown

    def cell(value: Cell) -> str:
        strong = f"**{text(value.text)}**" if value.is_best else text(value.text)
        return f"{strong} ({value.spread})" if value.spread else strong

    def label(row: Row) -> str:
        return f"*{text(row.label)}*" if row.kind != "method" else text(row.label)

    lines = [
        ["", *map(text, table.columns), ""],
        ["", "---", *["---:"] * len(table.columns[1:]), ""],
    ]
    lines += [["", label(row), *map(cell, row.cells), ""] for row in table.rows]
    grid = "\n".join(" | ".join(line).strip() for line in lines)
    return f"### {text(table.title)}\n\n{grid}\n\n{text(table.caption)}\n"


def latex(table: Table) -> str:
    """Return a table environment; needs the package booktabs."""

    def text(value: str) -> str:
        return "".join(_LATEX.get(sign, sign) for sign in value)

    def cell(value: Cell) -> str:
        strong = f"\\textbf{{{text(value.text)}}}" if value.is_best else text(value.text)
        return f"{strong} {{\\scriptsize ({text(value.spread)})}}" if value.spread else strong

    def label(row: Row) -> str:
        return f"\\emph{{{text(row.label)}}}" if row.kind != "method" else text(row.label)

    lines = [
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{text(table.title)}. {text(table.caption)}}}",
        f"\\label{{{table.key}}}",
        f"\\begin{{tabular}}{{l{'r' * len(table.columns[1:])}}}",
        "\\toprule",
        " & ".join(map(text, table.columns)) + " \\\\",
    ]
    kind = None
    for row in table.rows:
        # A paper's row belongs to the rows above it.
        if row.kind not in ("paper", kind):
            kind = row.kind
            lines.append("\\midrule")
        lines.append(" & ".join([label(row), *map(cell, row.cells)]) + " \\\\")
    lines += ["\\bottomrule", "\\end{tabular}", "\\end{table}"]
    return "\n".join(lines) + "\n"


def page_table(table: Table) -> str:
    """Return an HTML figure that scrolls sideways where it is too wide."""

    def cell(value: Cell) -> str:
        text = html.escape(value.text)
        strong = f"<b>{text}</b>" if value.is_best else text
        return f"{strong} <small>{html.escape(value.spread)}</small>" if value.spread else strong

    heads = "".join(f"<th scope=col>{html.escape(name)}</th>" for name in table.columns)
    rows = "".join(
        f"<tr class={row.kind}><th scope=row>{html.escape(row.label)}</th>"
        f"{''.join(f'<td>{cell(value)}</td>' for value in row.cells)}</tr>"
        for row in table.rows
    )
    return (
        f'<section class=table id="{html.escape(table.key)}"><h3>{html.escape(table.title)}</h3>'
        f'<div class=scroll tabindex=0 role=region aria-label="{html.escape(table.title)}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"<p class=caption>{html.escape(table.caption)}</p></section>"
    )


def json_table(table: Table) -> dict[str, Any]:
    """Return the table with its unrounded numbers."""
    return asdict(table)
