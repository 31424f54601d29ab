# SPDX-License-Identifier: Apache-2.0
"""The launch script of training: commands, environment, and refusals where there is no card."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "launch" / "train_910b.sh"
SET_BY_SCRIPT = (
    "TREESPARK_DEVICE", "DS_ACCELERATOR", "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT",
    "PYTORCH_NPU_ALLOC_CONF", "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME", "OMP_NUM_THREADS",
)  # fmt: skip


def launch(*args, **environment):
    clean = {k: v for k, v in os.environ.items() if k not in SET_BY_SCRIPT}
    return subprocess.run(
        ["bash", SCRIPT, *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**clean, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **environment},
    )


def dry_run(*args, **environment):
    done = launch("--dry-run", *args, **environment)
    assert done.returncode == 0, done.stderr
    *exports, command = done.stdout.splitlines()
    settings = dict(line.removeprefix("export ").split("=", 1) for line in exports)
    return settings, command.split()


def test_eight_cards_of_one_machine():
    settings, command = dry_run()
    assert command == [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "8", "--standalone",
        "-m", "treespark", "train", str(ROOT / "recipes" / "qwen3-8b-treespark.yaml"),
    ]  # fmt: skip
    assert settings["TREESPARK_DEVICE"] == settings["DS_ACCELERATOR"] == "npu"
    assert settings["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
    assert int(settings["HCCL_CONNECT_TIMEOUT"]) > 120
    assert int(settings["HCCL_EXEC_TIMEOUT"]) > 1800


def test_two_machines_of_eight_cards():
    place = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1"]
    _, command = dry_run(*place, "--set", "train.seed=1")
    text = " ".join(command)
    assert "--nproc_per_node 8 --nnodes 2 --node_rank 1" in text
    assert "--master_addr 10.0.0.1 --master_port 29500 -m treespark train" in text
    assert text.endswith("--set train.seed=1")


def test_what_the_user_has_set_stays_and_visible_cards_ascend():
    settings, _ = dry_run(ASCEND_RT_VISIBLE_DEVICES="10,2,1", HCCL_EXEC_TIMEOUT="9000")
    assert settings["ASCEND_RT_VISIBLE_DEVICES"].replace("\\", "") == "1,2,10"
    assert settings["HCCL_EXEC_TIMEOUT"] == "9000"


def test_a_cpu_run_has_no_npu_settings_and_shares_the_cores():
    settings, command = dry_run("--device", "cpu", "--nproc", "2")
    assert "HCCL_EXEC_TIMEOUT" not in settings
    assert settings["DS_ACCELERATOR"] == "cpu"
    assert int(settings["OMP_NUM_THREADS"]) == max(1, (os.cpu_count() or 1) // 2)
    assert command[4] == "2"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nproc", "x"], "--nproc 'x': need a number"),
        (["--nproc", "0"], "need at least 1"),
        (["--node-rank", "1"], "--node-rank 1: allowed 0..0"),
        (["--device", "gpu"], "--device gpu: allowed: npu, cuda, cpu"),
        (["nowhere.yaml"], "nowhere.yaml: no such recipe"),
        (["--nproc"], "--nproc: needs a value"),
        ([str(SCRIPT), str(SCRIPT)], "only one recipe"),
    ],
)
def test_mistakes_are_named(args, message):
    done = launch("--dry-run", *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_cann_it_says_so_and_runs_nothing():
    done = launch()
    assert done.returncode == 2
    assert "CANN is not set up" in done.stderr
    assert "--device cpu" in done.stderr


def test_without_a_card_it_says_why_and_runs_nothing():
    done = launch(ASCEND_HOME_PATH="/opt/cann")
    assert done.returncode == 2
    assert "no npu can be used here" in done.stderr
    assert "--device cpu" in done.stderr
