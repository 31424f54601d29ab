# SPDX-License-Identifier: Apache-2.0
"""Train several recipes that are to be compared, each shared warm-up once; interrupt it and go on.

    python tools/train_variants.py RECIPE... --out FOLDER [--set KEY=VALUE...] [--at-a-time 2]

Recipes that differ in nothing but the weights of their losses behind `losses.warmup` are the same
run until it ends. It is trained once, in FOLDER/warmup-NAME of the first of them, and each of them
begins with its last checkpoint (`treespark train --start-from`), in FOLDER/NAME. Features are
stored ahead, where recipes store them. Every run is a process of one thread, and its output is in
FOLDER/NAME.log. SIGTERM or Ctrl-C lets them write a checkpoint, from which the same command goes
on.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from treespark.data.interrupt import StopRequest
from treespark.data.jsonl import check_folder
from treespark.errors import UsageError
from treespark.recipe import LossWeights, Recipe, load_recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

_POLL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Job:
    """One command of treespark.  after: names of the jobs that have to be done before."""

    name: str
    args: tuple[str, ...]
    after: tuple[str, ...] = ()


def plan_jobs(recipes: Sequence[Path], out: Path, overrides: Sequence[str]) -> list[Job]:
    """Return what is to be run, warm-ups before variants.

    Raises UsageError for a recipe that does not load and for two of one name.
    """
    loaded: dict[str, tuple[Path, Recipe]] = {}
    for path in recipes:
        if path.stem in loaded:
            other = loaded[path.stem][0]
            raise UsageError(f"RECIPE {path}: {other} has the same name, which names the run")
        loaded[path.stem] = (path, load_recipe(path, overrides))
    groups: dict[str, list[str]] = {}
    for name, (_, recipe) in loaded.items():
        groups.setdefault(_shared_part(name, recipe), []).append(name)

    def train(name: str, folder: str, *more: str) -> tuple[str, ...]:
        return ("train", *_command(loaded[name][0], overrides, out / folder), *more)

    stores: dict[Path | None, Job] = {}
    for path, recipe in loaded.values():
        store = recipe.data.store
        if recipe.data.features != "online" and store not in stores:
            args = ("features", "build", *_command(path, overrides, out))
            stores[store] = Job(f"features-{len(stores) + 1}", args)
    warmups, variants = [], []
    for names in groups.values():
        first = names[0]
        stored = stores.get(loaded[first][1].data.store)
        start, after = (), () if stored is None else (stored.name,)
        if len(names) > 1:
            shared = f"warmup-{first}"
            warmups.append(Job(shared, train(first, shared, "--until", "warmup"), after))
            start, after = ("--start-from", str(out / shared)), (shared,)
        variants += [Job(name, train(name, name, *start), after) for name in names]
    return [*stores.values(), *warmups, *variants]


def _shared_part(name: str, recipe: Recipe) -> str:
    """Text that is equal for recipes with the same run until the end of their warm-up."""
    if recipe.losses.warmup is None:
        return name
    later = set(LossWeights.model_fields)
    return recipe.model_dump_json(exclude={"output": True, "losses": later})


def _command(recipe: Path, overrides: Sequence[str], folder: Path) -> list[str]:
    changes = [*overrides, f"output.dir={folder}"]
    return [str(recipe), *(word for change in changes for word in ("--set", change))]


def run_jobs(jobs: Sequence[Job], out: Path, at_a_time: int) -> int:
    """Run the jobs, `at_a_time` of them at once, as processes of one thread; return an exit code.

    A job that fails ends what waits for it, not the others. A signal is passed on to what runs, and
    128 + the signal returned when that has ended.
    """
    out.mkdir(parents=True, exist_ok=True)
    waiting, done, failed = list(jobs), set[str](), set[str]()
    running: dict[str, subprocess.Popen[bytes]] = {}
    with StopRequest() as stop:
        while not stop:
            ready = [job for job in waiting if done.issuperset(job.after)]
            for job in ready[: at_a_time - len(running)]:
                waiting.remove(job)
                running[job.name] = _start(job, out)
            if not running:
                break
            time.sleep(_POLL_SECONDS)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                code = running.pop(name).returncode
                (failed if code else done).add(name)
                print(f"{name}: {_outcome(code, _log(out, name))}", flush=True)
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    for job in [] if stop else waiting:
        print(f"{job.name}: not run, it needs {', '.join(job.after)}", flush=True)
    if stop:
        print("stopped; the same command goes on", flush=True)
        return stop.exit_code
    return int(bool(failed))


def _start(job: Job, out: Path) -> subprocess.Popen[bytes]:
    print(f"{job.name}: treespark {' '.join(job.args)}", flush=True)
    with _log(out, job.name).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "treespark", *job.args],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C reaches this process alone, which passes one signal on: a second would kill.
            start_new_session=True,
        )


def _log(out: Path, name: str) -> Path:
    return out / f"{name}.log"


def _outcome(code: int, log: Path) -> str:
    if not code:
        return "done"
    lines = log.read_text("utf-8", errors="replace").splitlines()
    return f"failed with exit code {code}, {log}: {lines[-1] if lines else 'empty'}"


def main() -> int:
    """Parse the command line and run; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("recipes", type=Path, nargs="+", metavar="RECIPE")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as of `treespark train`"
    )
    parser.add_argument("--at-a-time", type=int, default=2, help="processes; default: 2")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    options = parser.parse_args()
    if options.at_a_time < 1:
        parser.error(f"--at-a-time {options.at_a_time}: need at least 1")
    try:
        if options.out.exists() and not options.out.is_dir():
            raise UsageError(f"--out {options.out}: not a folder")
        check_folder(options.out, f"--out {options.out}")
        jobs = plan_jobs(options.recipes, options.out, options.set)
    except UsageError as error:
        parser.error(str(error))
    if options.dry_run:
        for job in jobs:
            after = f"   # after {', '.join(job.after)}" if job.after else ""
            print(f"treespark {' '.join(job.args)}{after}")
        return 0
    return run_jobs(jobs, options.out, options.at_a_time)


if __name__ == "__main__":
    sys.exit(main())
