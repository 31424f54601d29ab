# SPDX-License-Identifier: Apache-2.0
"""`treespark compare`: the same prompts by every method, interleaved; speed and equal texts.

Methods take turns on each batch of prompts, in an order that rotates, so that a machine that grows
slower or busier touches all of them. Throughput is output tokens / wall time, prefill included.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from treespark import device as devices
from treespark.bench import tables
from treespark.bench.methods import AUTOREGRESSIVE, LOOKUP, Method, all_methods
from treespark.bench.plot import check_matplotlib, plot_bars
from treespark.bench.statistics import equality, phase_profile, statistics
from treespark.bench.workload import (
    Prompt,
    batches,
    changed_policy,
    check_policy_options,
    load_prompts,
    needed_length,
)
from treespark.data.jsonl import check_folder
from treespark.errors import UsageError
from treespark.serving.llm import load_pair
from treespark.tree.policy import MAX_BUDGET

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from treespark.serving.records import RequestRecord
    from treespark.target.model import TargetModel
    from treespark.tree.policy import TreePolicy

_WARMUP_TOKENS = 16
_FILES = ("compare.json", "compare.svg", "compare.png")


@dataclass
class Measured:
    """What one method did.

    walls: (repeat, file) -> seconds.  tokens: (repeat, file) -> output tokens.  answers: per repeat
    the token ids of every prompt, in order.  records: file -> the first repeat's records.
    """

    walls: dict[tuple[int, str], float] = field(default_factory=dict)
    tokens: dict[tuple[int, str], int] = field(default_factory=dict)
    answers: list[list[list[int]]] = field(default_factory=list)
    records: dict[str, list[RequestRecord]] = field(default_factory=dict)


def run_compare(
    target: Path,
    drafter: Path | None,
    prompts: Sequence[Path],
    out: Path,
    *,
    num_prompts: int = 8,
    depth: int | None = None,
    branching: int | None = None,
    budget: int | None = None,
    budgets: Sequence[int] = (8, 12, 16, 20, 32),
    batch_size: int = 1,
    max_tokens: int = 128,
    repeats: int = 3,
    profile: bool = False,
    dtype: str | None = "auto",
    device: str | None = None,
    as_json: bool = False,
) -> dict[str, Any]:
    """Measure all methods, print tables, write compare.json, .svg, .png to `out`, return the JSON.

    budget: compare this one only, instead of `budgets`. Exits with 1 when float32 answers differ
    from autoregressive ones. Raises UsageError before anything runs for input that does not fit.
    """
    check_matplotlib("compare")
    check_policy_options(drafter, depth=depth, branching=branching, budget=budget)
    for size in budgets:
        if not 0 <= size <= MAX_BUDGET:
            raise UsageError(f"--budgets {size}: need whole numbers in 0..{MAX_BUDGET}")
    _check_out(out)
    load_start = os.getloadavg()
    model, loaded = load_pair(target, drafter, dtype=dtype, device=device)
    policy = changed_policy(loaded, depth=depth, branching=branching, budget=budget)
    some = load_prompts(prompts, model, num_prompts)
    length = needed_length(some, max_tokens, model.max_context)
    methods = all_methods(
        model,
        loaded,
        policy,
        sorted(set(budgets if budget is None else [budget])),
        batch_size=batch_size,
        max_model_len=length,
        profile=profile,
    )
    measured = measure(methods, some, batch_size, max_tokens, repeats)
    result = {
        **_setting(model, drafter, policy, some, load_start),
        "batch_size": batch_size,
        "max_tokens": max_tokens,
        "repeats": repeats,
        **_results(methods, measured, some, profile),
    }
    _write(out, result)
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        tables.print_result(tables.wide_console(), result, out)
    _judge(result)
    return result


def measure(
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    batch_size: int,
    max_tokens: int,
    repeats: int,
) -> dict[str, Measured]:
    """Run every method on every batch `repeats` times, interleaved, after an untimed warm-up."""
    groups = batches(prompts, batch_size)
    for method in methods:
        method.run([p.token_ids for p in groups[0]], min(_WARMUP_TOKENS, max_tokens))
        if method.llm is not None:
            method.llm.engine.clock.reset()
    measured = {method.name: Measured() for method in methods}
    total = repeats * len(groups) * len(methods)
    with tqdm(total=total, unit="run", desc="compare", mininterval=1) as bar:
        for repeat in range(repeats):
            for into in measured.values():
                into.answers.append([])
            for number, group in enumerate(groups):
                first = (repeat + number) % len(methods)
                for method in [*methods[first:], *methods[:first]]:
                    bar.set_postfix_str(method.name, refresh=False)
                    _run_once(method, group, max_tokens, repeat, measured[method.name])
                    bar.update()
    return measured


def _run_once(
    method: Method, group: Sequence[Prompt], max_tokens: int, repeat: int, into: Measured
) -> None:
    started_s = time.perf_counter()
    answers = method.run([prompt.token_ids for prompt in group], max_tokens)
    wall_s = time.perf_counter() - started_s
    key = repeat, group[0].file
    into.walls[key] = into.walls.get(key, 0.0) + wall_s
    num_tokens = sum(map(len, answers.token_ids))
    into.tokens[key] = into.tokens.get(key, 0) + num_tokens
    into.answers[repeat] += answers.token_ids
    if repeat == 0 and answers.records is not None:
        into.records.setdefault(group[0].file, []).extend(answers.records)


def _setting(
    model: TargetModel,
    drafter: Path | None,
    policy: TreePolicy,
    prompts: Sequence[Prompt],
    load_start: tuple[float, float, float],
) -> dict[str, Any]:
    """What another person needs to repeat the measurement."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    return {
        "command": sys.argv,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": devices.report(),
        "target": str(model.path),
        "target_fingerprint": model.fingerprint,
        "drafter": None if drafter is None else str(drafter),
        "policy": dataclasses.asdict(policy),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "load_average": {"start": load_start, "end": os.getloadavg()},
        "num_prompts": len(prompts),
        "prompt_tokens": {"min": min(lengths), "max": max(lengths), "sum": sum(lengths)},
        "throughput": "output tokens / wall time of decoding, prefill included",
    }


