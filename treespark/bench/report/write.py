# SPDX-License-Identifier: Apache-2.0
"""`treespark report suite`: everything that a suite's records say, as files in one folder."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treespark.bench.plot import check_matplotlib
from treespark.bench.report import paper
from treespark.bench.report.figures import all_figures
from treespark.bench.report.page import page
from treespark.bench.report.profile import answers_table, profile_table, profiles
from treespark.bench.report.render import escape_markdown, json_table, latex, markdown
from treespark.bench.report.results import ACCEPTANCE, SINGLE, SYSTEM, Results
from treespark.bench.report.signs import position_concurrency, signs_table
from treespark.bench.report.study import read_studies
from treespark.bench.report.tables import GROUPS, result_tables
from treespark.bench.report.traces import explorer_data, reasons_table, study_traces
from treespark.data.jsonl import check_file, check_folder, write_atomic, write_json_atomic
from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treespark.bench.report.drawing import Drawing
    from treespark.bench.report.study import Study
    from treespark.bench.report.table import Table
    from treespark.bench.report.traces import Traces

PAGE, MARKDOWN, LATEX, JSON, FIGURES = (
    "index.html",
    "report.md",
    "report.tex",
    "report.json",
    "figures",
)
_RESULTS, _FINDINGS, _FIGURE_HEAD, _TIME = "Results", "Findings", "Figures", "Time and checks"


@dataclass(frozen=True)
class Chapter:
    """All that is told of one study.  sections: (head, tables, drawings)."""

    study: Study
    results: Results
    traces: Traces
    sections: list[tuple[str, list[Table], list[Drawing]]]

    @property
    def tables(self) -> list[Table]:
        """All tables in their order."""
        return [table for _, tables, _ in self.sections for table in tables]

    @property
    def drawings(self) -> list[Drawing]:
        """All figures in their order."""
        return [drawing for _, _, drawings in self.sections for drawing in drawings]


def write_suite_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the page, Markdown, LaTeX, JSON and the figures to folder `out`; return the page.

    folders: run folders; those of one target go into the same tables. Raises UsageError, with
    nothing written, for what `read_studies` refuses, without matplotlib, and where `out` cannot be
    written.
    """
    check_matplotlib("report suite")
    _check_out(out)
    studies = read_studies(folders)
    from matplotlib import rc_context

    # A title is no formula, whatever dollars it has.
    with rc_context({"text.parse_math": False}):
        chapters = [_chapter(study, several=len(studies) > 1) for study in studies]
        drawings = [drawing for chapter in chapters for drawing in chapter.drawings]
        # The numbers first: by them a folder that was only begun is known as a report's.
        keys = [drawing.key for drawing in drawings]
        stale = set(_figures_of(out / JSON)) - set(keys)
        numbers = {"studies": [_as_json(chapter) for chapter in chapters], "figures": keys}
        write_json_atomic(out / JSON, numbers)
        for key in stale:
            for suffix in ("svg", "png"):
                (out / FIGURES / f"{key}.{suffix}").unlink(missing_ok=True)
        _write_figures(drawings, out / FIGURES)
        write_atomic(out / LATEX, [_latex(chapters).encode()])
        write_atomic(out / MARKDOWN, [_markdown(chapters).encode()])
        write_atomic(out / PAGE, [_page(chapters).encode()])
    return out / PAGE


