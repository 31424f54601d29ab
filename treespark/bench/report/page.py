# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML page that needs nothing else: tables, plots and the tree explorer.

Texts of models, prompts and files are escaped in the markup, and as JSON in a data block that the
browser never runs; the script puts them into the page as text. The content security policy allows
that one script, by its hash, and no connection.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

from treespark.bench.report.render import page_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from treespark.bench.report.drawing import Drawing
    from treespark.bench.report.table import Table


def page(
    title: str,
    *,
    lead: str,
    notes: Sequence[str],
    tiles: Sequence[tuple[str, str]],
    sections: Sequence[tuple[str, Sequence[Table], Sequence[Drawing]]],
    explorer: dict[str, Any],
    facts: Sequence[tuple[str, str]],
) -> str:
    """Return the page.

    tiles: (number, what it is).  sections: (head, tables, drawings).  explorer: what
    `traces.explorer_data` returns.  facts: (name, value) of the setting.
    """
    script, style = _asset("page.js"), _asset("page.css")
    heads = [head for head, _, _ in sections] + ["Tree explorer", "Setting"]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{html.escape(title)}</title>",
            f"<style>\n{style}</style></head><body>",
            f'<header class="bar"><nav><b>treespark</b>{_links(heads)}</nav></header><main>',
            f'<h1>{html.escape(title)}</h1><p class="lead">{html.escape(lead)}</p>',
            _tiles(tiles),
            _notes(notes),
            *(_section(*section) for section in sections),
            _explorer(bool(explorer["traces"])),
            _facts(facts),
            "</main>",
            f'<script type="application/json" id="traces">{json_block(explorer)}</script>',
            f"<script>{script}</script>",
            "</body></html>\n",
        ]
    )


def json_block(value: Any) -> str:
    """Return JSON that no text in it can end: every `<`, `>`, `&` and line separator is escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Styles inline: matplotlib writes them into its elements.
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )


def _anchor(head: str) -> str:
    return "explore" if head == "Tree explorer" else re.sub(r"\W+", "-", head.lower())


def _links(heads: Iterable[str]) -> str:
    return "".join(f'<a href="#{_anchor(head)}">{html.escape(head)}</a>' for head in heads)


def _tiles(tiles: Sequence[tuple[str, str]]) -> str:
    inner = "".join(
        f'<div class="tile"><strong>{html.escape(number)}</strong>'
        f"<span>{html.escape(what)}</span></div>"
        for number, what in tiles
    )
    return f'<div class="tiles">{inner}</div>' if tiles else ""


def _notes(notes: Sequence[str]) -> str:
    inner = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f'<div class="notes">{inner}</div>' if notes else ""


def _section(head: str, tables: Sequence[Table], drawings: Sequence[Drawing]) -> str:
    parts = [f'<h2 id="{_anchor(head)}">{html.escape(head)}</h2>']
    parts += [page_table(table) for table in tables]
    for drawing in drawings:
        parts.append(
            f'<section id="{html.escape(drawing.key)}"><h3>{html.escape(drawing.title)}</h3>'
            f'<div class="figure">{drawing.inline_svg}</div>'
            f'<p class="caption">{html.escape(drawing.caption)}</p></section>'
        )
    return "\n".join(parts)


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(
        f"<tr><th scope=row>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in facts
    )
    return (
        '<h2 id="setting">Setting</h2><div class="scroll facts-table"><table><tbody>'
        f"{rows}</tbody></table></div>"
    )


def _explorer(has_traces: bool) -> str:
    head = '<div id="explore"><h2>Tree explorer</h2>'
    if not has_traces:
        empty = '<p class="empty">No request of this run was traced.</p><div id="explorer"></div>'
        return f"{head}{empty}</div>"
    facts = "".join(
        f'<div><dt>{label}</dt><dd id="fact-{name}"></dd></div>'
        for name, label in (
            ("committed", "tokens added"),
            ("nodes", "nodes verified"),
            ("chain", "the chain would add"),
            ("width", "width won"),
            ("wanted", "the target wanted"),
        )
    )
    return f"""{head}
<p class="caption">One request, round by round: the tree that the drafter proposed, the path that
the target accepted, and the token that it wanted next. Step with the buttons or <kbd>←</kbd>
<kbd>→</kbd>.</p>
<div id="explorer">
<div class="controls">
<label class="wide">request<select id="request"></select></label>
<label class="wide">method<select id="method"></select></label>
<div class="stepper">
<button id="previous" type="button" aria-label="previous round">←</button>
<span id="round-number" aria-live="polite"></span>
<button id="next" type="button" aria-label="next round">→</button>
<input id="round" type="range" min="0" step="1" aria-label="round">
</div></div>
<div id="timeline" aria-hidden="true"></div>
<dl class="facts">{facts}</dl>
<p id="fact-reason"></p>
<div id="tree" tabindex="0" role="region" aria-label="draft tree"></div>
<p id="node-detail"></p>
<ul class="legend">
<li><i class="accepted"></i>accepted</li>
<li><i class="wanted"></i>the target's own token, not in the tree</li>
<li><i class="elsewhere"></i>the same token behind other tokens</li>
<li><i class="chain"></i>what the chain would add (bars above: tokens a round)</li>
</ul>
<h3>The answer so far</h3>
<p id="output"></p>
</div></div>"""
