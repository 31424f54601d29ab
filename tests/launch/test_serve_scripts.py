# SPDX-License-Identifier: Apache-2.0
"""The launch scripts of serving: the commands they run, and their refusals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def launch(script, *args, **environment):
    return subprocess.run(
        ["bash", ROOT / "launch" / script, *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **environment},
    )


@pytest.mark.parametrize("concurrency", ["1", "6", "12"])
def test_a_single_server_has_as_many_slots_as_asked(concurrency):
    done = launch(
        "serve_single.sh", "runs/target", "--concurrency", concurrency, "--no-drafter", "--dry-run"
    )
    *exports, command = done.stdout.splitlines()
    assert command.split() == [
        sys.executable, "-m", "treespark", "serve", "runs/target", "--no-drafter",
        "--max-num-seqs", concurrency,
    ]  # fmt: skip
    assert "export TORCH_DEVICE_BACKEND_AUTOLOAD=0" in exports


def test_three_workers_of_twelve_slots_behind_haproxy():
    done = launch(
        "serve_workers.sh",
        "runs/target",
        "--drafter",
        "runs/drafter",
        "--device",
        "cpu",
        "--dry-run",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("treespark serve runs/target --drafter runs/drafter") == 3
    assert done.stdout.count("maxconn 12") == 3


@pytest.mark.parametrize(
    ("script", "args", "message"),
    [
        ("serve_single.sh", ["t", "--concurrency", "2"], "--concurrency 2: allowed: 1, 6, 12"),
        ("serve_single.sh", ["t", "--concurrency"], "--concurrency: needs a value"),
        ("serve_single.sh", [], "TARGET: missing"),
        ("serve_workers.sh", [], "TARGET: missing"),
        ("serve_workers.sh", ["t", "--router", "x", "--dry-run"], "--router x: allowed"),
    ],
)
def test_mistakes_are_named(script, args, message):
    done = launch(script, *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ["serve_single.sh", "serve_workers.sh"])
def test_help_names_the_options(script):
    done = launch(script, "--help")
    assert done.returncode == 0
    assert "--dry-run" in done.stdout


def test_the_unit_file_runs_a_script_that_exists():
    text = (ROOT / "launch" / "treespark-workers.service").read_text()
    assert "launch/serve_workers.sh" in text
    for option in ("Restart=on-failure", "RestartPreventExitStatus=2", "KillMode=mixed"):
        assert option in text
