# SPDX-License-Identifier: Apache-2.0
"""The target's own greedy answers to a prompt file, written row by row as they end.

A run that was stopped or killed goes on where it was: rows that are in the file are skipped by id.
Every row says how it was made (`gen`), and a run with other settings refuses to add to the file.
"""

import shlex
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from treespark.data.interrupt import StopRequest
from treespark.data.jsonl import (
    JsonlAppender,
    Row,
    check_out,
    read_jsonl,
    report_path,
    write_json_atomic,
)
from treespark.errors import UsageError
from treespark.target.template import load_tokenizer, render_prompt, template_fingerprint

if TYPE_CHECKING:
    from treespark.serving.engine import Engine
    from treespark.serving.scheduler import RequestOutput
    from treespark.target.model import TargetModel

# Settings that change the answers. The folder's name and the drafter do not: they are only noted.
_FIXED = ("fingerprint", "dtype", "sampling", "max_tokens", "template")


@dataclass
class ContinuationReport:
    """Counts of one run: num_input = num_skipped + num_success + errors, unless it was stopped.

    num_skipped: rows that were in the file before.  errors: {id, error} of prompts that this target
    cannot answer.  num_output_tokens, wall_s: of this run.
    """

    num_input: int
    num_skipped: int = 0
    num_success: int = 0
    errors: list[dict[str, str]] = field(default_factory=list)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    num_output_tokens: int = 0
    wall_s: float = 0.0
    is_complete: bool = False
    gen: dict[str, Any] = field(default_factory=dict)


@dataclass
class Job:
    """One prompt to answer: its row of the prompt file and its rendered ids."""

    row: Row
    prompt_token_ids: list[int]


def run_continuations(
    target: Path,
    prompts: Path,
    out: Path,
    max_tokens: int = 512,
    batch_size: int = 8,
    dtype: str | None = None,
    device: str | None = None,
    drafter: Path | None = None,
) -> ContinuationReport:
    """Answer every prompt with at most `max_tokens` tokens; append to `out`, write its report.

    out: rows {id, source, category, prompt, prompt_token_ids, output_token_ids, text,
    finish_reason, gen} in the order in which answers end. batch_size: requests decoded at a time.
    drafter: makes it faster, not different. SIGINT and SIGTERM end it after the current round.
    Raises UsageError, with nothing written, for bad input and for rows made with other settings;
    SystemExit when a signal stopped it.
    """
    for name, value in (("--max-tokens", max_tokens), ("--batch-size", batch_size)):
        if value < 1:
            raise UsageError(f"{name} {value}: need at least 1")
    check_out(out, [prompts])
    rows = _read_prompts(prompts)
    tokenizer = load_tokenizer(target)
    from treespark.serving.scheduler import SamplingParams
    from treespark.target.model import TargetModel

    model = TargetModel.from_pretrained(target, device=device, dtype=dtype)
    params = SamplingParams(max_tokens=max_tokens)
    gen = {
        "model": target.resolve().name,
        "fingerprint": model.fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "sampling": {"temperature": params.temperature},
        "max_tokens": max_tokens,
        "template": template_fingerprint(tokenizer),
        "drafter": None if drafter is None else drafter.resolve().name,
    }
    report = ContinuationReport(len(rows), gen=gen)
    with JsonlAppender(out) as file, StopRequest() as stop:
        done = _check_done(file, rows, gen)
        report.num_skipped = len(done)
        waiting = [row for row_id, row in rows.items() if row_id not in done]
        jobs = _jobs(waiting, tokenizer, model, max_tokens, report)
        if jobs:
            engine = _engine(model, drafter, batch_size, jobs, max_tokens)
            _decode(engine, jobs, file, report, stop)
    report.is_complete = report.num_input == (
        report.num_skipped + report.num_success + len(report.errors)
    )
    assert report.is_complete or stop
    write_json_atomic(report_path(out), asdict(report))
    _print(report, out)
    if not report.is_complete:
        raise SystemExit(stop.exit_code)
    return report


def _read_prompts(path: Path) -> dict[str, Row]:
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


def _check_done(file: JsonlAppender, rows: dict[str, Row], gen: dict[str, Any]) -> set[str]:
    """Return the ids that are answered; raises UsageError when those rows are not of this run."""
    for row in file.rows:
        row_id, made = row.get("id"), row.get("gen")
        if not isinstance(row_id, str) or not isinstance(made, dict):
            raise UsageError(f"--out {file.path}: row {row_id!r} was not written by this command")
        for name in _FIXED:
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


