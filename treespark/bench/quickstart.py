# SPDX-License-Identifier: Apache-2.0
"""`treespark quickstart`: the whole path on a small real model, in minutes on two cores.

Fetch the target, watch trees being drafted and verified, compare decoders, train for two minutes.
"""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from treespark.bench.compare import run_compare
from treespark.bench.show import show_rounds
from treespark.bench.workload import load_prompts, needed_length
from treespark.device import resolve_device, resolve_dtype
from treespark.errors import UsageError
from treespark.recipe import Recipe, load_recipe
from treespark.serving.llm import LLM, load_pair
from treespark.target.fetch import fetch
from treespark.training.loop import train
from treespark.training.metrics import METRICS, read_metrics

logger = logging.getLogger(__name__)

# The quickstart uses the recipes and prompts of a checkout, which no wheel carries.
ROOT = Path(__file__).resolve().parents[2]
TARGET = "smollm2-135m"
PROMPTS = ("gsm8k", "mt-bench", "humaneval")
# Small enough that comparing takes two minutes on two cores.
_BUDGETS, _PROMPTS_PER_FILE, _COMPARE_TOKENS = (8, 16), 2, 64
_SHOWN_ROUNDS, _SHOWN_TOKENS = 4, 48
_PROBE_STEPS, _TABLE_ROWS = 3, 6


def run(out: Path, minutes: float) -> None:
    """Run the four parts and write to `out`; `minutes` is the time for training.

    Raises UsageError for files of the checkout that are missing, before anything runs.
    """
    console, started_s = Console(), time.perf_counter()
    prompts = [_needed(f"recipes/prompts/{name}.jsonl") for name in PROMPTS]
    recipe = _needed(f"recipes/{TARGET}-treespark.yaml")
    data = _needed(f"recipes/{TARGET}/continuations.jsonl")
    shipped = ROOT / "recipes" / TARGET / "drafter"
    _head(console, f"1. The target: {TARGET}, from an installed package")
    target = fetch(TARGET, ROOT / "runs" / TARGET)
    console.print(Text(f"in {target}"))

    drafter = shipped
    if not shipped.is_dir():
        console.print(Text("No trained drafter is shipped in this checkout: one is trained first."))
        drafter = _train(console, recipe, target, data, out / "training", minutes)
    _head(console, "2. Trees, drafted and verified")
    _show(console, target, drafter, prompts[0])
    _head(console, "3. The same prompts by every method")
    run_compare(
        target,
        drafter,
        prompts,
        out / "compare",
        num_prompts=_PROMPTS_PER_FILE,
        budgets=_BUDGETS,
        max_tokens=_COMPARE_TOKENS,
        repeats=1,
    )
    if drafter == shipped:
        _train(console, recipe, target, data, out / "training", minutes)
    _next_steps(console, target, drafter, time.perf_counter() - started_s)


def _needed(name: str) -> Path:
    path = ROOT / name
    if not path.is_file():
        raise UsageError(f"quickstart: {path} is missing; run it in a whole checkout of treespark")
    return path


def _head(console: Console, title: str) -> None:
    console.rule(Text(title, "bold"), align="left")


def _show(console: Console, target: Path, drafter: Path, prompt_file: Path) -> None:
    """Decode one prompt and print its first trees."""
    model, loaded = load_pair(target, drafter)
    (prompt,) = load_prompts([prompt_file], model, 1)
    length = needed_length([prompt], _SHOWN_TOKENS, model.max_context)
    llm = LLM(model, loaded, max_num_seqs=1, max_model_len=length)
    asked = model.tokenizer.decode(prompt.token_ids, skip_special_tokens=True)
    console.print(Text(asked, "dim"))
    text = show_rounds(llm, prompt.token_ids, _SHOWN_ROUNDS, _SHOWN_TOKENS, console)
    console.print(Text("\nThe answer, as the target alone would give it, begins:"))
    console.print(Text(text))


def _train(
    console: Console, recipe: Path, target: Path, data: Path, out: Path, minutes: float
) -> Path:
    """Train a new drafter for about `minutes`, print its losses; return its folder."""
    _head(console, f"Replay training for about {minutes:g} minutes, from random weights")
    _clear(out)
    probe = _recipe(recipe, target, data, out / "probe", _PROBE_STEPS)
    train(probe, resume="never")
    # The first step also pays for what is allocated once.
    step_s = median(line["step_s"] for line in _steps(out / "probe")[1:])
    steps = max(_PROBE_STEPS, int(60 * minutes / step_s))
    console.print(Text(f"a step takes {step_s:.2f} s: {steps} steps"))
    drafter = train(_recipe(recipe, target, data, out / "run", steps), resume="never")
    console.print(_loss_table(_steps(out / "run")))
    return drafter


def _recipe(path: Path, target: Path, data: Path, out: Path, steps: int) -> Recipe:
    """Return the recipe with every loss on from the first step, and nothing kept but the result."""
    # The recipe's bfloat16 would take half a minute a step where a processor only emulates it.
    dtype = str(resolve_dtype("auto", resolve_device())).removeprefix("torch.")
    overrides = {
        "target.model": target.resolve(),
        "target.dtype": dtype,
        "train.dtype": dtype,
        "data.continuations": f"[{data.resolve()}]",
        "data.features": "online",
        "data.holdout_rows": 0,
        # Short rows and few anchors: many small steps show more in two minutes than a few large.
        "data.max_tokens": 256,
        "data.num_anchors": 16,
        "data.tree_anchors": 4,
        "losses.warmup": "null",
        "train.max_steps": steps,
        "train.save_every": steps,
        "train.eval_every": 0,
        "train.decode_every": 0,
        "output.dir": out.resolve(),
    }
    return load_recipe(path, [f"{key}={value}" for key, value in overrides.items()])


def _clear(out: Path) -> None:
    """Remove what an earlier quickstart trained, and nothing else."""
    for part in ("probe", "run"):
        if (out / part / METRICS).is_file():
            logger.info("replacing %s of an earlier quickstart", out / part)
            shutil.rmtree(out / part)


def _steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder / METRICS) if "loss" in line]


def _loss_table(lines: list[dict[str, Any]]) -> Table:
    """Return mean losses over consecutive parts of a run."""
    names = [n for n in ("loss", "ce", "l1", "confidence", "survival", "coverage") if n in lines[0]]
    table = Table(title="losses, mean over the steps", title_justify="left")
    for name in ("steps", *names):
        table.add_column(name, justify="right")
    size = -(-len(lines) // _TABLE_ROWS)
    for first in range(0, len(lines), size):
        part = lines[first : first + size]
        means = [fmean(line[name] for line in part if line[name] is not None) for name in names]
        table.add_row(f"{first + 1}-{first + len(part)}", *(f"{mean:.3f}" for mean in means))
    return table


def _next_steps(console: Console, target: Path, drafter: Path, wall_s: float) -> None:
    _head(console, f"Done in {wall_s / 60:.1f} minutes. What to run next")
    lines = [
        "source .venv/bin/activate",
        "# talk to it",
        f"treespark generate {target} 'Why is the sky blue?' --drafter {drafter}",
        "# measure it properly: all budgets, three repeats, time by phase",
        f"treespark compare {target} --drafter {drafter} --out runs/compare --profile \\",
        "    " + " ".join(f"--prompts recipes/prompts/{name}.jsonl" for name in PROMPTS),
        "# train the whole recipe, in hours",
        f"treespark train recipes/{TARGET}-treespark.yaml",
    ]
    # Not wrapped, so that the lines can be copied.
    console.print(Text("\n".join(lines)), soft_wrap=True)