def _results(
    methods: Sequence[Method],
    measured: dict[str, Measured],
    prompts: Sequence[Prompt],
    profile: bool,
) -> dict[str, Any]:
    files = list(dict.fromkeys(prompt.file for prompt in prompts))
    notes = []
    if all(method.name != LOOKUP for method in methods):
        notes.append("prompt lookup is left out: transformers offers it at batch size 1 only")
    rows = []
    for method in methods:
        row = {
            "name": method.name,
            "policy": None if method.policy is None else dataclasses.asdict(method.policy),
            **statistics(measured, method.name, files),
            "equality": equality(measured[AUTOREGRESSIVE], measured[method.name], prompts),
        }
        if profile and method.llm is not None:
            row["profile"] = phase_profile(method.llm.engine.clock)
        rows.append(row)
    return {"files": files, "notes": notes, "methods": rows}


def _check_out(out: Path) -> None:
    """Refuse, before anything is measured, a folder that the results cannot be written to."""
    try:
        out.stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written: {error.strerror}") from None
    check_folder(out, f"--out {out}")
    for name in _FILES:
        if (out / name).is_dir():
            raise UsageError(f"--out {out}: {name} in it is a folder; choose another one")


def _write(out: Path, result: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    table, *plots = (out / name for name in _FILES)
    table.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for plot in plots:
        plot_bars(result, plot)


def _judge(result: dict[str, Any]) -> None:
    """Exit with 1 at answers that differ in a precision where they must not."""
    different = [row for row in result["methods"] if row["equality"]["num_different"]]
    if different and result["dtype"] in ("float32", "float64"):
        first = different[0]["equality"]["first"]
        sys.stderr.write(
            f"error: {different[0]['name']} differs from {AUTOREGRESSIVE} on prompt "
            f"{first['prompt']} of {first['file']} at output token {first['position']}; in "
            f"{result['dtype']} they must be equal\n"
        )
        raise SystemExit(1)
