# SPDX-License-Identifier: Apache-2.0
"""Named workloads of the paper: which prompts a method is measured on, the same for every method.

A prompt is the first user turn of a row, rendered by the target's chat template as everywhere else
(`treespark.target.template`), and never truncated. Where a pool is larger than what is asked for, a
seeded shuffle chooses; elsewhere the pool is taken as it stands.

Counts: algorithms 6. Rows come from local JSONL files, or for some workloads from the Hugging Face
hub by the `datasets` package, whose raw columns then get the instructions that the released
evaluation files of the DSpark and DFlash projects have around them.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from treespark.bench.suite_records import DatasetRow
from treespark.bench.workload import Prompt
from treespark.data.formats import first_user_turn
from treespark.data.jsonl import encode, read_jsonl
from treespark.data.mixture_recipe import SourceSection
from treespark.data.sources import read_source
from treespark.errors import UsageError
from treespark.target.template import render_prompt, user_turn_marks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from treespark.data.jsonl import Row

HUB = "hub"
GENERAL, WRITING = "general", "writing"
_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_TESTS = "Write a solution to the following problem and make sure that it passes the tests:\n"


@dataclass(frozen=True)
class HubSource:
    """Where `datasets` finds a workload.  template: the prompt, made of the row's columns."""

    dataset: str
    template: str
    config: str | None = None
    split: str = "test"


@dataclass(frozen=True)
class Workload:
    """One workload.

    count: prompts that the paper takes.  files: names that its file may have in a folder, the first
    that is there.  domain: first word of its rows' domain, None for all rows.
    """

    name: str
    title: str
    count: int
    files: tuple[str, ...]
    group: str = GENERAL
    domain: str | None = None
    hub: HubSource | None = None


_WRITING_FILES = ("writingbench.jsonl", "benchmark_all.jsonl", "writingbench_length.jsonl")


def _writing(name: str, title: str, count: int) -> Workload:
    return Workload(f"writing-{name}", title, count, _WRITING_FILES, WRITING, title.split()[0])


_ALL = (
    Workload(
        "gsm8k",
        "GSM8K",
        500,
        ("gsm8k.jsonl",),
        hub=HubSource("openai/gsm8k", "{question}" + _BOXED, "main"),
    ),
    Workload(
        "math500",
        "MATH-500",
        500,
        ("math500.jsonl",),
        hub=HubSource("HuggingFaceH4/MATH-500", "{problem}" + _BOXED),
    ),
    Workload(
        "aime25",
        "AIME 2025",
        30,
        ("aime25.jsonl",),
        hub=HubSource("MathArena/aime_2025", "{problem}" + _BOXED, split="train"),
    ),
    Workload(
        "humaneval",
        "HumanEval",
        164,
        ("humaneval.jsonl",),
        hub=HubSource("openai/openai_humaneval", _TESTS + "```python\n{prompt}\n```"),
    ),
    Workload(
        "mbpp",
        "MBPP",
        256,
        ("mbpp.jsonl",),
        hub=HubSource("google-research-datasets/mbpp", "{prompt}", "sanitized"),
    ),
    Workload("livecodebench", "LiveCodeBench", 500, ("livecodebench.jsonl",)),
    Workload(
        "mt-bench",
        "MT-Bench",
        80,
        ("mt-bench.jsonl",),
        hub=HubSource("HuggingFaceH4/mt_bench_prompts", "{prompt[0]}", split="train"),
    ),
    Workload("alpaca", "Alpaca", 500, ("alpaca.jsonl",)),
    Workload("arena-hard-v2", "Arena-Hard-v2", 500, ("arena-hard-v2.jsonl",)),
    _writing("academic", "Academic & Engineering", 167),
    _writing("advertising", "Advertising & Marketing", 128),
    _writing("education", "Education", 111),
    _writing("finance", "Finance & Business", 210),
    _writing("literature", "Literature & Arts", 183),
    _writing("politics", "Politics & Law", 201),
)
WORKLOADS = {workload.name: workload for workload in _ALL}


@dataclass(frozen=True)
class Selection:
    """What is measured of a workload.  row: for the setting.  prompts: in their order."""

    row: DatasetRow
    prompts: list[Prompt]


