# SPDX-License-Identifier: Apache-2.0
"""Runs that die at one touch of the file system after the other, and then go on.

    python -m tests.training.kill_points FOLDER EVERY

trains one run without interruption, then one per point: killed there, resumed, and compared with
the first. EVERY n takes each n-th point. Prints the number of the last point. Every run is forked
from a process that has imported everything, which takes a tenth of starting one.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.training.tiny_run import random_rows, recipe, tiny_world, write
from treespark.drafter import export
from treespark.training import checkpoint, loop, metrics
from treespark.training.metrics import read_metrics

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, FIRST = 4, 3
CHANGES: dict[str, dict[str, Any]] = {
    "train": {"max_steps": STEPS, "save_every": 1, "decode_every": 2, "decode_tokens": 8},
    "data": {"holdout_rows": 2},
}
_WRITES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate"}


def in_child(function: Callable[[], object]) -> int:
    """Run the function in a fork of this process; return how it ended (0, or minus a signal)."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(point: int, root: Path) -> None:
    """Kill this process at its n-th touch of a file below `root` from now on."""
    left = point

    def touch() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            touch()
            result = function(*args, **options)
            touch()
            return result

        return wrapped

    def heard(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            writes = isinstance(args[1], str) and bool(set(args[1]) & set("wax+"))
        else:
            writes = event in _WRITES
        # Deletions inside a folder name their file alone.
        if writes and (str(root) in str(args[0]) or "/" not in str(args[0])):
            touch()

    for module, name in (
        (checkpoint, "save_file"),
        (checkpoint, "_sync"),
        (export, "save_file"),
        (metrics.MetricsLog, "add"),
        (metrics.MetricsLog, "sync"),
    ):
        setattr(module, name, around(getattr(module, name)))
    sys.addaudithook(heard)


def outcome(folder: Path, last: int = STEPS) -> dict[str, Any]:
    """All metrics but times, floats as hex, and the bytes of last checkpoint and drafters."""

    def exact(value: Any) -> Any:
        if isinstance(value, list):
            return [exact(item) for item in value]
        return value.hex() if isinstance(value, float) else value

    lines = read_metrics(folder / "metrics.jsonl")
    found: dict[str, Any] = {
        "lines": [{k: exact(v) for k, v in line.items() if k != "step_s"} for line in lines]
    }
    for part in (f"step-{last:08d}", "best", "drafter"):
        if (folder / part).exists():
            for path in sorted((folder / part).iterdir()):
                found[f"{part}/{path.name}"] = path.read_bytes()
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], where: object) -> None:
    """Compare two outcomes; say which part differs."""
    assert found.keys() == expected.keys(), (where, found.keys() ^ expected.keys())
    for name, value in expected.items():
        assert found[name] == value, (where, name)


def copies_killed_at_each_write(
    save: Callable[..., Path], root: Path, *args: Any, **options: Any
) -> Path:
    """Save into one copy of the run per write point, by a process that dies there; then save."""
    point, status = 0, -signal.SIGKILL
    while status:
        assert status == -signal.SIGKILL, status
        point += 1
        copy = root.with_name(f"{root.name}-{point:03d}")
        shutil.copytree(root, copy)

        def dying(point: int = point, copy: Path = copy) -> None:
            die_at(point, copy)
            save(copy, *args, **options)

        status = in_child(dying)
    return save(root, *args, **options)


def _stop_before(step: int) -> None:
    """Make the loop of this process end there, with everything before on the disk."""
    plain = loop._step

    def stepping(run: Any, number: int) -> Any:
        if number == step:
            os._exit(0)
        return plain(run, number)

    loop._step = stepping


def main(root: Path, every: int) -> None:
    """Kill, resume and compare at every n-th point."""
    torch.set_num_threads(1)
    rows, model = write(root / "rows.jsonl", random_rows(7)), tiny_world().target.path

    def train(folder: Path) -> None:
        loop.train(recipe(folder, rows, model, **CHANGES))

    def begin() -> None:
        _stop_before(FIRST)
        train(root / "base")

    assert in_child(lambda: train(root / "whole")) == 0
    assert in_child(begin) == 0
    assert checkpoint.saved_steps(root / "base") == [FIRST - 1, FIRST]
    expected, names = outcome(root / "whole"), {p.name for p in (root / "whole").iterdir()}
    point, status = 1, -signal.SIGKILL
    while status:
        folder = root / f"{point:05d}"
        shutil.copytree(root / "base", folder)

        def dying(point: int = point, folder: Path = folder) -> None:
            die_at(point, folder)
            train(folder)

        status = in_child(dying)
        assert status in (0, -signal.SIGKILL), (point, status)
        assert in_child(lambda folder=folder: train(folder)) == 0, point
        assert_same(outcome(folder), expected, point)
        # What the last save had still to delete waits for the next one.
        rest = {p.name for p in folder.iterdir()} - names
        assert all(n.startswith(".checkpoint-") or n == f"step-{FIRST - 1:08d}" for n in rest), rest
        shutil.rmtree(folder)
        point += every
    print(point - every)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
