# SPDX-License-Identifier: Apache-2.0
"""Answers to a prompt file as rows, whoever gives them: reading, accounting, writing.

A run that was stopped or killed goes on where it was: rows that are in the file are skipped by id.
Every row says how it was made (`gen`), and a run with other settings refuses to add to the file.
"""

import hashlib
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from tqdm import tqdm

from treespark.data.interrupt import StopRequest
from treespark.data.jsonl import (
    JsonlAppender,
    Row,
    encode,
    read_jsonl,
    report_path,
    write_json_atomic,
)
from treespark.data.terminal import plain_console
from treespark.errors import UsageError
from treespark.target.checks import read_json
from treespark.target.template import render_prompt

# Settings that change the answers. The folder's name and the drafter do not: they are only noted.
FIXED = ("fingerprint", "dtype", "sampling", "max_tokens", "template")


@dataclass
class ContinuationReport:
    """Counts of one run; unless it was stopped,
    num_input = num_skipped + num_success + errors + truncated.

    num_skipped: rows that were in the file before.  errors: {id, error} of prompts that were not
    answered.  truncated: the ids that `--drop-truncated` left out, earlier runs' included, each
    with a mark of its prompt.  num_output_tokens, wall_s: of this run.
    """

    num_input: int
    num_skipped: int = 0
    num_success: int = 0
    errors: list[dict[str, str]] = field(default_factory=list)
    truncated: dict[str, str] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    num_output_tokens: int = 0
    wall_s: float = 0.0
    is_complete: bool = False
    gen: dict[str, Any] = field(default_factory=dict)

    @property
    def num_accounted(self) -> int:
        """Prompts of which it is known what became of them."""
        return self.num_skipped + self.num_success + len(self.errors) + len(self.truncated)


class Limits(NamedTuple):
    """What a prompt has to keep within: number of token ids, tokens of prompt plus answer."""

    vocab_size: int
    max_context: int

    def are_ids(self, ids: Sequence[int]) -> bool:
        """Whether all of them, at least one, are ids of the vocabulary."""
        return 0 <= min(ids) <= max(ids) < self.vocab_size


@dataclass
class Job:
    """One prompt to answer: its row of the prompt file and its rendered ids."""

    row: Row
    prompt_token_ids: list[int]


@dataclass
class Answer:
    """One finished answer; gen: what the row's `gen` holds beyond the run's."""

    job: Job
    token_ids: list[int]
    text: str
    finish_reason: str
    gen: dict[str, Any] = field(default_factory=dict)


class Collector:
    """Writes answers as they end and counts them; entering it starts clock and progress bar."""

    def __init__(
        self, file: JsonlAppender, report: ContinuationReport, drop_truncated: bool
    ) -> None:
        self._file, self._report, self._drop_truncated = file, report, drop_truncated

    def __enter__(self) -> "Collector":
        report = self._report
        self._start_s = time.perf_counter()
        self._bar = tqdm(
            total=report.num_input - len(report.errors),
            initial=report.num_skipped + len(report.truncated),
            unit="row",
            desc="continuations",
            smoothing=0.05,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, answers: Sequence[Answer], num_tokens: int) -> None:
        """Write the answers that ended; num_tokens: by how many the run's output grew."""
        report, kept = self._report, []
        for answer in answers:
            if self._drop_truncated and answer.finish_reason == "length":
                report.truncated[answer.job.row["id"]] = _mark(answer.job.row)
            else:
                kept.append(answer)
        self._file.append(_row(answer, report.gen) for answer in kept)
        for answer in kept:
            num_before = report.finish_reasons.get(answer.finish_reason, 0)
            report.finish_reasons[answer.finish_reason] = num_before + 1
        report.num_success += len(kept)
        report.num_output_tokens += num_tokens
        report.wall_s = time.perf_counter() - self._start_s
        self._bar.set_postfix_str(f"{report.num_output_tokens / report.wall_s:.0f} tok/s", False)
        self._bar.update(len(answers))

    def fail(self, job: Job, error: str) -> None:
        """Note that a prompt got no answer."""
        self._report.errors.append({"id": job.row["id"], "error": error})
        self._bar.update()


Decode = Callable[[deque[Job], Collector, StopRequest], None]


def collect(
    rows: dict[str, Row],
    out: Path,
    tokenizer: Any,
    limits: Limits,
    gen: dict[str, Any],
    decode: Decode,
    fixed: Sequence[str] = FIXED,
    drop_truncated: bool = False,
) -> ContinuationReport:
    """Let `decode` answer the prompts that are not in `out` yet; write the report, print it.

    rows: of `read_prompts`.  gen: how the answers are made, with max_tokens; rows that differ in
    one of the names in `fixed` are refused.  decode: enters the collector once it is ready and
    returns when all jobs have been added or have failed, or soon after a signal.  Raises
    UsageError, with nothing written, for rows made with other settings and when no prompt is
    usable; SystemExit when a signal stopped it.
    """
    report = ContinuationReport(len(rows), gen=gen)
    with JsonlAppender(out) as file, StopRequest() as stop:
        done = _check_done(file, rows, gen, fixed)
        report.num_skipped = len(done)
        open_rows = {row_id: row for row_id, row in rows.items() if row_id not in done}
        if drop_truncated:
            report.truncated = _dropped_before(report_path(out), open_rows, gen, fixed)
        waiting = [row for row_id, row in open_rows.items() if row_id not in report.truncated]
        jobs = _jobs(waiting, tokenizer, limits, report)
        if jobs:
            decode(jobs, Collector(file, report, drop_truncated), stop)
    report.is_complete = report.num_input == report.num_accounted
    assert report.is_complete or stop
    write_json_atomic(report_path(out), asdict(report))
    _print(report, out)
    if not report.is_complete:
        raise SystemExit(stop.exit_code)
    return report


