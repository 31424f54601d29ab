# SPDX-License-Identifier: Apache-2.0
"""Cells of an evaluation that a running server decodes: several workers behind one address.

A run folder that was measured in this process gets further cells from outside: the same prompts, as
token ids, in a closed loop over HTTP. The server says how many tokens and rounds an answer took;
single rounds, phases and ids stay unknown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treespark.bench.load import LoadOptions, send_prompts
from treespark.bench.suite_recipe import load_suite_recipe, select_prompts
from treespark.bench.suite_records import (
    UNKNOWN,
    CellKey,
    CellRow,
    RequestRow,
    SuiteRun,
    read_setting,
)
from treespark.bench.suite_writer import SuiteWriter, write_setting
from treespark.errors import UsageError
from treespark.target.template import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from treespark.bench.load_summary import Outcome
    from treespark.bench.suite_recipe import SuiteRecipe
    from treespark.bench.suite_records import SuiteSetting
    from treespark.bench.workloads import Selection


def run_server_suite(
    path: Path,
    url: str,
    method: str,
    concurrency: int,
    *,
    out: Path | None = None,
    data: Path | None = None,
    datasets: Sequence[str] = (),
) -> SuiteRun:
    """Measure one method of a recipe on a server, `concurrency` requests at a time; return the run.

    The server has to serve the recipe's target by that method. Where it is one of ours, its trees
    are compared with the method's; for the rest only its answers can tell. Raises UsageError for a
    run folder without such a method, other prompts, a server that cannot be reached or has other
    trees, and requests that fail; finished cells stay. datasets: measure these alone.
    """
    recipe = load_suite_recipe(path)
    recipe = recipe.model_copy(update={"out": out or recipe.out, "data": data or recipe.data})
    chosen = recipe.chosen(datasets)
    setting = read_setting(recipe.out)
    names = [row.name for row in setting.methods]
    if method not in names:
        raise UsageError(f"--method {method}: {recipe.out} has {', '.join(names)}")
    if recipe.max_tokens != setting.max_tokens:
        raise UsageError(f"max_tokens {recipe.max_tokens}: {recipe.out} has {setting.max_tokens}")
    selections = _same_selections(recipe, setting)
    with SuiteWriter(recipe.out) as writer:
        # First, so that the setting knows of every cell; read again, as it is nobody else's now.
        setting = read_setting(recipe.out)
        if concurrency not in setting.concurrencies:
            concurrencies = sorted([*setting.concurrencies, concurrency])
            write_setting(recipe.out, replace(setting, concurrencies=concurrencies))
        for repeat in range(setting.repeats):
            for selection in selections:
                key = CellKey(selection.row.name, method, concurrency, repeat)
                if key.dataset in chosen and key not in writer.finished:
                    _check_trees(url, setting, method)
                    _measure(key, selection, url, setting.max_tokens, writer)
    return SuiteRun(recipe.out)


def _same_selections(recipe: SuiteRecipe, setting: SuiteSetting) -> list[Selection]:
    """Return the datasets' prompts; refuse others than those that were measured."""
    tokenizer = load_tokenizer(recipe.target.model)
    measured = {row.name: row for row in setting.datasets}
    selections = select_prompts(recipe, tokenizer)
    for selection in selections:
        name, before = selection.row.name, measured.get(selection.row.name)
        if before is None or before.subset_sha256 != selection.row.subset_sha256:
            raise UsageError(f"dataset {name}: {recipe.out} was measured on other prompts")
    return selections


def _check_trees(url: str, setting: SuiteSetting, name: str) -> None:
    """Raise UsageError where a server of ours says that its trees are not the method's."""
    import httpx

    try:
        answer = httpx.get(f"{url.rstrip('/')}/server_info", timeout=10)
        info = answer.json() if answer.is_success else None
    except (httpx.HTTPError, ValueError):
        # Who is no such server, or none, is found out by the first request.
        return
    if not isinstance(info, dict) or not {"tree", "speculation"} <= info.keys():
        return
    if info["speculation"] == "auto":
        raise UsageError(
            f"--url {url}: the server chooses its budget itself; start it with the --budget of "
            f"method {name}"
        )
    row = next(row for row in setting.methods if row.name == name)
    own = {"depth": row.depth, "branching": row.branching, "budget": row.budget}
    wanted = own if row.drafter else None
    if info["tree"] != wanted:
        raise UsageError(
            f"--url {url}: the server has trees {info['tree']}, method {name} {wanted}"
        )


def _measure(
    key: CellKey, selection: Selection, url: str, max_tokens: int, writer: SuiteWriter
) -> None:
    prompts = selection.prompts
    options = LoadOptions(
        url,
        backend="openai",
        num_prompts=len(prompts),
        max_concurrency=key.concurrency,
        output_len=max_tokens,
        num_warmups=1,
    )
    outcomes, wall_s = send_prompts(options, [prompt.token_ids for prompt in prompts])
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        if outcome.error is not None:
            raise UsageError(f"--url {url}: {prompt.name}: {outcome.error}")
    origin_s = min(outcome.start_s for outcome in outcomes)
    rows = [
        _row(key, prompt.name, outcome, origin_s)
        for prompt, outcome in zip(prompts, outcomes, strict=True)
    ]
    cell = CellRow(
        **key._asdict(),
        wall_s=wall_s,
        num_requests=len(rows),
        num_output_tokens=sum(row.num_output_tokens for row in rows),
        num_rounds=0,
    )
    writer.add_cell(cell, rows, [])


def _row(key: CellKey, prompt_id: str, outcome: Outcome, origin_s: float) -> RequestRow:
    first_s = outcome.event_s[0] if outcome.event_s else outcome.end_s
    return RequestRow(
        **key._asdict(),
        prompt_id=prompt_id,
        num_prompt_tokens=outcome.num_prompt_tokens,
        num_output_tokens=outcome.num_output_tokens,
        num_prefill_tokens=outcome.num_output_tokens - outcome.num_committed_tokens,
        num_rounds=outcome.num_rounds,
        finish_reason=UNKNOWN,
        plain_decoding=None,
        arrival_s=outcome.start_s - origin_s,
        admitted_s=outcome.start_s - origin_s,
        first_token_s=first_s - origin_s,
        finished_s=outcome.end_s - origin_s,
        ids_sha256=UNKNOWN,
    )
