# SPDX-License-Identifier: Apache-2.0
"""Resumable training state: one folder per saved step, complete or invisible.

A folder is written under a hidden name and renamed when every file in it is on disk, and renamed
back before it is deleted, so a run killed at any moment leaves the previous checkpoint intact and
no half of one in sight. No pickle: tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from treespark.data.jsonl import check_folder
from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from torch import Tensor

_STEP_FOLDER = re.compile(r"step-(\d{8})")
_HIDDEN, _LOCK = ".checkpoint-", ".lock"
_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Where a run stands: the next step to take, all tensors, and what the loop remembers."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    memory: dict[str, Any]
    folder: Path


@contextlib.contextmanager
def claim(root: Path) -> Iterator[None]:
    """Hold the folder of a run, made if need be, for this process alone.

    Raises UsageError where it cannot be written to, and where another process trains in it: each
    would delete what the other is about to rename.
    """
    check_folder(root, f"output.dir {root}")
    root.mkdir(parents=True, exist_ok=True)
    with (root / _LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"output.dir {root}: another process is training there") from None
        yield


def save(
    root: Path,
    step: int,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    *,
    settings: dict[str, Any],
    memory: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Write the state after `step` steps, drop all but the newest `keep`; return its folder.

    One process writes to `root` at a time. What a killed one left half-written is removed. Raises
    UsageError, with all older ones in place, where it cannot be written, as on a full disk.
    """
    partial, final = root / f"{_HIDDEN}{step:08d}", step_folder(root, step)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_hidden(root)
        partial.mkdir()
        save_file(weights, str(partial / _MODEL))
        save_file(optimizer, str(partial / _OPTIMIZER))
        state = {
            "format": _FORMAT,
            "step": step,
            "settings": settings,
            "memory": memory,
            "torch_rng": torch.get_rng_state().numpy().tobytes().hex(),
            "sha256": {name: _digest(partial / name) for name in (_MODEL, _OPTIMIZER)},
        }
        (partial / _STATE).write_text(json.dumps({**state, "checksum": _checksum(state)}))
        for path in (*sorted(partial.iterdir()), partial):
            _sync(path)
        if final.exists():
            _remove(final)
        os.rename(partial, final)
        _sync(root)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"checkpoint {final}: cannot be written: {reason}; older ones are untouched, make room "
            "and go on from them"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for old in saved_steps(root)[:-keep]:
        _remove(step_folder(root, old))
    return final


def _remove(folder: Path) -> None:
    """Delete a checkpoint so that no part of it is ever visible."""
    hidden = folder.with_name(f"{_HIDDEN}old-{folder.name}")
    os.rename(folder, hidden)
    shutil.rmtree(hidden)


def _remove_hidden(root: Path) -> None:
    for path in root.glob(f"{_HIDDEN}*"):
        if path.is_dir():
            shutil.rmtree(path)


def step_folder(root: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps of the run in `root`."""
    return root / f"step-{step:08d}"


def saved_steps(root: Path) -> list[int]:
    """Steps that can be resumed from, ascending."""
    if not root.is_dir():
        return []
    found = (m for path in root.iterdir() if (m := _STEP_FOLDER.fullmatch(path.name)))
    return sorted(int(m.group(1)) for m in found)


def load_latest(root: Path, *, settings: dict[str, Any]) -> Checkpoint | None:
    """Return the newest checkpoint as `load` does; None when there is none.

    Raises UsageError when a file is damaged or when `settings` differs from the saved ones, naming
    the field: continuing under other settings would silently be another run.
    """
    steps = saved_steps(root)
    if not steps:
        return None
    folder = step_folder(root, steps[-1])
    if different := difference(settings_of(folder), settings):
        raise UsageError(
            f"checkpoint {folder}: {different}; use another output.dir, or delete {root} to start "
            "over"
        )
    return load(folder)


def load(folder: Path) -> Checkpoint:
    """Return a checkpoint and set torch's generator to its state; UsageError if it is damaged."""
    state = _read_state(folder)
    for name in (_MODEL, _OPTIMIZER):
        if _digest(folder / name) != state["sha256"][name]:
            raise _damaged(folder / name, "checksum differs")
    weights, optimizer = (load_file(str(folder / name)) for name in (_MODEL, _OPTIMIZER))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch_rng"]), dtype=torch.uint8))
    return Checkpoint(state["step"], weights, optimizer, state["memory"], folder)


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings under which a checkpoint was made; UsageError if they are damaged."""
    return dict(_read_state(folder)["settings"])


def difference(
    saved: dict[str, Any], current: dict[str, Any], ignoring: Collection[str] = ()
) -> str | None:
    """Return "KEY was SAVED, now CURRENT" of the first key, of those not ignored, that differs."""
    current = json.loads(json.dumps(current))  # tuples and paths as they come back from disk
    for key in sorted((set(saved) | set(current)) - set(ignoring)):
        if saved.get(key) != current.get(key):
            return f"{key} was {saved.get(key)!r}, now {current.get(key)!r}"
    return None


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / _STATE
    try:
        state = json.loads(path.read_bytes())
        found, checksum = state["format"], state.pop("checksum", None)
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(path, "not a checkpoint's state") from None
    if found != _FORMAT:
        raise UsageError(
            f"checkpoint {path}: format {found}, this version of treespark reads {_FORMAT}; go on "
            "with the version that wrote it, or use another output.dir"
        )
    if checksum != _checksum(state):
        raise _damaged(path, "checksum differs")
    if folder != step_folder(folder.parent, state["step"]):
        raise _damaged(path, f"it is that of step {state['step']}")
    return dict(state)


def _damaged(path: Path, reason: str) -> UsageError:
    return UsageError(f"checkpoint {path}: {reason}; delete {path.parent} to use an older one")


def _checksum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
