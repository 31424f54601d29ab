# SPDX-License-Identifier: Apache-2.0
"""Tables 1 to 4 and 6 to 8 of a study, in the layout of the paper's evaluation section.

The paper's cells are not known to us, its table numbers only in part; ours follow the order of its
text: acceptance and single-request throughput (1 general, 2 writing), concurrency (3), trees side
by side (4), datasets at each concurrency (6 to 8). Its Table 5 is the training mixture, which
`treespark prompts build` reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treespark.bench.report import paper
from treespark.bench.report.results import ACCEPTANCE, PER_REQUEST, SINGLE, SYSTEM
from treespark.bench.report.table import MISSING, Cell, Row, Table, gain_cell, marked, number_cell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treespark.bench.report.results import Metric, Results
    from treespark.bench.suite_records import DatasetRow, MethodRow

GROUPS = {"general": "general sets", "writing": "writing domains"}


def result_tables(results: Results) -> list[Table]:
    """Return the tables for which anything was measured."""
    study = results.study
    first = study.concurrencies[0]
    made = []
    for number, group in enumerate(GROUPS, 1):
        made.append(_by_dataset(results, f"{number}a", ACCEPTANCE, group, first))
        if first == 1:
            made.append(_by_dataset(results, f"{number}b", SINGLE, group, 1))
    made += [_by_concurrency(results), _trees(results)]
    for number, concurrency in enumerate([c for c in study.concurrencies if c > 1], 6):
        for letter, metric in zip("ab", (SYSTEM, PER_REQUEST), strict=True):
            made.append(_by_dataset(results, f"{number}{letter}", metric, "general", concurrency))
    return [table for table in made if table is not None]


def comparisons(results: Results) -> list[tuple[str, str]]:
    """Return what gains are shown of: trees over the baseline, the full method over the control."""
    study, setting = results.study, results.study.setting
    trees = [method.name for method in study.trees]
    full = [study.treespark.name] if study.treespark else trees
    pairs = [*((t, setting.baseline) for t in trees), *((t, setting.control) for t in full)]
    return [(name, base) for name, base in pairs if base and study.method(base) and name != base]


# ---------------------------------------------------------------------- one row a method


def _by_dataset(
    results: Results, number: str, metric: Metric, group: str, concurrency: int
) -> Table | None:
    """Methods down, datasets and their mean across, gains below."""
    datasets = results.study.group(group)
    names = [dataset.name for dataset in datasets]
    methods = [
        method
        for method in results.study.methods
        if any(results.value(metric, name, method.name, concurrency) for name in names)
    ]
    if not methods:
        return None
    rows = [_method_row(results, metric, names, method, concurrency) for method in methods]
    rows = marked(rows)
    for method in methods:
        theirs = _paper_mean(results, metric, group, method.name, concurrency)
        rows += _paper_row(f"paper: {method.title}", [*[None] * len(names), theirs], "{:.2f}")
    for name, base in comparisons(results):
        rows += _gain_rows(results, metric, group, names, name, base, concurrency)
    return Table(
        key=f"table-{number}",
        title=f"Table {number}. {metric.title.capitalize()}, {GROUPS[group]}, {_load(concurrency)}",
        columns=["method", *(dataset.title for dataset in datasets), "mean"],
        rows=rows,
        caption=_caption(results, metric, datasets),
    )


def _load(concurrency: int) -> str:
    return "one request at a time" if concurrency == 1 else f"{concurrency} requests at a time"


def _method_row(
    results: Results, metric: Metric, names: Sequence[str], method: MethodRow, concurrency: int
) -> Row:
    values = [results.value(metric, name, method.name, concurrency) for name in names]
    values.append(results.mean(metric, names, method.name, concurrency))
    return Row(method.title, [number_cell(value, metric.digits) for value in values])


def _gain_rows(
    results: Results,
    metric: Metric,
    group: str,
    names: Sequence[str],
    method: str,
    base: str,
    concurrency: int,
) -> list[Row]:
    """The gains on each dataset and overall; below them the paper's, where its setting is ours."""
    gains = [results.gain(metric, [name], method, base, concurrency) for name in names]
    gains.append(results.gain(metric, names, method, base, concurrency))
    if not any(gains):
        return []
    label = f"{_title(results, method)} over {_title(results, base)}"
    rows = [Row(label, [gain_cell(gain) for gain in gains], kind="gain")]
    theirs = _paper_gain(results, metric, group, method, base, concurrency)
    return rows + _paper_row(f"paper: {label}", [*[None] * len(names), theirs], "{:+.1f}%")


def _title(results: Results, name: str) -> str:
    method = results.study.method(name)
    return name if method is None else method.title


def _caption(results: Results, metric: Metric, datasets: Sequence[DatasetRow]) -> str:
    sizes = {dataset.subset_size for dataset in datasets}
    prompts = f"{min(sizes)} to {max(sizes)} prompts" if len(sizes) > 1 else f"{min(sizes)} prompts"
    rule = (
        "Sums over all rounds of a set; gains are ratios of means."
        if metric.is_pooled
        else f"{_repeats(results)} Over the baseline a gain is the mean of the sets' gains, "
        "between trees the ratio of means."
    )
    return f"{metric.unit.capitalize()}; {prompts} a set, unweighted mean. {rule}"


