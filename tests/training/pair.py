# SPDX-License-Identifier: Apache-2.0
"""One pair of training processes that runs many cases in one life; starting it is what is slow."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, multiprocessing

from tests.training.kill_points import copies_killed_at_each_write
from tests.training.tiny_run import recipe, tiny_world

if TYPE_CHECKING:
    from pathlib import Path

KILLED_AT = 3
Case = tuple[str, dict[str, dict[str, Any]]]
"""Name of the output folder, and what the recipe changes."""


def run_pair(root: Path, rows: Path, cases: list[Case]) -> None:
    """Train every case with two processes into root/name; raises if one of them fails.

    Where a name begins with "poisoned", the second process once has a loss that is not finite.
    Where it begins with "killed", the save after step KILLED_AT is first tried on copies of the
    folder, each by a process that dies at another write, and some of the copies are trained on.
    Where it begins with "masked", every other draw counts for nothing, which is all of one rank's.
    Where it begins with "partitioned", ZeRO 3 spreads small weights, too, as it does large ones.
    """
    target = tiny_world().target.path
    multiprocessing.spawn(_rank, (_free_port(), root, rows, target, cases), nprocs=2)


def _poisoned_once(combine: Any) -> Any:
    """A loss that is not finite the first time."""
    calls = iter([float("nan")])

    def poisoned(*args: Any, **options: Any) -> Any:
        loss, values = combine(*args, **options)
        return loss * next(calls, 1.0), values

    return poisoned


def masking_odd_draws(collate: Any) -> Any:
    """A collate that leaves no anchor and no label in draws of odd number."""

    def masked(draws: Any, **options: Any) -> Any:
        batch = collate(draws, **options)
        odd = torch.tensor([number % 2 == 1 for number, _ in draws])
        for mask in (batch.loss_mask, batch.keep, batch.tree_keep):
            mask[odd] = False
        return batch

    return masked


def _partition_all(initialize: Any) -> Any:
    """DeepSpeed's initialize with no weight too small to be spread."""

    def initializing(*, config: dict[str, Any], **options: Any) -> Any:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return initialize(config=config, **options)

    return initializing


def _train_killed(folder: Path, rows: Path, target: Path, changes: dict[str, Any]) -> None:
    """Train, and then go on from the copies that a killed save left, both ranks together."""
    from treespark.training import checkpoint, loop

    save = checkpoint.save

    def saving(root: Path, step: int, *args: Any, **options: Any) -> Path:
        if step == KILLED_AT:
            return copies_killed_at_each_write(save, root, step, *args, **options)
        return save(root, step, *args, **options)

    checkpoint.save = saving
    loop.train(recipe(folder, rows, target, **changes))
    checkpoint.save = save
    for copy in killed_copies(folder):
        loop.train(recipe(copy, rows, target, **changes))


def killed_copies(folder: Path) -> list[Path]:
    """The copies of a "killed" case that are trained on: each n-th as its name ends in -every-n."""
    every = int(folder.name.rpartition("-")[2])
    return sorted(folder.parent.glob(f"{folder.name}-???"))[::every]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _rank(rank: int, port: int, root: Path, rows: Path, target: Path, cases: list[Case]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    import deepspeed

    from treespark.training import loop

    distributed.init_process_group("gloo")
    for name, changes in cases:
        if name.startswith("killed"):
            _train_killed(root / name, rows, target, changes)
            continue
        plain = loop.combine, loop.collate, deepspeed.initialize
        if name.startswith("poisoned") and rank == 1:
            loop.combine = _poisoned_once(loop.combine)
        if name.startswith("masked"):
            loop.collate = masking_odd_draws(loop.collate)
        if name.startswith("partitioned"):
            deepspeed.initialize = _partition_all(deepspeed.initialize)
        loop.train(recipe(root / name, rows, target, **changes))
        loop.combine, loop.collate, deepspeed.initialize = plain
    distributed.destroy_process_group()
