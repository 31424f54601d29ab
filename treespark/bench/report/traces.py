# SPDX-License-Identifier: Apache-2.0
"""Traced rounds: what the tree explorer shows, and why wanted tokens were missing, in numbers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from treespark.bench.report.table import MISSING, Table, text_row
from treespark.bench.suite_records import (
    COMMITTED,
    CUT,
    DEPTH_LIMIT,
    NOT_IN_TOP_K,
    PRUNED,
    REASONS,
    WRONG_PARENT,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treespark.bench.report.study import Study
    from treespark.bench.suite_records import TraceRow

Traces = list[list["TraceRow"]]

EXPLANATIONS = {
    COMMITTED: "No token was missing: the answer ended inside the accepted path.",
    NOT_IN_TOP_K: "Not in top-k: the drafter did not see it among the best children of its parent.",
    PRUNED: "Pruned from the frontier: its parent was kept, but was not among the nodes that the "
    "drafter expanded.",
    CUT: "Cut by the budget: it was proposed here, and the tree had no room for it, or it stood "
    "below the method's threshold.",
    WRONG_PARENT: "Wrong parent: the tree has this token at this depth, but behind other tokens.",
    DEPTH_LIMIT: "Depth limit: the whole path was right, and trees go no deeper.",
}
# As heads of tables.
SHORT = {reason: "none missing" if reason == COMMITTED else reason for reason in REASONS}
# Digits of a score that the page keeps: a probability to one in a thousand.
_SCORE_DIGITS = 3


def study_traces(study: Study) -> Traces:
    """Return all complete traces of a study, each as its rounds in order."""
    # Runs that share prompts have traced them twice.
    traces = {trace[0].key: trace for run in study.runs for trace in run.traces()}
    return [sorted(trace, key=lambda row: row.round) for trace in traces.values()]


def reasons_table(study: Study, traces: Traces) -> Table | None:
    """Return, per method, why the wanted token was missing, and what width won over the chain."""
    rows = []
    for method in study.methods:
        rounds = [row for trace in traces for row in trace if row.method == method.name]
        if not rounds:
            continue
        counts = Counter(row.reason for row in rounds)
        compared = [row for row in rounds if row.chain_committed is not None]
        won = MISSING
        if compared:
            more = sum(row.num_committed - (row.chain_committed or 0) for row in compared)
            won = f"{more / len(compared):+.2f}"
        shares = [f"{counts[reason] / len(rounds):.1%}" for reason in REASONS]
        rows.append(text_row(method.title, [str(len(rounds)), *shares, won]))
    if not rows:
        return None
    return Table(
        key="reasons",
        title="Why the token that the target wanted was not in the tree",
        columns=["method", "rounds", *SHORT.values(), "width won"],
        rows=rows,
        caption="Shares of the traced rounds. Width won: tokens a round that the tree added beyond "
        "what the same drafter's greedy chain would have added at the same place.",
    )


def explorer_data(studies: Sequence[Study], traces: Sequence[Traces]) -> dict[str, Any]:
    """Return what the page's script draws; texts stand in one list and are named by their place.

    method: the one to begin with.
    """
    places: dict[str, int] = {}

    def place(text: str) -> int:
        return places.setdefault(text, len(places))

    several = len(studies) > 1
    return {
        "traces": [
            {
                "dataset": f"{study.name} · {trace[0].dataset}" if several else trace[0].dataset,
                "request": trace[0].prompt_id,
                "method": method.title if (method := study.method(trace[0].method)) else "",
                "prefix": trace[0].prefix_text,
                "rounds": [_round(row, place) for row in trace],
            }
            for study, own in zip(studies, traces, strict=True)
            for trace in own
            if trace
        ],
        "texts": list(places),
        "method": next((m.title for study in studies if (m := study.subject)), None),
        "reasons": EXPLANATIONS,
    }


def _round(row: TraceRow, place: Any) -> dict[str, Any]:
    """One round: nodes, the accepted ones without the anchor, what was committed and wanted.

    elsewhere: nodes with the wanted token at its depth, behind other tokens.
    """
    path = row.accepted[1:]
    committed = [*(row.texts[node] for node in path), row.wanted_texts[-1]][: row.num_committed]
    elsewhere = [
        node
        for node, (token, depth) in enumerate(zip(row.tokens, row.depths, strict=True))
        if row.reason == WRONG_PARENT and (token, depth) == (row.wanted[-1], len(path) + 1)
    ]
    return {
        "tokens": [place(text) for text in row.texts],
        "parents": row.parents,
        "scores": [round(score, _SCORE_DIGITS) for score in row.scores],
        "accepted": path,
        "committed": [place(text) for text in committed],
        "wanted": None if row.reason == COMMITTED else place(row.wanted_texts[-1]),
        "elsewhere": elsewhere,
        "reason": row.reason,
        "chain": row.chain_committed,
    }