def _check_out(out: Path) -> None:
    """Raise UsageError unless `out` takes a report, and loses nothing by it but an earlier one."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: not a folder")
    check_folder(out, f"--out {out}")
    names = (PAGE, MARKDOWN, LATEX, JSON)
    for name in names:
        check_file(out / name, "--out ")
    there = [name for name in names if (out / name).exists()]
    if there and not _is_report(out / JSON):
        raise UsageError(
            f"--out {out}: its {there[0]} is not of a report of ours and would be lost; choose "
            "another folder"
        )


def _is_report(path: Path) -> bool:
    return "studies" in _read_report(path)


def _read_report(path: Path) -> dict[str, Any]:
    """Return the JSON of an earlier report; empty where there is none."""
    try:
        report = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def _figures_of(path: Path) -> list[str]:
    """Return the keys of the figures of an earlier report, which this one replaces."""
    keys = _read_report(path).get("figures")
    if not isinstance(keys, list):
        return []
    return [key for key in keys if isinstance(key, str) and re.fullmatch(r"[\w-]+", key)]


def _chapter(study: Study, *, several: bool) -> Chapter:
    results, traces = Results(study), study_traces(study)
    findings, reasons = signs_table(results), reasons_table(study, traces)
    times = [profile_table(results), answers_table(results), reasons]
    figures = all_figures(results, traces)
    # The last two figures are the tables of times as pictures.
    shown = [d for d in figures if d.key not in ("figure-profile", "figure-reasons")]
    sections = [
        (_RESULTS, result_tables(results), []),
        (_FINDINGS, [findings] if findings else [], []),
        (_FIGURE_HEAD, [], shown),
        (_TIME, [t for t in times if t], [d for d in figures if d not in shown]),
    ]
    sections = [section for section in sections if section[1] or section[2]]
    if several:
        slug = re.sub(r"\W+", "-", study.name.lower())
        sections = [
            (
                f"{study.name}: {head}",
                [_named(table, study.name, slug) for table in tables],
                [_named(drawing, study.name, slug) for drawing in drawings],
            )
            for head, tables, drawings in sections
        ]
    return Chapter(study, results, traces, sections)


def _named(item: Any, name: str, slug: str) -> Any:
    """A table or drawing that says whose it is, where there are several targets."""
    return dataclasses.replace(item, key=f"{slug}-{item.key}", title=f"{item.title} ({name})")


def _write_figures(drawings: Sequence[Drawing], folder: Path) -> None:
    for drawing in drawings:
        write_atomic(folder / f"{drawing.key}.svg", [drawing.svg.encode()])
        # What the SVG has laid out stays where it is.
        drawing.figure.set_layout_engine("none")
        stream = io.BytesIO()
        drawing.figure.savefig(stream, format="png", facecolor="white", dpi=150)
        write_atomic(folder / f"{drawing.key}.png", [stream.getvalue()])


# ---------------------------------------------------------------------- what is said beside them


def notes(study: Study) -> list[str]:
    """Return what a reader has to know before the numbers."""
    said = []
    if study.num_missing:
        said.append(
            f"The run is not finished: {study.num_missing} cells are missing. A mean is shown only "
            "where all of its sets were measured."
        )
    for reason in dict.fromkeys(paper.mismatch(study, timed=timed) for timed in (False, True)):
        if reason is not None:
            said.append(f"The paper's own numbers are not shown beside ours: {reason}.")
            break
    if len(study.machines) > 1:
        said.append(
            f"The sets were measured on {len(study.machines)} machines, each set on one of them "
            "(see Setting): gains on a set are of one machine, means in tokens / s of them all."
        )
    names = [method.name for method in study.methods]
    for kind, name in (("baseline", study.setting.baseline), ("control", study.setting.control)):
        if name not in names:
            said.append(f"No {kind} was measured, so gains over it are left out.")
    return said


def tiles(results: Results) -> list[tuple[str, str]]:
    """Return the few numbers that sum up a study, with what they are."""
    study = results.study
    base = study.method(study.setting.baseline)
    full = study.subject
    if base is None or full is None:
        return []
    made, first = [], study.concurrencies[0]
    asked = [(ACCEPTANCE, group, first) for group in GROUPS]
    asked += [(SINGLE if c == 1 else SYSTEM, "general", c) for c in study.concurrencies]
    for metric, group, concurrency in asked:
        names = [dataset.name for dataset in study.group(group)]
        means = [results.mean(metric, names, m.name, concurrency) for m in (full, base)]
        gain = results.gain(metric, names, full.name, base.name, concurrency)
        if gain is None or means[0] is None or means[1] is None:
            continue
        ours, theirs = (f"{mean.value:.{metric.digits}f}" for mean in means if mean)
        load = "" if metric is ACCEPTANCE else f", C = {concurrency}"
        what = f"{metric.title}, {GROUPS[group]}{load}"
        made.append((f"{gain.value:+.1%}", f"{what}: {full.title} {ours}, {base.title} {theirs}"))
    return made


def facts(study: Study) -> list[tuple[str, str]]:
    """Return the setting as (name, value)."""
    setting, command = study.setting, study.setting.command
    rest = command[1:]
    shown = [
        ("command", " ".join([*(Path(word).name for word in command[:1]), *map(_portable, rest)])),
        ("time", setting.time),
        ("target", _described(setting.target)),
        *((f"drafter {name}", _described(drafter)) for name, drafter in setting.drafters.items()),
        ("number type, device, threads", f"{setting.dtype}, {setting.device}, {setting.threads}"),
        ("answers", f"at most {setting.max_tokens} tokens, seed {setting.seed}"),
        ("repeats, concurrencies", f"{study.repeats}; {', '.join(map(str, study.concurrencies))}"),
        *_machine_facts(study),
    ]
    for d in study.datasets:
        drawn = f"{d.subset_size} of {d.pool_size} prompts, subset {d.subset_sha256[:16]}"
        left_out = f", {d.num_too_long} left out as too long" if d.num_too_long else ""
        shown.append((f"set {d.title}", f"{drawn}{left_out}, {_name(d.source)}"))
    for m in study.methods:
        axes = [a for a in (m.proposal, m.priority, m.stop) if a]
        sizes = f"depth {m.depth}, branching {m.branching}, budget {m.budget}" if m.depth else ""
        options = ", ".join(f"{name} {value:g}" for name, value in m.options.items())
        parts = [m.kind, m.drafter and f"drafter {m.drafter}", sizes, ", ".join(axes), options]
        shown.append((f"method {m.title}", "; ".join(part for part in parts if part)))
    if setting.load_average:
        busy = max((cell.load_average for run in study.runs for cell in run.cells), default=0.0)
        began = ", ".join(f"{load:.2f}" for load in setting.load_average)
        shown.append(("load average", f"{began} at the start; at most {busy:.2f} later"))
    return shown


def _machine_facts(study: Study) -> list[tuple[str, str]]:
    machines = study.machines
    if len(machines) < 2:
        return [("versions", _described(study.setting.versions))]
    return [
        (
            f"machine {number}",
            f"{', '.join(d.title for d in datasets)}: {_described(run.setting.versions)}",
        )
        for number, (run, datasets) in enumerate(machines, 1)
    ]


def _name(source: str) -> str:
    """A file without the way to it; a hub's names stay whole."""
    return Path(source).name if Path(source).is_absolute() else source


