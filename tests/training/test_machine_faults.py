# SPDX-License-Identifier: Apache-2.0
"""A kill at any write and a full disk cost no step: the run goes on and gives the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.kill_points import assert_same, outcome
from tests.training.test_loop import stop_after
from tests.training.tiny_run import random_rows, recipe, write
from treespark.recipe import dump_recipe
from treespark.training import checkpoint, loop

# Runs the command line with a limit on the size of any file, as a full disk.
LIMITED = """
import resource, sys
from treespark.cli import main
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
main()
"""


def run_python(*args):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(
        [sys.executable, *args],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )


def kill_and_resume(folder, every):
    done = run_python("-m", "tests.training.kill_points", str(folder), str(every))
    assert done.returncode == 0, done.stderr[-3000:]
    # The last step of a run writes metrics, a decoded drafter, a checkpoint and the final drafter.
    assert int(done.stdout.splitlines()[-1]) > 60


def test_a_run_killed_at_some_writes_goes_on_bit_for_bit(tmp_path):
    kill_and_resume(tmp_path, every=17)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_killed_at_any_write_goes_on_bit_for_bit(tmp_path):
    kill_and_resume(tmp_path, every=1)


@pytest.mark.parametrize("full_at", ["model.safetensors", "optimizer.safetensors"])
def test_a_full_disk_is_one_line_and_leaves_the_old_checkpoint(tmp_path, monkeypatch, full_at):
    rows = write(tmp_path / "rows.jsonl", random_rows(7))
    train = {"max_steps": 4, "save_every": 2}
    loop.train(recipe(tmp_path / "whole", rows, train=train))
    run = recipe(tmp_path / "run", rows, train=train)
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(SystemExit):
            loop.train(run)
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "run" / "step-00000002").iterdir()}
    limit = sizes["model.safetensors"] + (-1 if full_at == "model.safetensors" else 1)
    assert limit < sizes["optimizer.safetensors"]
    (tmp_path / "recipe.yaml").write_text(dump_recipe(run))
    done = run_python("-c", LIMITED, str(limit), "train", str(tmp_path / "recipe.yaml"))
    assert done.returncode == 2, done.stderr[-3000:]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"checkpoint {tmp_path}/run/step-00000004: cannot be written: " in errors[0]
    assert "File too large" in errors[0]
    assert "Traceback" not in done.stderr
    assert checkpoint.saved_steps(tmp_path / "run") == [2]
    assert list((tmp_path / "run").glob(".checkpoint*")) == []
    loop.train(run)
    assert_same(outcome(tmp_path / "run"), outcome(tmp_path / "whole"), full_at)