def _jobs(
    rows: list[Row],
    tokenizer: Any,
    model: "TargetModel",
    max_tokens: int,
    report: ContinuationReport,
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
        error = _refusal(ids, model, max_tokens)
        if error is None:
            jobs.append(Job(row, ids))
        else:
            report.errors.append({"id": row["id"], "error": error})
    if rows and not jobs and not report.num_skipped:
        raise UsageError(
            f"continuations: 0 of {len(rows)} prompts are usable; first: {report.errors[0]}"
        )
    return jobs


def _refusal(ids: list[int], model: "TargetModel", max_tokens: int) -> str | None:
    if not ids:
        return "empty prompt"
    if not 0 <= min(ids) <= max(ids) < model.vocab_size:
        return f"token id outside 0..{model.vocab_size - 1}"
    if len(ids) + max_tokens > model.max_context:
        return (
            f"prompt of {len(ids)} tokens and {max_tokens} new ones exceed the context of "
            f"{model.max_context}"
        )
    return None


def _engine(
    model: "TargetModel", drafter: Path | None, batch_size: int, jobs: deque[Job], max_tokens: int
) -> "Engine":
    from treespark.serving.engine import Engine
    from treespark.serving.llm import load_pair

    _, loaded = load_pair(model, drafter)
    return Engine(
        model,
        loaded,
        max_num_seqs=min(batch_size, len(jobs)),
        max_model_len=max(len(job.prompt_token_ids) for job in jobs) + max_tokens,
    )


def _decode(
    engine: "Engine",
    jobs: deque[Job],
    file: JsonlAppender,
    report: ContinuationReport,
    stop: StopRequest,
) -> None:
    """Run the engine until all jobs have ended or a signal came; each round's ends are written."""
    rows = {job.row["id"]: job.row for job in jobs}
    reasons: Counter[str] = Counter()
    start_s = time.perf_counter()
    bar = tqdm(
        total=report.num_input - len(report.errors),
        initial=report.num_skipped,
        unit="row",
        desc="continuations",
        smoothing=0.05,
    )
    with bar:
        for outputs, num_tokens in _rounds(engine, jobs, report.gen["max_tokens"]):
            ended = [output for output in outputs if output.finish_reason is not None]
            file.append(_row(rows[output.request_id], output, report.gen) for output in ended)
            reasons.update(output.finish_reason for output in ended if output.finish_reason)
            report.num_success += len(ended)
            report.num_output_tokens += num_tokens
            report.wall_s = time.perf_counter() - start_s
            bar.set_postfix_str(f"{report.num_output_tokens / report.wall_s:.0f} tok/s", False)
            bar.update(len(ended))
            if stop:
                break
    report.finish_reasons = dict(reasons)


def _rounds(
    engine: "Engine", jobs: deque[Job], max_tokens: int
) -> Iterator[tuple[list["RequestOutput"], int]]:
    """Yield each round's outputs and how many tokens they grew by, until all jobs have ended."""
    from treespark.serving.scheduler import Request, SamplingParams

    params = SamplingParams(max_tokens=max_tokens)
    num_slots, num_open = engine.kv.num_slots, 0
    lengths: dict[str, int] = {}
    while jobs or num_open:
        # One spare batch waits in the engine, so that a freed slot is filled at once.
        while jobs and num_open < 2 * num_slots:
            job = jobs.popleft()
            engine.add(Request(job.row["id"], job.prompt_token_ids, params))
            num_open += 1
        outputs, num_tokens = engine.step(), 0
        for output in outputs:
            num_tokens += len(output.token_ids) - lengths.get(output.request_id, 0)
            lengths[output.request_id] = len(output.token_ids)
            if output.finish_reason is not None:
                del lengths[output.request_id]
                num_open -= 1
        yield outputs, num_tokens


def _row(prompt_row: Row, output: "RequestOutput", gen: dict[str, Any]) -> Row:
    """Return the row of one finished answer."""
    return {
        "id": prompt_row["id"],
        "source": prompt_row.get("source"),
        "category": prompt_row.get("category"),
        "prompt": prompt_row.get("prompt"),
        "prompt_token_ids": output.prompt_token_ids,
        "output_token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "gen": gen,
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
    table.add_row("errors", str(len(report.errors)))
    if report.wall_s:
        table.add_row("output tokens", str(report.num_output_tokens))
        table.add_row("tokens/s", f"{report.num_output_tokens / report.wall_s:.1f}")
    console = Console()
    console.print(table)
    if report.errors:
        console.print("first error:", report.errors[0], markup=False)
    if not report.is_complete:
        command = shlex.join(["treespark", *sys.argv[1:]])
        console.print(f"stopped; to go on: {command}", markup=False, soft_wrap=True)