def select(
    workload: Workload,
    source: Path | str,
    tokenizer: Any,
    *,
    count: int | None = None,
    seed: int,
    max_prompt_tokens: int | None = None,
) -> Selection:
    """Return the prompts of a workload, rendered by the target's tokenizer.

    source: a JSONL file, a folder that has one of the workload's, or HUB.  count: None is the
    paper's.  max_prompt_tokens: leave longer prompts out of the pool (never cut them).
    Raises UsageError for a source without such prompts, a bad row, and a pool smaller than `count`.
    """
    where, rows = _rows(workload, source)
    pool, num_too_long = [], 0
    for place, row in rows:
        turn = first_user_turn(row, place, partial(user_turn_marks, tokenizer))
        if isinstance(turn, list):
            raise UsageError(f"{place}: input_ids: a prompt has to be text here")
        if not isinstance(turn, str) or not turn.strip():
            raise UsageError(f"{place}: no user turn, or an empty one")
        ids = render_prompt(tokenizer, turn)
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            num_too_long += 1
            continue
        name = f"{workload.name}-{place.rpartition(':')[2]}"
        pool.append((turn, Prompt(workload.name, name, ids)))
    wanted = workload.count if count is None else count
    if len(pool) < wanted:
        long = f", {num_too_long} longer than max_prompt_tokens" if num_too_long else ""
        of = f" of domain {workload.domain}" if workload.domain else ""
        hint = f"give `count`, at most {len(pool)}" if pool else "give another `file` or `data`"
        raise UsageError(
            f"dataset {workload.name}: count {wanted}, but {where} has {len(pool)} usable prompts"
            f"{of}{long}; {hint}"
        )
    if len(pool) > wanted:
        random.Random(f"{seed}:{workload.name}").shuffle(pool)
    chosen = pool[:wanted]
    row = DatasetRow(
        name=workload.name,
        title=workload.title,
        group=workload.group,
        source=where,
        pool_size=len(pool) + num_too_long,
        num_too_long=num_too_long,
        subset_size=wanted,
        subset_sha256=subset_sha256([text for text, _ in chosen]),
    )
    return Selection(row, [prompt for _, prompt in chosen])


def subset_sha256(texts: list[str]) -> str:
    """Return the SHA-256 of prompts in their order, as hex digits: equal for equal workloads."""
    return hashlib.sha256(b"".join(encode({"prompt": text}) for text in texts)).hexdigest()


def _rows(workload: Workload, source: Path | str) -> tuple[str, Iterator[tuple[str, Row]]]:
    """Return where the rows come from, and (place, row) of each that belongs to the workload."""
    if source == HUB:
        return _hub_rows(workload)
    assert not isinstance(source, str)
    path = source
    if not source.exists():
        raise UsageError(f"dataset {workload.name}: {source}: no such file or folder")
    if source.is_dir():
        found = [source / name for name in workload.files if (source / name).is_file()]
        if not found:
            names = " or ".join(workload.files)
            raise UsageError(f"dataset {workload.name}: {source} has no {names}")
        path = found[0]
    return str(path), _file_rows(workload, path)


def _file_rows(workload: Workload, path: Path) -> Iterator[tuple[str, Row]]:
    for number, row in read_jsonl(path):
        # The published benchmark's own names for what the local files call turns and domain.
        domain = str(row.get("domain", row.get("domain1")))
        if workload.domain is None or domain.split()[:1] == [workload.domain]:
            is_raw = "query" in row and "turns" not in row
            yield f"{path}:{number}", {"prompt": row["query"]} if is_raw else row


def _hub_rows(workload: Workload) -> tuple[str, Iterator[tuple[str, Row]]]:
    hub = workload.hub
    if hub is None:
        raise UsageError(
            f"dataset {workload.name}: not on the hub as plain rows; name a JSONL file with `file`"
        )
    source = SourceSection(
        name=workload.name,
        category=workload.group,
        quota=workload.count,
        dataset=hub.dataset,
        config=hub.config,
        split=hub.split,
    )
    return f"{hub.dataset}[{hub.split}]", _templated(hub, source)


def _templated(hub: HubSource, source: SourceSection) -> Iterator[tuple[str, Row]]:
    for where, row in read_source(source):
        try:
            yield where, {"prompt": hub.template.format(**row)}
        except (KeyError, IndexError) as problem:
            raise UsageError(f"{where}: no column {problem}") from None
