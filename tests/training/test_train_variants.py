# SPDX-License-Identifier: Apache-2.0
"""tools/train_variants.py: shared parts are trained once, and interrupted studies go on."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.kill_points import assert_same, outcome
from tests.training.tiny_run import random_rows, recipe, write
from tools.train_variants import main, plan_jobs
from treespark.errors import UsageError
from treespark.recipe import dump_recipe

ROOT = Path(__file__).parent.parent.parent
RECIPES = ROOT / "recipes"
STUDY = (
    "smollm2-135m-treespark",
    "smollm2-135m-dspark-tree",
    "ablations/smollm2-135m-no-survival",
    "ablations/smollm2-135m-no-coverage",
    "smollm2-135m-dspark",
    "ablations/smollm2-135m-head-dim-64",
)
WARMUP = {"fraction": 0.5, "ce": 1, "l1": 0, "confidence": 0, "survival": 0, "coverage": 0}
STEPS = 6


def test_the_six_variants_of_a_study_share_two_warm_ups_and_one_store():
    jobs = plan_jobs([RECIPES / f"{name}.yaml" for name in STUDY], Path("out"), ["optim.lr=0.002"])
    assert [(job.name, job.after) for job in jobs] == [
        ("features-1", ()),
        ("warmup-smollm2-135m-treespark", ("features-1",)),
        ("warmup-smollm2-135m-dspark", ("features-1",)),
        ("smollm2-135m-treespark", ("warmup-smollm2-135m-treespark",)),
        ("smollm2-135m-dspark-tree", ("warmup-smollm2-135m-treespark",)),
        ("smollm2-135m-no-survival", ("warmup-smollm2-135m-treespark",)),
        ("smollm2-135m-no-coverage", ("warmup-smollm2-135m-treespark",)),
        ("smollm2-135m-dspark", ("warmup-smollm2-135m-dspark",)),
        ("smollm2-135m-head-dim-64", ("warmup-smollm2-135m-dspark",)),
    ]
    path = RECIPES / "ablations" / "smollm2-135m-no-survival.yaml"
    assert shlex.join(jobs[5].args) == (
        f"train {path} --set optim.lr=0.002 --set output.dir=out/smollm2-135m-no-survival "
        "--start-from out/warmup-smollm2-135m-treespark"
    )
    assert jobs[1].args[-2:] == ("--until", "warmup")


def test_recipes_without_a_common_warm_up_are_whole_runs():
    baselines = [RECIPES / f"smollm2-135m-{name}.yaml" for name in ("dflash", "eagle3", "dspark")]
    jobs = plan_jobs(baselines, Path("out"), ["data.features=online"])
    assert [job.after for job in jobs] == [(), (), ()]
    with pytest.raises(
        UsageError, match=r"^RECIPE .*dflash\.yaml: .*dflash\.yaml has the same name"
    ):
        plan_jobs([baselines[0], RECIPES / "." / "smollm2-135m-dflash.yaml"], Path("out"), [])


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("file", "file: not a folder"),
        ("file/runs", "file/runs: cannot be written: Not a directory"),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch, capsys, out, message):
    (tmp_path / "file").touch()
    recipe = RECIPES / "smollm2-135m-dflash.yaml"
    monkeypatch.setattr(sys, "argv", ["tool", str(recipe), "--out", str(tmp_path / out)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"error: --out {tmp_path}/{message}")


def train_on_one_thread(path):
    """As the study does: sums over another number of threads round differently."""
    command = [sys.executable, "-m", "treespark", "train", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.multi
def test_an_interrupted_study_goes_on_and_its_runs_are_whole_runs(tmp_path):
    rows = write(tmp_path / "rows.jsonl", random_rows(7))
    variants = {"both": {}, "control": {"survival": 0.0, "coverage": 0.0}}
    for name, losses in variants.items():
        losses["warmup"] = WARMUP
        run = recipe(tmp_path / "whole" / name, rows, losses=losses, train={"max_steps": STEPS})
        (tmp_path / f"{name}.yaml").write_text(dump_recipe(run, tmp_path))
        train_on_one_thread(tmp_path / f"{name}.yaml")
    study = [sys.executable, "tools/train_variants.py", "--out", str(tmp_path / "study")]
    study += [str(tmp_path / f"{name}.yaml") for name in variants]
    started = subprocess.Popen(study, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline().startswith("warmup-both: treespark train ")
    os.kill(started.pid, signal.SIGTERM)
    assert "stopped; the same command goes on" in started.communicate()[0]
    assert started.returncode == 143
    whole = subprocess.run(study, cwd=ROOT, capture_output=True, text=True, check=False)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    for name in variants:
        expected = outcome(tmp_path / "whole" / name, STEPS)
        assert_same(outcome(tmp_path / "study" / name, STEPS), expected, name)


@pytest.mark.multi
def test_a_failed_job_is_named_with_its_reason_and_what_waits_for_it_is_not_run(tmp_path):
    recipes = [RECIPES / f"smollm2-135m-{name}.yaml" for name in ("treespark", "dspark-tree")]
    command = [
        sys.executable,
        "tools/train_variants.py",
        *map(str, recipes),
        "--out",
        str(tmp_path),
    ]
    gone = ["--set", "data.features=online", "--set", f"target.model={tmp_path / 'gone'}"]
    run = subprocess.run([*command, *gone], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "warmup-smollm2-135m-treespark: failed with exit code 2" in run.stdout
    assert "gone" in run.stdout
    assert "smollm2-135m-dspark-tree: not run, it needs warmup-smollm2-135m-treespark" in run.stdout
