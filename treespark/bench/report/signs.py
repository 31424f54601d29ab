# SPDX-License-Identifier: Apache-2.0
"""The paper's findings as signs, and whether a study shows them: it says where not.

A sign holds if it is seen in every repeat and for nearly all resamplings of the prompts, and is
unclear if they disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treespark.bench.report import paper
from treespark.bench.report.resampling import NUM_RESAMPLINGS, interval, resampled
from treespark.bench.report.results import ACCEPTANCE, SINGLE, SYSTEM
from treespark.bench.report.table import MISSING, Row, Table, text_row
from treespark.bench.report.tables import GROUPS

if TYPE_CHECKING:
    from treespark.bench.report.results import Metric, Results, Value
    from treespark.bench.suite_records import MethodRow

HOLDS, FAILS, UNCLEAR = "holds", "does not hold", "unclear"


def signs_table(results: Results) -> Table | None:
    """Return the findings that the study's methods can show; None if it has none of them."""
    rows = [*_orders(results), *_writing(results), *_depths(results), *_speeds(results)]
    if not rows:
        return None
    return Table(
        key="signs",
        title="The paper's findings",
        columns=["finding", "paper (Qwen3-4B, Ascend 910B)", "here", "verdict"],
        rows=rows,
        caption="In brackets the middle 95 % of 1,000 paired resamplings of the prompts, widened "
        "to all repeats; for throughput of several requests at a time the repeats alone. A finding "
        f"holds here if both bounds show it; {UNCLEAR}: they disagree. The paper's numbers are "
        "another target's on another device, so only signs compare; "
        f"{MISSING}: its text has no number.",
    )


def verdict(low: float, high: float) -> str:
    """Return what a difference between `low` and `high` says of the claim that it is positive."""
    if low > 0:
        return HOLDS
    return UNCLEAR if high > 0 else FAILS


def _full(results: Results) -> MethodRow | None:
    return results.study.treespark


def _baseline(results: Results) -> MethodRow | None:
    return results.study.method(results.study.setting.baseline)


def _control(results: Results) -> MethodRow | None:
    return results.study.method(results.study.setting.control)


def _ablations(results: Results) -> list[MethodRow]:
    named = (paper.BASELINE, paper.CONTROL, paper.FULL, None)
    return [m for m in results.study.methods if paper.role(results.study, m.name) not in named]


def _names(results: Results, group: str) -> list[str]:
    return [dataset.name for dataset in results.study.group(group)]


def _gain_row(
    results: Results,
    metric: Metric,
    group: str,
    pair: tuple[MethodRow | None, MethodRow | None],
    concurrency: int,
    claim: str,
) -> list[Row]:
    """One row: the first of the pair has more than the second."""
    ours, base = pair
    if ours is None or base is None or ours.name == base.name:
        return []
    gain = results.gain(metric, _names(results, group), ours.name, base.name, concurrency)
    if gain is None:
        return []
    means = [results.mean(metric, _names(results, group), m.name, concurrency) for m in pair if m]
    shown = " and ".join(f"{mean.value:.{metric.digits}f}" for mean in means if mean)
    low, high = _bounds(results, metric, _names(results, group), (ours, base), concurrency, gain)
    bounds = [f"{bound:+.1%}" for bound in (low, high)]
    spread = f" ({'..'.join(bounds)})" if bounds[0] != bounds[1] else ""
    load = None if metric is ACCEPTANCE else concurrency
    roles = [str(paper.role(results.study, m.name)) for m in pair if m]
    theirs = _paper_text(("4B", metric.name, group, load), roles)
    here = f"{shown}: {gain.value:+.1%}{spread}"
    return [
        text_row(
            claim.format(ours=ours.title, base=base.title),
            [theirs, here, verdict(low, high)],
        )
    ]


def _bounds(
    results: Results,
    metric: Metric,
    names: list[str],
    pair: tuple[MethodRow, MethodRow],
    concurrency: int,
    gain: Value,
) -> tuple[float, float]:
    """Return how low and how high a gain may be: over repeats, and over other prompts if known."""
    if metric is SYSTEM:
        return gain.low, gain.high
    ours, base = (resampled(results, metric, names, m.name, concurrency) for m in pair)
    if ours is None or base is None:
        return gain.low, gain.high
    rule = results.gain_rule(metric, pair[0].name, pair[1].name)
    found = interval(
        [
            rule({n: ours[n][draw] for n in names}, {n: base[n][draw] for n in names})
            for draw in range(NUM_RESAMPLINGS)
        ]
    )
    if found is None:
        return gain.low, gain.high
    return min(found[0], gain.low), max(found[1], gain.high)