def _repeats(results: Results) -> str:
    number = results.study.repeats
    return "One run." if number == 1 else f"Mean of {number} repeats (lowest..highest)."


# ---------------------------------------------------------------------- the paper's numbers


def _paper_row(label: str, values: Sequence[float | None], shown: str) -> list[Row]:
    """A row of the paper's numbers; none if it states none of them."""
    if not any(values):
        return []
    cells = [Cell() if value is None else Cell(shown.format(value)) for value in values]
    return [Row(label, cells, kind="paper")]


def _paper_mean(
    results: Results, metric: Metric, group: str, method: str, concurrency: int
) -> float | None:
    """Return the suite mean that the paper states for a setting that is ours; None without one."""
    model = paper.model_of(results.study, timed=not metric.is_pooled)
    load = None if metric.is_pooled else concurrency
    own_role = paper.role(results.study, method)
    return paper.MEANS.get((str(model), metric.name, group, load, str(own_role)))


def _paper_gain(
    results: Results, metric: Metric, group: str, method: str, base: str, concurrency: int
) -> float | None:
    model = paper.model_of(results.study, timed=not metric.is_pooled)
    load = None if metric.is_pooled else concurrency
    roles = [str(paper.role(results.study, name)) for name in (method, base)]
    return paper.GAINS.get((str(model), metric.name, group, load, roles[0], roles[1]))


# ---------------------------------------------------------------------- over concurrencies


def _by_concurrency(results: Results) -> Table | None:
    """Methods down; suite means of system and per-request throughput by concurrency across."""
    study = results.study
    names = [dataset.name for dataset in study.group("general")]
    loads = [c for c in study.concurrencies if any(results.has(m.name, c) for m in study.methods)]
    columns = [(metric, c) for metric in (SYSTEM, PER_REQUEST) for c in loads]
    rows = []
    for method in study.methods:
        means = [results.mean(metric, names, method.name, c) for metric, c in columns]
        if any(means):
            cells = [number_cell(m, k.digits) for m, (k, _) in zip(means, columns, strict=True)]
            rows.append(Row(method.title, cells))
    if not rows:
        return None
    rows = marked(rows)
    for method in study.methods:
        theirs = [_paper_mean(results, k, "general", method.name, c) for k, c in columns]
        rows += _paper_row(f"paper: {method.title}", theirs, "{:.2f}")
    for name, base in comparisons(results):
        gains = [results.gain(metric, names, name, base, c) for metric, c in columns]
        if any(gains):
            label = f"{_title(results, name)} over {_title(results, base)}"
            rows.append(Row(label, [gain_cell(gain) for gain in gains], kind="gain"))
            theirs = [_paper_gain(results, k, "general", name, base, c) for k, c in columns]
            rows += _paper_row(f"paper: {label}", theirs, "{:+.1f}%")
    return Table(
        key="table-3",
        title="Table 3. Throughput by concurrency, general sets",
        columns=["method", *(f"{_short(metric)}, C = {c}" for metric, c in columns)],
        rows=rows,
        caption="Tokens / s, unweighted means over the sets. System: output tokens of all requests "
        "/ elapsed time, prefill included, in a closed loop of C requests. Per request: (output "
        "tokens - 1) / (finish - first token), averaged over the requests.",
    )


def _short(metric: Metric) -> str:
    return "system" if metric is SYSTEM else "per request"


def _trees(results: Results) -> Table | None:
    """Trees and ablations side by side: what each gains over the baseline, in one row."""
    study, base = results.study, results.study.setting.baseline
    trees = study.trees
    if base is None or study.method(base) is None or len(trees) < 2:
        return None
    first = study.concurrencies[0]
    groups = [(group, [d.name for d in study.group(group)]) for group in GROUPS]
    columns = [(ACCEPTANCE, group, names, first) for group, names in groups if names]
    columns += [(SYSTEM, "general", groups[0][1], c) for c in study.concurrencies if groups[0][1]]
    rows = []
    for tree in trees:
        gains = [
            results.gain(metric, names, tree.name, base, concurrency)
            for metric, _, names, concurrency in columns
        ]
        nodes = results.mean_nodes([d.name for d in study.datasets], tree.name, first)
        shown = MISSING if nodes is None else f"{nodes:.1f}"
        rows.append(Row(tree.title, [Cell(shown), *(gain_cell(gain) for gain in gains)]))
    rows = marked(rows)
    for tree in trees:
        theirs = [_paper_gain(results, k, g, tree.name, base, c) for k, g, _, c in columns]
        rows += _paper_row(f"paper: {tree.title}", [None, *theirs], "{:+.1f}%")
    heads = [
        f"acceptance, {GROUPS[group]}" if metric is ACCEPTANCE else f"system, C = {concurrency}"
        for metric, group, _, concurrency in columns
    ]
    return Table(
        key="table-4",
        title=f"Table 4. Trees side by side: gains over {_title(results, base)}",
        columns=["method", "nodes a round", *heads],
        rows=rows,
        caption="Acceptance: ratio of suite means. System throughput: mean of the sets' gains.",
    )
