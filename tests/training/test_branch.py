# SPDX-License-Identifier: Apache-2.0
"""A run that begins with another one's checkpoint ends as if it had trained that part itself."""

import shutil

import pytest

from tests.training.kill_points import assert_same, outcome
from tests.training.test_loop import stop_after
from tests.training.tiny_run import random_rows, recipe, write
from treespark.drafter.loading import RECORD
from treespark.errors import UsageError
from treespark.training import checkpoint, loop

STEPS, SHARED = 6, 3
WARMUP = {"fraction": 0.5, "ce": 1, "l1": 0, "confidence": 0, "survival": 0, "coverage": 0}
CONTROL = {"survival": 0.0, "coverage": 0.0}


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path / "rows.jsonl", random_rows(7))


def variant(folder, rows, losses=None, train=None, **changes):
    """A run of which the first three steps are a warm-up."""
    return recipe(
        folder,
        rows,
        losses={"warmup": WARMUP, **(losses or {})},
        train={"max_steps": STEPS, **(train or {})},
        **changes,
    )


@pytest.fixture
def shared(tmp_path, rows):
    """The folder of a run that stopped where its warm-up ends."""
    stopped = loop.train(variant(tmp_path / "warmup", rows), until="warmup")
    assert stopped == tmp_path / "warmup" / f"step-{SHARED:08d}"
    assert checkpoint.saved_steps(tmp_path / "warmup") == [SHARED]
    assert not (tmp_path / "warmup" / "drafter").exists()
    # What describes a drafter is not put beside the files that a checkpoint's manifest lists.
    assert not (stopped / RECORD).exists()
    return tmp_path / "warmup"


def test_variants_that_share_a_warm_up_end_as_whole_runs(tmp_path, rows, shared):
    for name, losses in (("both", {}), ("control", CONTROL)):
        loop.train(variant(tmp_path / "whole" / name, rows, losses))
        part = variant(tmp_path / "part" / name, rows, losses)
        loop.train(part, start_from=f"{shared}@{SHARED}")
        found, expected = (outcome(tmp_path / kind / name, STEPS) for kind in ("part", "whole"))
        assert len(expected["lines"]) == STEPS
        assert_same(found, expected, name)
    both, control = (outcome(tmp_path / "part" / name, STEPS) for name in ("both", "control"))
    assert both["lines"][:SHARED] == control["lines"][:SHARED]
    assert both["drafter/model.safetensors"] != control["drafter/model.safetensors"]
    # The other run is as it was, and may itself go on.
    loop.train(variant(shared, rows))
    found, expected = outcome(shared, STEPS), outcome(tmp_path / "whole" / "both", STEPS)
    assert found["lines"] == expected["lines"]
    assert found["drafter/model.safetensors"] == expected["drafter/model.safetensors"]


def test_an_interrupted_variant_goes_on_from_its_own_checkpoint(
    tmp_path, monkeypatch, rows, shared
):
    loop.train(variant(tmp_path / "whole", rows, CONTROL), start_from=str(shared))
    part = variant(tmp_path / "part", rows, CONTROL)
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(SystemExit):
            loop.train(part, start_from=str(shared))
    # The same command goes on, and no longer needs the other run.
    shutil.rmtree(shared)
    loop.train(part, start_from=str(shared))
    assert_same(outcome(tmp_path / "part", STEPS), outcome(tmp_path / "whole", STEPS), "part")


@pytest.mark.parametrize(
    ("where", "changes", "message"),
    [
        ("warmup@2", {}, r"@2: no checkpoint of that step; there are 3$"),
        ("warmup", {"optim": {"lr": 2e-3}}, r"optim\.lr was 0\.001, now 0\.002"),
        ("warmup", {"losses": {"gamma": 3.0}}, r"losses\.gamma was 4\.0, now 3\.0"),
        ("warmup", {"drafter": {"head_dim": 8}}, r"drafter\.head_dim was 16, now 8"),
        ("warmup", {"train": {"max_steps": 8}}, r"train\.max_steps was 6, now 8"),
        (
            "warmup",
            {"losses": {"warmup": {**WARMUP, "l1": 1.0}}},
            r"losses\.warmup was .*begin after the step may differ",
        ),
        ("later@4", {"losses": CONTROL}, r"losses\.coverage was 0\.1, now 0\.0; .* of 3 steps"),
        ("nowhere", {}, r"--start-from .*nowhere: .* holds no checkpoint of a run"),
    ],
)
def test_a_run_that_would_have_gone_another_way_is_refused(
    tmp_path, rows, shared, where, changes, message
):
    if where.startswith("later"):
        loop.train(variant(tmp_path / "later", rows), until="4")
    with pytest.raises(UsageError, match=message):
        loop.train(variant(tmp_path / "new", rows, **changes), start_from=f"{tmp_path / where}")
    assert not (tmp_path / "new").exists()


def test_equal_settings_may_begin_anywhere(tmp_path, rows, shared):
    loop.train(variant(shared, rows), until="4")
    loop.train(variant(tmp_path / "new", rows), start_from=f"{shared}@4")
    loop.train(variant(shared, rows))
    assert_same(outcome(tmp_path / "new", STEPS), outcome(shared, STEPS), "new")


@pytest.mark.parametrize("until", ["0", "7", "x", "-1", "1.5"])
def test_a_step_that_the_run_does_not_have_is_refused(tmp_path, rows, until):
    with pytest.raises(UsageError, match=rf"--until {until}: allowed 1\.\.6"):
        loop.train(variant(tmp_path / "new", rows), until=until)
    with pytest.raises(UsageError, match="--until warmup: the recipe has no losses"):
        loop.train(recipe(tmp_path / "new", rows), until="warmup")
    assert not (tmp_path / "new").exists()
