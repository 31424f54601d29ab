# SPDX-License-Identifier: Apache-2.0
"""A kill at any write and a full disk cost no step: the run goes on and gives the same bits."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.kill_points import assert_same, outcome
from tests.training.test_loop import stop_after
from tests.training.tiny_run import random_rows, recipe, write
from treespark.recipe import dump_recipe
from treespark.training import checkpoint, loop
from treespark.training.metrics import read_metrics

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


def children(pid):
    """Process ids of a process's children, which may have ended."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(part) for part in text.split()]


def is_running(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.multi
def test_a_rank_that_dies_ends_all_of_them_and_the_run_goes_on(tmp_path):
    rows = write(tmp_path / "rows.jsonl", random_rows(7))
    train = {"max_steps": 80, "save_every": 5, "zero_stage": 1}
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe(tmp_path / "run", rows, train=train)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "treespark", "train", str(tmp_path / "recipe.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TREESPARK_DEVICE": "cpu"}
    options = {"cwd": Path(__file__).parents[2], "env": environment, "text": True}
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, **options)
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 12:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            assert run.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.02)
        workers = children(run.pid)
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        assert run.wait(timeout=120) != 0
    assert not any(is_running(worker) for worker in workers)
    assert checkpoint.saved_steps(tmp_path / "run")[-1] < 80
    done = subprocess.run(command, capture_output=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line["step"] for line in read_metrics(metrics)] == list(range(80))


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
