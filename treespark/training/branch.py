# SPDX-License-Identifier: Apache-2.0
"""A run that begins with the checkpoint of another one, where it would have made the same itself.

Runs that differ in nothing but the weights of their losses, behind a common warm-up, are one run
until the warm-up ends (algorithms.md 2.5: the weights enter the total alone). One of them trains
that part, the others begin with its end: their results are bit for bit those of whole runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from treespark.errors import UsageError
from treespark.recipe import LossWeights
from treespark.training import checkpoint, setup

if TYPE_CHECKING:
    from treespark.recipe import Recipe

WARMUP = "warmup"
_WEIGHTS = frozenset(f"losses.{name}" for name in LossWeights.model_fields)


def last_step(until: str | None, recipe: Recipe, total_steps: int) -> int:
    """Return how many of its steps a run takes with `--until`, a number or "warmup".

    Raises UsageError for a number that the run does not have, and for a warm-up that it has not.
    """
    if until is None:
        return total_steps
    if until == WARMUP:
        if recipe.losses.warmup is None:
            raise UsageError("--until warmup: the recipe has no losses.warmup")
        return setup.warmup_steps(recipe, total_steps)
    if not _is_number(until) or not 1 <= int(until) <= total_steps:
        raise UsageError(f"--until {until}: allowed 1..{total_steps} (steps of the run), warmup")
    return int(until)


def branch_point(text: str, recipe: Recipe, run_settings: dict[str, Any], total_steps: int) -> Path:
    """Return the folder of the checkpoint that RUN or RUN@STEP names; RUN alone: its newest.

    Raises UsageError where there is none, and unless this run would have made the same one: all
    settings equal, but for the weights of losses that begin later.
    """
    name, at, number = text.rpartition("@")
    names_step = bool(at) and _is_number(number)
    run = Path(name if names_step else text)
    steps = checkpoint.saved_steps(run)
    if not steps:
        raise UsageError(f"--start-from {text}: {run} holds no checkpoint of a run")
    step = int(number) if names_step else steps[-1]
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise UsageError(f"--start-from {text}: no checkpoint of that step; there are {there}")
    folder = checkpoint.step_folder(run, step)
    saved, shared = checkpoint.settings_of(folder), setup.warmup_steps(recipe, total_steps)
    if different := checkpoint.difference(saved, run_settings, _WEIGHTS if step <= shared else ()):
        raise UsageError(
            f"--start-from {text}: {different}; only the weights of losses that begin after the "
            f"step may differ, those behind the warm-up of {shared} steps"
        )
    return folder


def load(folder: Path) -> checkpoint.Checkpoint:
    """Return the checkpoint of another run.  What that run remembers as its best stays there."""
    found = checkpoint.load(folder)
    found.memory.pop("best", None)
    return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