def read_prompts(path: Path) -> dict[str, Row]:
    """Return the rows of a prompt file by id; raises UsageError for one without id or prompt."""
    rows: dict[str, Row] = {}
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        prompt, ids = row.get("prompt"), row.get("input_ids")
        if not isinstance(row.get("id"), str):
            raise UsageError(f"{where}: id: need a string (`treespark prompts` assigns it)")
        if prompt is None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise UsageError(f"{where}: need `prompt` or `input_ids` (see `treespark prompts`)")
        if prompt is not None and not isinstance(prompt, str):
            raise UsageError(f"{where}: prompt: need a string, got {type(prompt).__name__}")
        rows[row["id"]] = row
    if not rows:
        raise UsageError(f"{path}: holds no prompts")
    return rows


def _check_done(
    file: JsonlAppender, rows: dict[str, Row], gen: dict[str, Any], fixed: Sequence[str]
) -> set[str]:
    """Return the ids that are answered; raises UsageError when those rows are not of this run."""
    for row in file.rows:
        row_id, made = row.get("id"), row.get("gen")
        if not isinstance(row_id, str) or not isinstance(made, dict):
            raise UsageError(f"--out {file.path}: row {row_id!r} was not written by this command")
        for name in fixed:
            if made.get(name) != gen[name]:
                raise UsageError(
                    f"--out {file.path}: holds rows made with {name} {made.get(name)!r}, this run "
                    f"has {gen[name]!r}; use the same {name} or another file"
                )
        if row_id not in rows:
            raise UsageError(f"--out {file.path}: id {row_id!r} is not in the prompt file")
        asked = rows[row_id]
        same_ids = asked.get("input_ids") in (None, row.get("prompt_token_ids"))
        if row.get("prompt") != asked.get("prompt") or not same_ids:
            raise UsageError(f"--out {file.path}: id {row_id!r} has another prompt here")
    return {row["id"] for row in file.rows}


def _dropped_before(
    path: Path, rows: dict[str, Row], gen: dict[str, Any], fixed: Sequence[str]
) -> dict[str, str]:
    """Return what an earlier report says was truncated, of these prompts and settings only.

    Raises UsageError for a report that is not JSON.
    """
    before = read_json(path, "report of --out:") if path.is_file() else {}
    made, dropped = before.get("gen"), before.get("truncated")
    if not isinstance(made, dict) or not isinstance(dropped, dict):
        return {}
    if any(made.get(name) != gen[name] for name in fixed):
        return {}
    return {i: mark for i, mark in dropped.items() if i in rows and mark == _mark(rows[i])}


def _mark(row: Row) -> str:
    """Return 16 hex digits that tell a prompt from others under the same id."""
    asked = {key: row.get(key) for key in ("prompt", "input_ids")}
    return hashlib.sha256(encode(asked)).hexdigest()[:16]


def _jobs(
    rows: list[Row], tokenizer: Any, limits: Limits, report: ContinuationReport
) -> deque[Job]:
    """Return the prompts this target can answer; the others become errors of the report.

    Raises UsageError when there are prompts and none of them, nor any earlier one, is usable.
    """
    jobs: deque[Job] = deque()
    for row in rows:
        text = row.get("prompt")
        if text is None:
            ids = row["input_ids"]
        else:
            # The template would make a question of nothing, too.
            ids = render_prompt(tokenizer, text) if text.strip() else []
        error = _refusal(ids, limits, report.gen["max_tokens"])
        if error is None:
            jobs.append(Job(row, ids))
        else:
            report.errors.append({"id": row["id"], "error": error})
    if rows and not jobs and not report.num_skipped and not report.truncated:
        raise UsageError(
            f"continuations: 0 of {len(rows)} prompts are usable; first: {report.errors[0]}"
        )
    return jobs


def _refusal(ids: list[int], limits: Limits, max_tokens: int) -> str | None:
    if not ids:
        return "empty prompt"
    if not limits.are_ids(ids):
        return f"token id outside 0..{limits.vocab_size - 1}"
    if len(ids) + max_tokens > limits.max_context:
        return (
            f"prompt of {len(ids)} tokens and {max_tokens} new ones exceed the context of "
            f"{limits.max_context}"
        )
    return None


def _row(answer: Answer, gen: dict[str, Any]) -> Row:
    """Return the row of one finished answer."""
    asked = answer.job.row
    return {
        "id": asked["id"],
        "source": asked.get("source"),
        "category": asked.get("category"),
        "prompt": asked.get("prompt"),
        "prompt_token_ids": answer.job.prompt_token_ids,
        "output_token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "gen": {**gen, **answer.gen},
    }


def _print(report: ContinuationReport, out: Path) -> None:
    table = Table(title=str(out), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("prompts", str(report.num_input))
    table.add_row("skipped, done before", str(report.num_skipped))
    table.add_row("answered", str(report.num_success))
    for reason, num in sorted(report.finish_reasons.items()):
        table.add_row(f"  finish reason {reason}", str(num))
    if report.truncated:
        table.add_row("truncated, left out", str(len(report.truncated)))
    table.add_row("errors", str(len(report.errors)))
    if report.wall_s:
        table.add_row("output tokens", str(report.num_output_tokens))
        table.add_row("tokens/s", f"{report.num_output_tokens / report.wall_s:.1f}")
    console = plain_console()
    console.print(table)
    if report.errors:
        console.print("first error:", report.errors[0])
    if not report.is_complete:
        command = shlex.join(["treespark", *sys.argv[1:]])
        console.print(f"stopped; to go on: {command}", soft_wrap=True)
