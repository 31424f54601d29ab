# SPDX-License-Identifier: Apache-2.0
"""`treespark bench suite RECIPE`: every method on the same prompts, cell by cell, into records.

Methods take turns on each dataset, in an order that rotates, so that a machine that grows slower or
busier touches all of them. A run that ended in any way goes on with its next cell when it is
started again; `treespark.bench.suite_records` says what it leaves.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from treespark import device as devices
from treespark.bench.suite_cell import CellRun, cell_engine
from treespark.bench.suite_methods import SuiteMethod, suite_method
from treespark.bench.suite_recipe import load_suite_recipe, select_prompts
from treespark.bench.suite_records import (
    CELLS,
    REQUESTS,
    ROUNDS,
    SETTING,
    TRACES,
    UNKNOWN,
    CellKey,
    SuiteRun,
    SuiteSetting,
    TraceKey,
    read_setting,
)
from treespark.bench.suite_trace import trace
from treespark.bench.suite_writer import SuiteWriter, write_setting
from treespark.data.interrupt import StopRequest
from treespark.data.jsonl import check_folder
from treespark.errors import UsageError
from treespark.serving.llm import load_drafter_for
from treespark.target.model import TargetModel
from treespark.target.template import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from treespark.bench.suite_recipe import SuiteRecipe
    from treespark.bench.workload import Prompt
    from treespark.bench.workloads import Selection
    from treespark.drafter.auto import Drafter

_log = logging.getLogger(__name__)


def run_suite(
    path: Path,
    *,
    out: Path | None = None,
    data: Path | None = None,
    datasets: Sequence[str] = (),
    keep_ids: bool = False,
    device: str | None = None,
) -> SuiteRun:
    """Measure what the recipe `path` asks for and is not in the run folder yet; return the run.

    out, data, keep_ids: in place of the recipe's. datasets: measure these of the recipe's alone.
    SIGINT and SIGTERM end it at once with the finished cells kept. Exits with 1 where float32
    answers of two methods differ.
    Raises UsageError, before anything is measured, for whatever does not fit.
    """
    recipe = load_suite_recipe(path)
    given = {"out": out, "data": data, "keep_ids": keep_ids or None}
    recipe = recipe.model_copy(
        update={name: value for name, value in given.items() if value is not None}
    )
    check_folder(recipe.out, f"out {recipe.out}")
    chosen = recipe.chosen(datasets)
    suite = _prepare(recipe, device)
    _merged_setting(recipe.out, suite.setting)
    with SuiteWriter(recipe.out) as writer, StopRequest() as stop:
        # Again, as only now nobody else can write there; and never before the lock is held.
        setting = _merged_setting(recipe.out, suite.setting, writer.finished)
        write_setting(recipe.out, setting)
        finished = _Measurement(suite, chosen, writer, stop).run()
    if not finished:
        sys.stderr.write(f"stopped; finished cells are in {recipe.out}, start again to go on\n")
        raise SystemExit(stop.exit_code)
    run = SuiteRun(recipe.out)
    _judge(run)
    return run


# ---------------------------------------------------------------------- before anything runs


@dataclass(frozen=True)
class _Suite:
    """Everything loaded and checked."""

    recipe: SuiteRecipe
    target: TargetModel
    selections: list[Selection]
    methods: list[SuiteMethod]
    setting: SuiteSetting


def _prepare(recipe: SuiteRecipe, device: str | None) -> _Suite:
    load = os.getloadavg()
    # Before the target, which may take minutes to load.
    tokenizer = load_tokenizer(recipe.target.model)
    selections = select_prompts(recipe, tokenizer)
    target = TargetModel.from_pretrained(
        recipe.target.model, dtype=recipe.target.dtype, device=device
    )
    for selection in selections:
        _check_length(selection, recipe.max_tokens, target.max_context)
    drafters = {name: load_drafter_for(path, target) for name, path in recipe.drafters.items()}
    methods = [suite_method(section, drafters, target) for section in recipe.methods]
    _check_titles(methods)
    setting = SuiteSetting(
        command=sys.argv,
        time=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions=devices.report(),
        recipe=recipe.model_dump(mode="json"),
        target={
            "path": str(target.path),
            "fingerprint": target.fingerprint,
            "num_layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
        },
        drafters={name: _facts(recipe.drafters[name], one) for name, one in drafters.items()},
        datasets=[selection.row for selection in selections],
        methods=[method.row for method in methods],
        concurrencies=list(recipe.concurrencies),
        repeats=recipe.repeats,
        max_tokens=recipe.max_tokens,
        seed=recipe.seed,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        threads=torch.get_num_threads(),
        baseline=recipe.baseline,
        control=recipe.control,
        load_average=list(load),
    )
    return _Suite(recipe, target, selections, methods, setting)


def _check_length(selection: Selection, max_tokens: int, max_context: int) -> None:
    for prompt in selection.prompts:
        if len(prompt.token_ids) + max_tokens > max_context:
            raise UsageError(
                f"dataset {prompt.file}: prompt {prompt.name} has {len(prompt.token_ids)} tokens, "
                f"with max_tokens {max_tokens} more than the target's context of {max_context}; "
                "prompts are never cut: lower max_tokens, or leave long ones out by "
                "max_prompt_tokens"
            )


def _check_titles(methods: list[SuiteMethod]) -> None:
    """Tables tell methods apart by their titles, also by those that a recipe does not give."""
    names: dict[str, str] = {}
    for row in (method.row for method in methods):
        other = names.setdefault(row.title, row.name)
        if other != row.name:
            raise UsageError(
                f"method {row.name}: title {row.title!r} is also the one of {other}; give another"
            )


def _facts(folder: Path, drafter: Drafter) -> dict[str, Any]:
    config = drafter.config
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return {
        "path": str(folder),
        "fingerprint": digest.hexdigest(),
        "model_type": config.model_type,
        "block_size": config.block_size,
        "num_hidden_layers": config.num_hidden_layers,
        "head_dim": config.head_dim,
    }


def _merged_setting(
    out: Path, setting: SuiteSetting, finished: Collection[CellKey] = ()
) -> SuiteSetting:
    """Return the setting to write to the run folder `out`, which has these cells.

    Raises UsageError for a folder whose cells were measured in another setting, or in one that is
    lost.
    """
    if not (out / SETTING).exists():
        for name in (CELLS, REQUESTS, ROUNDS, TRACES):
            if (out / name).exists() and (out / name).stat().st_size:
                raise UsageError(
                    f"out {out}: it has {name} without {SETTING}, which says how that was "
                    "measured; put it back, or choose another folder"
                )
        return setting
    old = read_setting(out)
    for difference in _differences(setting, old):
        raise UsageError(
            f"out {out}: its cells were measured with {difference}; choose another folder"
        )
    # A recipe may ask for less than is there, as after `--url`: what was measured stays.
    more = {key.concurrency for key in finished} - set(setting.concurrencies)
    return replace(
        setting,
        time=old.time,
        load_average=old.load_average,
        concurrencies=[*setting.concurrencies, *sorted(more)],
        repeats=max([setting.repeats, *(key.repeat + 1 for key in finished)]),
    )


def _differences(new: SuiteSetting, old: SuiteSetting) -> Iterator[str]:
    """Yield what the old cells have that keeps new ones from standing beside them.

    What only adds cells may change: more datasets, methods, concurrencies, repeats.
    """
    for name in ("max_tokens", "seed", "dtype", "device", "threads"):
        if getattr(new, name) != getattr(old, name):
            yield f"{name} {getattr(old, name)}, the recipe has {getattr(new, name)}"
    for name, ours in new.machine.items():
        theirs = old.machine[name]
        # Older runs do not say.
        if theirs is not None and theirs != ours:
            yield f"{name} {theirs}, this is {ours}"
    if new.target["fingerprint"] != old.target.get("fingerprint"):
        yield f"another target, {old.target.get('path')}"
    for name, facts in old.drafters.items():
        if name not in new.drafters:
            yield f"drafter {name}, which the recipe lacks"
        elif new.drafters[name]["fingerprint"] != facts.get("fingerprint"):
            yield f"another drafter {name}, {facts.get('path')}"
    for kind in ("datasets", "methods"):
        new_rows = {row.name: asdict(row.content) for row in getattr(new, kind)}
        for row in getattr(old, kind):
            what = f"{kind.removesuffix('s')} {row.name}"
            if row.name not in new_rows:
                yield f"{what}, which the recipe lacks"
                continue
            for field, value in asdict(row.content).items():
                if value != new_rows[row.name][field]:
                    yield f"{what} with {field} {value}, the recipe has {new_rows[row.name][field]}"


# ---------------------------------------------------------------------- measuring


@dataclass
class _Measurement:
    """The cells and traces that are missing, one after the other."""

    suite: _Suite
    datasets: Collection[str]
    writer: SuiteWriter
    stop: StopRequest

    def run(self) -> bool:
        """Measure and trace; return False if a signal stopped it."""
        recipe = self.suite.recipe
        groups = [
            (repeat, concurrency, index)
            for repeat in range(recipe.repeats)
            for concurrency in recipe.concurrencies
            for index, selection in enumerate(self.suite.selections)
            if selection.row.name in self.datasets
        ]
        missing = sum(
            len(self._missing(*group)) * len(self.suite.selections[group[2]].prompts)
            for group in groups
        )
        with tqdm(total=missing, unit="request", desc="suite", smoothing=0.05) as self.bar:
            cells_done = all(self._group(*group) for group in groups)
        return cells_done and self._trace()

    def _missing(self, repeat: int, concurrency: int, index: int) -> list[SuiteMethod]:
        """The methods without a cell here, in the order of their first turn."""
        dataset, methods = self.suite.selections[index].row.name, self.suite.methods
        first = (repeat + index) % len(methods)
        return [
            method
            for method in [*methods[first:], *methods[:first]]
            if CellKey(dataset, method.row.name, concurrency, repeat) not in self.writer.finished
        ]

    def _group(self, repeat: int, concurrency: int, index: int) -> bool:
        """Measure one dataset by all methods, turn by turn."""
        recipe, selection = self.suite.recipe, self.suite.selections[index]
        methods, prompts = self._missing(repeat, concurrency, index), selection.prompts
        # A closed loop of several requests is never interrupted: it would drain at every turn.
        size = (recipe.prompts_per_turn if concurrency == 1 else None) or len(prompts)
        turns = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        runs: dict[str, CellRun] = {}
        for turn, some in enumerate(turns):
            first = turn % max(len(methods), 1)
            for method in [*methods[first:], *methods[:first]]:
                name = method.row.name
                self.bar.set_postfix_str(f"{selection.row.name} {name} C={concurrency}", False)
                if name not in runs:
                    key = CellKey(selection.row.name, name, concurrency, repeat)
                    runs[name] = self._begin(key, method, prompts)
                if not runs[name].run(some, self._goes_on):
                    return False
                if turn == len(turns) - 1:
                    run = runs.pop(name)
                    self.writer.add_cell(run.row(), run.requests, run.rounds)
        return True

    def _begin(self, key: CellKey, method: SuiteMethod, prompts: list[Prompt]) -> CellRun:
        recipe = self.suite.recipe
        length = max(len(prompt.token_ids) for prompt in prompts) + recipe.max_tokens
        engine = cell_engine(self.suite.target, method, key.concurrency, length, recipe.profile)
        run = CellRun(key, engine, recipe.max_tokens, recipe.keep_ids)
        run.warm_up(prompts)
        return run

    def _goes_on(self, num_ended: int) -> bool:
        self.bar.update(num_ended)
        return not self.stop

    def _trace(self) -> bool:
        """Trace the first prompts of each dataset by every method that drafts."""
        recipe, suite = self.suite.recipe, self.suite
        jobs = [
            (TraceKey(prompt.file, method.row.name, prompt.name), method, prompt)
            for selection in suite.selections
            if selection.row.name in self.datasets
            for prompt in selection.prompts[: recipe.num_traced(selection.row.name)]
            for method in suite.methods
            if method.drafter is not None
        ]
        todo = [job for job in jobs if job[0] not in self.writer.traced]
        tokens = min(recipe.traced_tokens, recipe.max_tokens)
        for _, method, prompt in tqdm(todo, unit="trace", desc="traces", disable=not todo):
            if self.stop:
                return False
            rows = trace(suite.target, method, prompt, tokens)
            if rows:
                self.writer.add_trace(rows)
        return True


def _judge(run: SuiteRun) -> None:
    """Say which answers differ between methods; exit with 1 in a precision where none may."""
    first: dict[tuple[str, str], tuple[str, str]] = {}
    different: dict[str, str] = {}
    for row in run.requests():
        if row.ids_sha256 == UNKNOWN:
            continue
        method, digest = first.setdefault(
            (row.dataset, row.prompt_id), (row.method, row.ids_sha256)
        )
        if digest != row.ids_sha256:
            where = f"{row.method} and {method} differ on prompt {row.prompt_id}"
            different.setdefault(row.method, where)
    if not different:
        return
    example = next(iter(different.values()))
    if run.setting.dtype in ("float32", "float64"):
        sys.stderr.write(f"error: {example}; in {run.setting.dtype} all answers must be equal\n")
        raise SystemExit(1)
    _log.warning(
        "%s: %s rounds differently when a forward has more rows", example, run.setting.dtype
    )
