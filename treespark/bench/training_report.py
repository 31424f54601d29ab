# SPDX-License-Identifier: Apache-2.0
"""`treespark report train`: one HTML page of a training run, from its metrics and checkpoint."""

from __future__ import annotations

import html
import io
import json
from statistics import fmean
from typing import TYPE_CHECKING, Any

from treespark.bench.plot import check_matplotlib
from treespark.data.jsonl import check_file, write_atomic
from treespark.errors import UsageError
from treespark.training.checkpoint import saved_steps, step_folder
from treespark.training.metrics import METRICS, read_metrics

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Lines = list[dict[str, Any]]

# A curve of thousands of steps is drawn as the means of this many equal parts.
_POINTS = 200
_LOSSES = ("loss", "ce", "soft_ce", "l1", "confidence", "survival", "coverage")
_DEPTH_CURVES = {
    "overlap": "overlap of drafter and target",
    "survival_mass": "survival: target mass of packed nodes",
    "reference_hit": "reference tokens in the packed tree",
}
_ACCEPTANCE = {
    "acceptance/": "Acceptance length on held-out rows",
    "decode/": "Acceptance length of decoding held-out prompts",
}
_STYLE = (
    "body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ccc;"
    "text-align:left}svg{max-width:100%;height:auto}"
)


def write_training_report(run: Path, out: Path) -> Path:
    """Write the page of the run in folder `run` to `out` and return it.

    Raises UsageError where there is no run, matplotlib is missing, or `out` cannot be written.
    """
    check_matplotlib("report")
    check_file(out, "--out ")
    path = run / METRICS
    lines = read_metrics(path)
    steps = [line for line in lines if "loss" in line]
    if not steps:
        raise UsageError(f"{path}: no step of a training run in it")
    parts = [
        f"<!doctype html><meta charset=utf-8><title>{html.escape(run.name)}</title>",
        f"<style>{_STYLE}</style><h1>{html.escape(str(run))}</h1>",
        _table(_facts(run, steps), "what happened"),
        *(_acceptance(lines, prefix, title) for prefix, title in _ACCEPTANCE.items()),
        _figure(_loss_curves(steps), "Losses", "step"),
        *(
            _figure(_depth_curves(steps, name), title, "step")
            for name, title in _DEPTH_CURVES.items()
            if any(name in line for line in steps)
        ),
        _figure(_curves(steps, ["grad_norm"]), "Gradient norm before clipping", "step"),
        _figure(_curves(steps, ["lr"]), "Learning rate", "step"),
        _figure(_curves(steps, ["step_s"]), "Seconds per step", "step"),
        _table(_settings(run), "settings of the newest checkpoint"),
    ]
    write_atomic(out, [part.encode() for part in parts])
    return out


def _facts(run: Path, steps: Lines) -> dict[str, Any]:
    total_s = sum(line["step_s"] for line in steps)
    last = steps[-_tail(steps) :]
    return {
        "steps": f"{len(steps)}, last {steps[-1]['step']}",
        "time in steps": f"{total_s / 3600:.2f} hours, {total_s / len(steps):.2f} s each",
        "skipped, gradient not finite": sum(bool(line["skipped"]) for line in steps),
        "checkpoints": ", ".join(map(str, saved_steps(run))) or "none",
        **{
            f"{name}, mean of the last {len(last)} steps": f"{_mean(last, name):.4f}"
            for name in _LOSSES
            if any(line.get(name) is not None for line in last)
        },
    }


def _tail(steps: Lines) -> int:
    return max(1, min(100, len(steps) // 10))


def _mean(lines: Lines, name: str) -> float:
    return fmean(line[name] for line in lines if line.get(name) is not None)


def _acceptance(lines: Lines, prefix: str, title: str) -> str:
    """Acceptance lengths over the steps: a table and, from two points on, curves."""
    scored = [line for line in lines if any(key.startswith(prefix) for key in line)]
    if not scored:
        return ""
    names = [key for key in scored[-1] if key.startswith(prefix)]
    short = [name.removeprefix(prefix) for name in names]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ["after step", *short])
    cells = [[str(line["step"] + 1), *(f"{line[n]:.3f}" for n in names)] for line in scored]
    rows = "".join(f"<tr>{''.join(f'<td>{value}</td>' for value in row)}</tr>" for row in cells)
    text = f"<h2>{title}</h2><table><tr>{head}</tr>{rows}</table>"
    if len(scored) < 2:
        return text
    curves = {
        label: ([line["step"] for line in scored], [line[name] for line in scored])
        for label, name in zip(short, names, strict=True)
    }
    return text + _figure(curves, "", "step")


def _table(rows: dict[str, Any], title: str) -> str:
    body = "".join(
        f"<tr><td>{html.escape(str(key))}</td><td>{html.escape(str(value))}</td></tr>"
        for key, value in rows.items()
    )
    return f"<h2>{html.escape(title.capitalize())}</h2><table>{body}</table>"


def _settings(run: Path) -> dict[str, Any]:
    saved = saved_steps(run)
    if not saved:
        return {}
    state = step_folder(run, saved[-1]) / "state.json"
    return dict(json.loads(state.read_text(encoding="utf-8"))["settings"])


# ---------------------------------------------------------------------- curves

Curves = dict[str, tuple[list[float], list[float]]]


def _curves(steps: Lines, names: Sequence[str]) -> Curves:
    """One curve per name: steps and values, as means over equal parts of the run."""
    size = -(-len(steps) // _POINTS)
    curves: Curves = {}
    for first in range(0, len(steps), size):
        part = steps[first : first + size]
        for name in names:
            values = [line[name] for line in part if line.get(name) is not None]
            if values:
                x, y = curves.setdefault(name, ([], []))
                x.append(fmean(line["step"] for line in part))
                y.append(fmean(values))
    return curves


def _loss_curves(steps: Lines) -> Curves:
    return _curves(steps, _LOSSES)


def _depth_curves(steps: Lines, name: str) -> Curves:
    """One curve per draft depth of a diagnostic that is a list of B numbers."""
    flat = [
        {"step": line["step"], **{f"depth {d + 1}": v for d, v in enumerate(line[name])}}
        for line in steps
        if name in line
    ]
    return _curves(flat, [key for key in flat[0] if key != "step"])


def _figure(curves: Curves, title: str, x_label: str) -> str:
    """An SVG inside the page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, (x, y) in curves.items():
        axes.plot(x, y, label=name, linewidth=1.2, marker="o" if len(x) < 30 else None)
    axes.set_xlabel(x_label)
    axes.grid(alpha=0.3)
    every = [value for _, y in curves.values() for value in y]
    # The first steps of a run tower above everything that follows.
    if every and min(every) > 0 and max(every) > 20 * min(every):
        axes.set_yscale("log")
    if len(curves) > 1:
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    text = io.StringIO()
    figure.savefig(text, format="svg")
    heading = f"<h2>{html.escape(title)}</h2>" if title else ""
    return heading + text.getvalue()[text.getvalue().index("<svg") :]
