# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are complete or invisible, and a damaged one is refused by name."""

import json
import subprocess
import sys

import pytest
import torch

from treespark.errors import UsageError
from treespark.training import checkpoint

# Saves step 3 over 1 and 2 and kills itself at the n-th touch of the file system.
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.training.test_checkpoint import state
from treespark.training import checkpoint
root = Path(sys.argv[1])
def save(root, step):
    checkpoint.save(root, step, *state(), settings={"a": 1}, memory={"step": step})
def touch():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
def after(function):
    def wrapped(*args, **options):
        touch()
        result = function(*args, **options)
        touch()
        return result
    return wrapped
point, survived = 0, False
while not survived:
    point += 1
    folder = root / str(point)
    save(folder, 1), save(folder, 2)
    child = os.fork()
    if child == 0:
        left = point
        checkpoint.save_file = after(checkpoint.save_file)
        sys.addaudithook(lambda event, args: event.split(".")[0] in ("os", "open", "shutil")
                         and args and str(root) in str(args[0]) and touch())
        save(folder, 3)
        os._exit(0)
    survived = os.waitpid(child, 0)[1] == 0
    seen = checkpoint.saved_steps(folder)
    assert seen in ([1, 2], [1, 2, 3], [2, 3]), (point, seen)
    for step in seen:
        files = sorted(p.name for p in (folder / f"step-{step:08d}").iterdir())
        assert files == ["model.safetensors", "optimizer.safetensors", "state.json"], (point, files)
    found = checkpoint.load_latest(folder, settings={"a": 1})
    assert found.memory == {"step": seen[-1]}
    save(folder, 3)
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000002", "step-00000003"], point
print(point)
"""


def state():
    torch.manual_seed(0)
    weight = torch.randn(4, 3)
    return {"w": weight}, {"exp_avg/w": weight * 2, "step/w": torch.tensor(3.0)}


def test_a_kill_at_any_write_leaves_a_whole_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["first bit", "middle bit", "last bit", "half", "empty", "gone"])
def test_a_damaged_file_is_refused_by_name(tmp_path, name, how):
    checkpoint.save(tmp_path, 1, *state(), settings={}, memory={})
    path = tmp_path / "step-00000001" / name
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how in ("half", "empty"):
        path.write_bytes(content[: len(content) // 2 if how == "half" else 0])
    else:
        content[{"first": 0, "middle": len(content) // 2, "last": -1}[how.split()[0]]] ^= 1
        path.write_bytes(content)
    with pytest.raises(UsageError, match=f"step-00000001/{name}: .*; delete .*step-00000001 to"):
        checkpoint.load_latest(tmp_path, settings={})


@pytest.mark.parametrize(
    ("swapped", "named"),
    [
        (["model.safetensors"], "model.safetensors"),
        (["optimizer.safetensors"], "optimizer.safetensors"),
        (["state.json"], "state.json"),
        (["model.safetensors", "optimizer.safetensors", "state.json"], "state.json"),
    ],
)
def test_files_swapped_with_another_step_are_refused_by_name(tmp_path, swapped, named):
    for step in (1, 2):
        weights, optimizer = state()
        tensors = ({k: t + step for k, t in part.items()} for part in (weights, optimizer))
        checkpoint.save(tmp_path, step, *tensors, settings={}, memory={})
    for name in swapped:
        one, two = (tmp_path / f"step-0000000{step}" / name for step in (1, 2))
        content = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(content)
    with pytest.raises(UsageError, match=f"step-00000002/{named}"):
        checkpoint.load_latest(tmp_path, settings={})


def test_model_and_optimizer_swapped_with_each_other_are_refused(tmp_path):
    checkpoint.save(tmp_path, 1, *state(), settings={}, memory={})
    one, two = (tmp_path / "step-00000001" / f"{n}.safetensors" for n in ("model", "optimizer"))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    with pytest.raises(UsageError, match=r"model\.safetensors: checksum differs"):
        checkpoint.load_latest(tmp_path, settings={})


def test_a_checkpoint_of_another_format_is_refused_by_its_number_and_what_to_do(tmp_path):
    path = checkpoint.save(tmp_path, 1, *state(), settings={}, memory={}) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 7}))
    with pytest.raises(UsageError, match=r"state.json: format 7, .* reads 1; .*another output.dir"):
        checkpoint.load_latest(tmp_path, settings={})


def test_a_failed_write_keeps_the_old_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, *state(), settings={}, memory={})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UsageError, match="step-00000002: cannot be written: No space left on dev"):
        checkpoint.save(tmp_path, 2, *state(), settings={}, memory={})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
