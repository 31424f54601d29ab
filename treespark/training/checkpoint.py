# SPDX-License-Identifier: Apache-2.0
"""Resumable training state: one folder per saved step, complete or invisible.

A folder is written under a temporary name and renamed when every file in it is on disk, so a run
killed
at any moment leaves the previous checkpoint intact.  No pickle: tensors are safetensors, the rest
is JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from treespark.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

_STEP_FOLDER = re.compile(r"step-(\d{8})")
_FILES = ("model.safetensors", "optimizer.safetensors")


@dataclasses.dataclass
class Checkpoint:
    """Where a run stands: the next step to take and what the loop wants to remember."""

    step: int
    settings: dict[str, Any]
    memory: dict[str, Any]
    folder: Path


def save(
    root: Path,
    step: int,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    settings: dict[str, Any],
    memory: dict[str, Any],
    keep: int = 2,
) -> Path:
    """Write the state after `step` optimizer steps and drop all but the newest `keep`
    checkpoints.
    """
    final = root / f"step-{step:08d}"
    temporary = root / f".writing-{step:08d}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save_file(
            {n: p.detach().cpu().contiguous() for n, p in parameters.items()},
            str(temporary / _FILES[0]),
        )
        save_file(_optimizer_tensors(optimizer, parameters), str(temporary / _FILES[1]))
        state = {
            "format": 1,
            "step": step,
            "settings": settings,
            "memory": memory,
            "torch_rng": torch.get_rng_state().numpy().tobytes().hex(),
            "sha256": {name: _digest(temporary / name) for name in _FILES},
        }
        (temporary / "state.json").write_text(json.dumps(state))
        for file in temporary.iterdir():
            _sync(file)
        if (
            final.exists()
        ):  # the same step saved again after a resume: the new one is equal and complete
            shutil.rmtree(final)
        os.rename(temporary, final)
        _sync(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in saved_steps(root)[:-keep]:
        shutil.rmtree(root / f"step-{old:08d}")
    return final


def saved_steps(root: Path) -> list[int]:
    """Steps that can be resumed from, ascending."""
    if not root.is_dir():
        return []
    found = (m for path in root.iterdir() if (m := _STEP_FOLDER.fullmatch(path.name)))
    return sorted(int(m.group(1)) for m in found)


def load_latest(
    root: Path,
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    settings: dict[str, Any],
) -> Checkpoint | None:
    """Restore the newest checkpoint into parameters, optimizer and torch's generator; None when
    there is none.

    Raises UsageError when a file is damaged or when `settings` differs from the saved ones,
    naming the field: continuing under other settings would silently be another run.
    """
    steps = saved_steps(root)
    if not steps:
        return None
    folder = root / f"step-{steps[-1]:08d}"
    state = _read_state(folder)
    _refuse_difference(folder, state["settings"], settings)
    for name in _FILES:
        if _digest(folder / name) != state["sha256"][name]:
            raise UsageError(
                f"checkpoint {folder / name}: checksum differs; delete {folder} to use an older one"
            )
    saved = load_file(str(folder / _FILES[0]))
    if set(saved) != set(parameters):
        raise UsageError(
            f"checkpoint {folder}: other parameters {sorted(set(saved) ^ set(parameters))[:4]}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    _restore_optimizer(optimizer, parameters, load_file(str(folder / _FILES[1])))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch_rng"]), dtype=torch.uint8))
    return Checkpoint(state["step"], state["settings"], state["memory"], folder)


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "state.json").read_text())
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        raise UsageError(f"checkpoint {folder}: {error}; delete it to use an older one") from None


def _refuse_difference(folder: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    current = json.loads(json.dumps(current))  # tuples and paths as they come back from disk
    for key in sorted(set(saved) | set(current)):
        if saved.get(key) != current.get(key):
            raise UsageError(
                f"checkpoint {folder}: {key} was {saved.get(key)!r}, now {current.get(key)!r}; "
                "use another output.dir, or --resume never to start over"
            )


def _optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = torch.as_tensor(value).detach().cpu().contiguous().clone()
    return tensors


def _restore_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
    tensors: dict[str, Tensor],
) -> None:
    for full_name, value in tensors.items():
        key, name = full_name.split("/", 1)
        parameter = parameters[name]
        where = torch.device("cpu") if key == "step" else parameter.device
        optimizer.state[parameter][key] = value.to(where)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    except OSError as error:
        raise UsageError(f"checkpoint {path}: {error.strerror}") from None
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
