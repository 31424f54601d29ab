# SPDX-License-Identifier: Apache-2.0
"""`treespark bench acceptance`: what several drafters of a target reach on the same prompts.

Every drafter decodes every prompt, or is replayed along the target's answer to it, as a chain and
with its tree (`acceptance_counts.py`). Acceptance lengths are committed tokens over rounds, by
domain and over all prompts, with standard errors that say how far another draw of as many prompts
might lie.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from treespark.bench.acceptance_counts import TREE, decoded_counts, policies_of, replayed_counts
from treespark.bench.methods import CHAIN
from treespark.bench.tables import wide_console
from treespark.bench.workload import load_prompts
from treespark.data.jsonl import check_file, write_json_atomic
from treespark.errors import UsageError
from treespark.serving.llm import load_drafter_for
from treespark.target.model import TargetModel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from treespark.bench.acceptance_counts import Counts
    from treespark.bench.workload import Prompt

ALL = "all"


def run_acceptance(
    target: Path,
    drafters: Sequence[Path],
    prompts: Sequence[Path],
    *,
    num_prompts: int | None = None,
    budget: int | None = None,
    batch_size: int = 8,
    max_tokens: int = 128,
    dtype: str | None = "auto",
    device: str | None = None,
    replay: bool = False,
    out: Path | None = None,
    as_json: bool = False,
) -> dict[str, Any]:
    """Try every drafter on the first `num_prompts` of each file; print and return the table.

    budget: nodes of the trees, None for each drafter's own. A drafter of chains has no trees.
    replay: run the drafters along the target's answers instead of decoding with each.  out: JSON
    file of the result.  Raises UsageError, before anything is decoded, for input that does not fit.
    """
    if len({folder.resolve() for folder in drafters}) < len(drafters):
        raise UsageError("--drafter: a folder is given twice")
    if out is not None:
        check_file(out, "--out ")
    model = TargetModel.from_pretrained(target, dtype=dtype, device=device)
    some = load_prompts(prompts, model, num_prompts)
    if any(prompt.domain == ALL for prompt in some):
        raise UsageError(f"--prompts: a category or file is called {ALL}, as the sum is; rename it")
    loaded = {folder: load_drafter_for(folder, model) for folder in drafters}
    count = replayed_counts if replay else decoded_counts
    counts = count(model, loaded, some, budget, batch_size, max_tokens)
    result = {
        "target": str(model.path),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_tokens": max_tokens,
        "replay": replay,
        "prompts": {domain: len(rows) for domain, rows in _domains(some).items()},
        "drafters": {
            str(folder): {m: dataclasses.asdict(p) for m, p in policies_of(drafter, budget).items()}
            for folder, drafter in loaded.items()
        },
        **{method: _lengths(by_drafter, some) for method, by_drafter in counts.items()},
    }
    if out is not None:
        write_json_atomic(out, result)
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        for method in (CHAIN, TREE):
            wide_console().print(_table(result, method))
    return result


def _domains(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Places of the prompts of each domain, and of all."""
    found: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        found.setdefault(prompt.domain, []).append(place)
    return {**found, ALL: list(range(len(prompts)))}


def _lengths(
    by_drafter: dict[str, list[Counts]], prompts: Sequence[Prompt]
) -> dict[str, dict[str, Any]]:
    """For each drafter and domain: acceptance length, its standard error, difference to the first
    drafter's and the standard error of that.
    """
    found: dict[str, dict[str, Any]] = {}
    first = next(iter(by_drafter.values()), [])
    for name, counts in by_drafter.items():
        found[name] = {}
        for domain, places in _domains(prompts).items():
            own, base = ([some[i] for i in places] for some in (counts, first))
            length, deviations = acceptance_with_deviations(own)
            other, others = acceptance_with_deviations(base)
            found[name][domain] = {
                "acceptance": length,
                "error": standard_error(deviations),
                "difference": length - other,
                "difference_error": standard_error(
                    [a - b for a, b in zip(deviations, others, strict=True)]
                ),
            }
    return found


def acceptance_with_deviations(counts: Sequence[Counts]) -> tuple[float, list[float]]:
    """Return committed tokens over rounds, and how far each prompt pulls that ratio.

    Prompts differ in their number of rounds, so the deviation of one is (committed - ratio x
    rounds) over the mean number of rounds: the linearised ratio estimator. A prompt without a round
    (an answer of one token) pulls it nowhere; without any round the ratio is 0.
    """
    rounds = sum(count.rounds for count in counts)
    if not rounds:
        return 0.0, [0.0] * len(counts)
    ratio = sum(count.committed for count in counts) / rounds
    mean = rounds / len(counts)
    return ratio, [(count.committed - ratio * count.rounds) / mean for count in counts]


def standard_error(deviations: Sequence[float]) -> float | None:
    """Return the standard error of a mean with these deviations; None for fewer than two."""
    number = len(deviations)
    if number < 2:
        return None
    return math.sqrt(sum(value * value for value in deviations) / (number * (number - 1)))


def _table(result: dict[str, Any], method: str) -> Table:
    budgets = {str(p[TREE]["budget"]) for p in result["drafters"].values() if TREE in p}
    title = method if method == CHAIN else f"tree of {', '.join(sorted(budgets))} nodes"
    table = Table(
        title=f"{title}: tokens a round (standard error)", title_justify="left", box=box.SIMPLE
    )
    table.add_column("drafter", overflow="fold")
    for domain, number in result["prompts"].items():
        table.add_column(f"{domain}\n{number}", justify="right")
    table.add_column("to the first", justify="right")
    for name, row in result[method].items():
        cells = [_cell(part["acceptance"], part["error"]) for part in row.values()]
        last = row[ALL]
        table.add_row(name, *cells, _cell(last["difference"], last["difference_error"], "+"))
    return table


def _cell(value: float, error: float | None, sign: str = "") -> str:
    return f"{value:{sign}.3f}" + ("" if error is None else f" ({error:.3f})")