def _paper_text(place: tuple[str, str, str, int | None], roles: list[str]) -> str:
    """What the paper says of one role over another: the gain, or both gains over the baseline."""
    gain = paper.GAINS.get((*place, roles[0], roles[1]))
    if gain is not None:
        return f"{gain:+.1f}%"
    both = [paper.GAINS.get((*place, role, paper.BASELINE)) for role in roles]
    if None in both:
        return MISSING
    return "{:+.1f}% and {:+.1f}% over DSpark".format(*both)


def _orders(results: Results) -> list[Row]:
    """In acceptance: TreeSpark > DSpark+Tree > DSpark > DFlash, TreeSpark > its ablations."""
    full, control, baseline = _full(results), _control(results), _baseline(results)
    flat = next((m for m in results.study.methods if m.method == "dflash"), None)
    pairs = [(full, control), (control, baseline), (baseline, flat)]
    pairs += [(full, ablation) for ablation in _ablations(results)]
    first = results.study.concurrencies[0]
    return [
        row
        for group, title in GROUPS.items()
        for pair in pairs
        for row in _gain_row(
            results, ACCEPTANCE, group, pair, first, f"Acceptance, {title}: {{ours}} > {{base}}"
        )
    ]


def _writing(results: Results) -> list[Row]:
    """On writing the absolute gain is smaller and the relative gain larger."""
    full, base = _full(results), _baseline(results)
    if full is None or base is None:
        return []
    first = results.study.concurrencies[0]
    absolute, relative = [], []
    # The same of every resampling.
    all_absolute, all_relative = [], []
    for group in GROUPS:
        names = _names(results, group)
        means = [results.mean(ACCEPTANCE, names, m.name, first) for m in (full, base)]
        draws = [resampled(results, ACCEPTANCE, names, m.name, first) for m in (full, base)]
        if not names or None in means or None in draws:
            return []
        ours, theirs = (mean.value for mean in means if mean)
        absolute.append(ours - theirs)
        relative.append(ours / theirs - 1)
        many, base_many = (np.mean(list(draw.values()), axis=0) for draw in draws if draw)
        all_absolute.append(many - base_many)
        all_relative.append(many / base_many - 1)
    smaller = interval(all_absolute[0] - all_absolute[1])
    larger = interval(all_relative[1] - all_relative[0])
    return [
        text_row(
            "Writing gains less in absolute terms than the general sets",
            [
                "+0.84 and +1.02",
                f"{absolute[1]:+.2f} and {absolute[0]:+.2f}",
                verdict(*(smaller or (0.0, 1.0))),
            ],
        ),
        text_row(
            "Writing gains more in relative terms than the general sets",
            [
                "+31.4% and +24.1%",
                f"{relative[1]:+.1%} and {relative[0]:+.1%}",
                verdict(*(larger or (0.0, 1.0))),
            ],
        ),
    ]


def position_concurrency(results: Results) -> int:
    """Return the concurrency that position-wise acceptance is shown at: the paper's 12, if run."""
    loads = results.study.concurrencies
    return 12 if 12 in loads else loads[0]


def _depths(results: Results) -> list[Row]:
    """The tree reaches every depth more often, over all rounds."""
    full, base = _full(results), _baseline(results)
    if full is None or base is None:
        return []
    names, load = _names(results, "general"), position_concurrency(results)
    rates = [results.positions(names, m.name, load) for m in (full, base)]
    if rates[0] is None or rates[1] is None:
        return []
    tree, chain = (rate.over_rounds for rate in rates if rate)
    pairs = list(zip(tree, chain, strict=True))[: min(full.depth, base.depth)]
    not_more = [d for d, (ours, theirs) in enumerate(pairs, 1) if (ours or 0) <= (theirs or 0)]
    shown = ", ".join(f"{ours:.1%} / {theirs:.1%}" for ours, theirs in pairs)
    stated = [paper.POSITIONS[role, d] for d in (1, 7) for role in (paper.FULL, paper.BASELINE)]
    return [
        text_row(
            f"{full.title} accepts more than {base.title} at every depth, C = {load}",
            [
                "first {}% / {}%, seventh {}% / {}%".format(*stated),
                shown,
                f"{FAILS} at depth {', '.join(map(str, not_more))}" if not_more else HOLDS,
            ],
        )
    ]


def _speeds(results: Results) -> list[Row]:
    """In throughput: TreeSpark over the chain, over trees without tree losses, over ablations."""
    full = _full(results)
    rows = []
    for base in (_baseline(results), _control(results), *_ablations(results)):
        for concurrency in results.study.concurrencies:
            metric = SINGLE if concurrency == 1 else SYSTEM
            for group in GROUPS if concurrency == 1 else ["general"]:
                claim = f"Throughput, {GROUPS[group]}, C = {concurrency}: {{ours}} > {{base}}"
                rows += _gain_row(results, metric, group, (full, base), concurrency, claim)
    return rows
