# SPDX-License-Identifier: Apache-2.0
"""The target's own greedy answers to a prompt file, decoded here and written as they end."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from treespark.data.continuation_rows import (
    Answer,
    Collector,
    ContinuationReport,
    Job,
    Limits,
    collect,
    read_prompts,
)
from treespark.data.interrupt import StopRequest
from treespark.data.jsonl import check_out
from treespark.errors import UsageError
from treespark.target.template import load_tokenizer, template_fingerprint

if TYPE_CHECKING:
    from treespark.serving.engine import Engine
    from treespark.serving.scheduler import RequestOutput
    from treespark.target.model import TargetModel


def run_continuations(
    target: Path,
    prompts: Path,
    out: Path,
    max_tokens: int = 512,
    batch_size: int = 8,
    dtype: str | None = None,
    device: str | None = None,
    drafter: Path | None = None,
    drop_truncated: bool = False,
) -> ContinuationReport:
    """Answer every prompt with at most `max_tokens` tokens; append to `out`, write its report.

    out: rows {id, source, category, prompt, prompt_token_ids, output_token_ids, text,
    finish_reason, gen} in the order in which answers end. batch_size: requests decoded at a time.
    drafter: makes it faster, not different. drop_truncated: answers that the limit ended are
    counted in the report and left out. SIGINT and SIGTERM end it after the current round.
    Raises UsageError, with nothing written, for bad input and for rows made with other settings;
    SystemExit when a signal stopped it.
    """
    for name, value in (("--max-tokens", max_tokens), ("--batch-size", batch_size)):
        if value < 1:
            raise UsageError(f"{name} {value}: need at least 1")
    check_out(out, [prompts])
    rows = read_prompts(prompts)
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

    def decode(jobs: deque[Job], collector: Collector, stop: StopRequest) -> None:
        engine = _engine(model, drafter, batch_size, jobs, max_tokens)
        with collector:
            _decode(engine, jobs, max_tokens, collector, stop)

    limits = Limits(model.vocab_size, model.max_context)
    return collect(rows, out, tokenizer, limits, gen, decode, drop_truncated=drop_truncated)


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
    engine: "Engine", jobs: deque[Job], max_tokens: int, collector: Collector, stop: StopRequest
) -> None:
    """Run the engine until all jobs have ended or a signal came; each round's ends are written."""
    by_id = {job.row["id"]: job for job in jobs}
    for outputs, num_tokens in _rounds(engine, jobs, max_tokens):
        ended = [
            Answer(by_id.pop(output.request_id), output.token_ids, output.text, reason)
            for output in outputs
            if (reason := output.finish_reason) is not None
        ]
        collector.add(ended, num_tokens)
        if stop:
            break


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