def _described(values: dict[str, Any]) -> str:
    """One line of a setting's part: its plain values and its packages; of a path, the name."""
    flat = {**values, **values.get("packages", {})}
    if "path" in flat:
        flat["path"] = Path(str(flat["path"])).name
    return ", ".join(
        f"{name} {value}"
        for name, value in flat.items()
        if isinstance(value, str | int | float) and not isinstance(value, bool)
    )


# ---------------------------------------------------------------------- formats


def _title(chapters: Sequence[Chapter]) -> str:
    return "Evaluation of " + " and ".join(chapter.study.name for chapter in chapters)


def _lead(study: Study) -> str:
    setting = study.setting
    return (
        f"{study.name} in {setting.dtype} on {setting.device}, {setting.threads} threads; greedy "
        f"decoding, at most {setting.max_tokens} tokens, {study.repeats} repeats; {setting.time}"
    )


def _markdown(chapters: Sequence[Chapter]) -> str:
    parts = [f"# {_title(chapters)}\n"]
    for chapter in chapters:
        parts.append(f"{_lead(chapter.study)}\n")
        parts += [f"> {note}\n" for note in notes(chapter.study)]
        for head, tables, drawings in chapter.sections:
            parts.append(f"## {head}\n")
            parts += [markdown(table) for table in tables]
            parts += [
                f"### {d.title}\n\n![{d.title}]({FIGURES}/{d.key}.svg)\n\n{d.caption}\n"
                for d in drawings
            ]
        parts.append("## Setting\n")
        parts += [
            f"- {escape_markdown(name)}: {escape_markdown(value)}"
            for name, value in facts(chapter.study)
        ]
    return "\n".join(parts) + "\n"


def _latex(chapters: Sequence[Chapter]) -> str:
    head = "% Needs \\usepackage{booktabs}.\n"
    return head + "\n".join(latex(table) for chapter in chapters for table in chapter.tables)


def _page(chapters: Sequence[Chapter]) -> str:
    return page(
        _title(chapters),
        lead=" · ".join(_lead(chapter.study) for chapter in chapters),
        notes=[note for chapter in chapters for note in notes(chapter.study)],
        tiles=[tile for chapter in chapters for tile in tiles(chapter.results)],
        sections=[section for chapter in chapters for section in chapter.sections],
        explorer=explorer_data(
            [chapter.study for chapter in chapters], [chapter.traces for chapter in chapters]
        ),
        facts=[fact for chapter in chapters for fact in facts(chapter.study)],
    )


def _portable(value: Any) -> Any:
    """The value with absolute paths as seen from here, as reports go to other machines."""
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_portable(item) for item in value]
    if not isinstance(value, str):
        return value
    option, is_option, path = value.rpartition("=") if value.startswith("-") else ("", "", value)
    return option + is_option + (os.path.relpath(path) if Path(path).is_absolute() else path)


def _as_json(chapter: Chapter) -> dict[str, Any]:
    """What the tables say, unrounded, and what stands behind the figures."""
    study, results = chapter.study, chapter.results
    load = position_concurrency(results)
    positions = {
        group: {
            method.name: dataclasses.asdict(rates)
            | {"over_proposing": rates.over_proposing, "over_rounds": rates.over_rounds}
            for method in study.methods
            if (rates := results.positions([d.name for d in datasets], method.name, load))
        }
        for group in GROUPS
        if (datasets := study.group(group))
    }
    return {
        "name": study.name,
        "runs": [_portable(str(run.folder)) for run in study.runs],
        "setting": _portable(json.loads(json.dumps(dataclasses.asdict(study.setting)))),
        "num_missing_cells": study.num_missing,
        "notes": notes(study),
        "tables": [json_table(table) for table in chapter.tables],
        "positions": {"concurrency": load} | positions,
        "profiles": [
            dataclasses.asdict(p) | {"round_ms": p.round_ms, "overhead_rate": p.overhead_rate}
            for p in profiles(results)
        ],
    }
