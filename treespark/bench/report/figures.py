# SPDX-License-Identifier: Apache-2.0
"""Figures 2 to 6 of a study, where a round's time goes, and why wanted tokens were missing.

Drawn by matplotlib. Lines and bars of a method have its colour in every figure.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from treespark.bench.report.drawing import (
    PALETTE,
    Drawing,
    bars,
    colour,
    count_ticks,
    label_axes,
    legend,
    line,
    new_figure,
)
from treespark.bench.report.profile import profiles
from treespark.bench.report.results import ACCEPTANCE, PER_REQUEST, SINGLE, SYSTEM
from treespark.bench.report.signs import position_concurrency
from treespark.bench.report.tables import GROUPS
from treespark.bench.report.traces import SHORT
from treespark.bench.suite_records import REASONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treespark.bench.report.results import Metric, Results, Value
    from treespark.bench.report.traces import Traces
    from treespark.bench.suite_records import MethodRow


def all_figures(results: Results, traces: Traces) -> list[Drawing]:
    """Return the figures for which anything was measured."""
    made = [
        _positions(results),
        _by_concurrency(results),
        _gains(results),
        _depths(results),
        _trees(results),
        _profile(results),
        _reasons(results, traces),
    ]
    return [drawing for drawing in made if drawing is not None]


def _drafting(results: Results) -> list[MethodRow]:
    return [method for method in results.study.methods if method.kind != "autoregressive"]


def _general(results: Results) -> list[str]:
    study = results.study
    return [d.name for d in study.group("general") or study.datasets]


def _positions(results: Results) -> Drawing | None:
    """Figure 2: position-wise acceptance over both denominators."""
    load, names = position_concurrency(results), _general(results)
    rates = [(m, results.positions(names, m.name, load)) for m in _drafting(results)]
    if not any(rate for _, rate in rates):
        return None
    figure, (left, right) = new_figure(9, 3.6, 2)
    for method, rate in rates:
        for axes, values in (
            (left, rate and rate.over_proposing),
            (right, rate and rate.over_rounds),
        ):
            own = (values or [])[: method.depth]
            points = [(depth, share) for depth, share in enumerate(own, 1) if share is not None]
            axes.plot(
                *zip(*points, strict=True) if points else ([], []),
                color=colour(results, method.name),
                marker="o",
                markersize=3.5,
                linewidth=1.5,
                label=method.title,
            )
    label_axes(left, "of rounds that proposed the depth", "depth", "accepted")
    label_axes(right, "of all rounds", "depth", "accepted")
    for axes in (left, right):
        count_ticks(axes)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    legend(figure, left)
    return Drawing(
        "figure-2",
        f"Figure 2. Position-wise acceptance, C = {load}",
        "Rounds that accept at least so many draft tokens. A tree goes deep only where the drafter "
        "is sure, which flatters its deep positions on the left; the right compares trees and "
        "chains. A full chain proposes every depth, so its two curves are nearly the same.",
        figure,
    )


def _by_concurrency(results: Results) -> Drawing | None:
    """Figure 3: system and per-request throughput over the concurrency."""
    loads, names = results.study.concurrencies, _general(results)
    if len(loads) < 2:
        return None
    figure, panels = new_figure(9, 3.6, 2)
    for axes, metric in zip(panels, (SYSTEM, PER_REQUEST), strict=True):
        for method in results.study.methods:
            means = [results.mean(metric, names, method.name, c) for c in loads]
            line(axes, loads, means, colour(results, method.name), method.title)
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [str(c) for c in loads])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        label_axes(axes, metric.title, "requests at a time", "output tokens / s")
    legend(figure, panels[0])
    return Drawing(
        "figure-3",
        "Figure 3. Throughput by concurrency",
        "Unweighted means over the general sets; bars reach from the lowest to the highest repeat.",
        figure,
    )


def _base(results: Results) -> MethodRow | None:
    return results.study.method(results.study.setting.baseline)


def _gains(results: Results) -> Drawing | None:
    """Figure 4: gain over the baseline on every set, in acceptance and in throughput."""
    base, trees, study = _base(results), results.study.trees, results.study
    if base is None or not trees:
        return None
    name, first = base.name, study.concurrencies[0]
    metrics = [ACCEPTANCE, SINGLE] if first == 1 else [ACCEPTANCE, SYSTEM]
    figure, panels = new_figure(9, 4, 2)
    by_title = {dataset.title: dataset.name for dataset in study.datasets}
    for axes, metric in zip(panels, metrics, strict=True):

        def gain(title: str, method: MethodRow, metric: Metric = metric) -> Value | None:
            return results.gain(metric, [by_title[title]], method.name, name, first)

        bars(results, axes, list(by_title), trees, gain)
        label_axes(axes, metric.title, "", f"gain over {base.title}")
        axes.tick_params(axis="x", labelsize=7)
    legend(figure, panels[0])
    return Drawing(
        "figure-4",
        f"Figure 4. Gain over {base.title} on every set, C = {first}",
        "Whiskers reach from the lowest to the highest repeat.",
        figure,
    )


def _depths(results: Results) -> Drawing | None:
    """Figure 5: how much more often trees reach each depth, and how many tokens rounds commit."""
    base, trees, load = _base(results), results.study.trees, position_concurrency(results)
    names = _general(results)
    chain = results.positions(names, base.name, load) if base else None
    if base is None or chain is None or not trees:
        return None
    figure, (left, right) = new_figure(9, 3.6, 2)
    for method in (*trees, base):
        rate = results.positions(names, method.name, load)
        if rate is None:
            continue
        style = {"color": colour(results, method.name), "marker": "o", "markersize": 3.5}
        more = [
            100 * ((ours or 0) - (theirs or 0))
            for ours, theirs in zip(rate.over_rounds, chain.over_rounds, strict=True)
        ]
        left.plot(range(1, len(more) + 1), more, linewidth=1.5, label=method.title, **style)
        shares = _committed_shares(results, names, method.name, load)
        right.plot(list(shares), list(shares.values()), linewidth=1.5, **style)
    label_axes(left, f"rounds that reach a depth, more than {base.title}", "depth", "points of 100")
    label_axes(right, "rounds by committed tokens", "tokens", "share of rounds")
    count_ticks(left)
    count_ticks(right)
    right.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    right.set_ylim(bottom=0)
    legend(figure, left)
    return Drawing(
        "figure-5",
        f"Figure 5. Gain by depth over {base.title}, C = {load}",
        "All rounds of the general sets. A left curve's sum is the gain in "
        "acceptance length, in hundredths of a token.",
        figure,
    )


def _committed_shares(
    results: Results, names: Sequence[str], method: str, load: int
) -> dict[int, float]:
    counts: Counter[int] = Counter()
    for name in names:
        for cell in results.repeats(name, method, load).values():
            counts += cell.committed
    whole = counts.total()
    return {tokens: counts[tokens] / whole for tokens in range(1, max(counts) + 1)}


def _trees(results: Results) -> Drawing | None:
    """Figure 6: trees and ablations side by side, in acceptance and at each concurrency."""
    base, trees, study = _base(results), results.study.trees, results.study
    if base is None or len(trees) < 2:
        return None
    name = base.name
    asked = {
        f"acceptance, {group}": (
            ACCEPTANCE,
            [d.name for d in study.group(group)],
            study.concurrencies[0],
        )
        for group in GROUPS
        if study.group(group)
    }
    asked |= {f"system, C = {c}": (SYSTEM, _general(results), c) for c in study.concurrencies}
    figure, (axes,) = new_figure(9, 3.6)
    bars(
        results,
        axes,
        list(asked),
        trees,
        lambda group, method: results.gain(
            asked[group][0], asked[group][1], method.name, name, asked[group][2]
        ),
    )
    label_axes(axes, "", "", f"gain over {base.title}")
    legend(figure, axes)
    return Drawing(
        "figure-6",
        "Figure 6. Trees and ablations",
        "The same gains as in Table 4; whiskers reach from the lowest to the highest repeat.",
        figure,
    )


def _profile(results: Results) -> Drawing | None:
    """Where a round's time goes: one bar a method, stacked by phase."""
    found = [profile for profile in profiles(results) if profile.phase_s]
    if not found:
        return None
    loads = list(dict.fromkeys(profile.concurrency for profile in found))
    phases = list(dict.fromkeys(phase for profile in found for phase in profile.round_ms))
    methods = list(dict.fromkeys(profile.method for profile in found))
    figure, panels = new_figure(9, 1.2 + 0.28 * len(methods), len(loads))
    for axes, load in zip(panels, loads, strict=True):
        own = {p.method: p.round_ms for p in found if p.concurrency == load}
        starts = dict.fromkeys(own, 0.0)
        for phase, shade in zip(phases, PALETTE[2:], strict=False):
            widths = {method: own[method].get(phase, 0.0) for method in own}
            places = [len(methods) - methods.index(method) for method in own]
            axes.barh(
                places, list(widths.values()), left=list(starts.values()), color=shade, label=phase
            )
            starts = {method: starts[method] + widths[method] for method in own}
        axes.set_yticks(
            range(len(methods), 0, -1), methods if axes is panels[0] else [""] * len(methods)
        )
        axes.grid(visible=False, axis="y")
        label_axes(axes, f"C = {load}", "ms a round", "")
    legend(figure, panels[0])
    return Drawing(
        "figure-profile",
        "Where a round's time goes",
        "Milliseconds a round of the engine, by phase; prefill is apart.",
        figure,
    )


def _reasons(results: Results, traces: Traces) -> Drawing | None:
    """Why the wanted token was missing: one bar a method, shares by reason."""
    counts = {
        method.title: Counter(r.reason for t in traces for r in t if r.method == method.name)
        for method in results.study.methods
    }
    counts = {title: own for title, own in counts.items() if own}
    if not counts:
        return None
    figure, (axes,) = new_figure(9, 1.2 + 0.28 * len(counts))
    places, starts = range(len(counts), 0, -1), [0.0] * len(counts)
    for reason, shade in zip(REASONS, PALETTE, strict=False):
        widths = [own[reason] / own.total() for own in counts.values()]
        axes.barh(places, widths, left=starts, color=shade, label=SHORT[reason])
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(places, list(counts))
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.set_xlim(0, 1)
    label_axes(axes, "", "share of traced rounds", "")
    legend(figure, axes)
    return Drawing(
        "figure-reasons",
        "Why the wanted token was not in the tree",
        "Of the traced rounds; the page's explorer has each of them.",
        figure,
    )
