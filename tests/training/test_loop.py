# SPDX-License-Identifier: Apache-2.0
"""Training continues bit for bit, survives bad gradients, honours SIGTERM, and learns."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.training.tiny_run import random_rows, recipe, tiny_world, write
from treespark.drafter.auto import load_drafter
from treespark.errors import UsageError
from treespark.training import checkpoint, loop, setup
from treespark.training.metrics import read_metrics


@pytest.fixture
def rows(tmp_path):
    # 7 rows at 2 a step: an epoch ends inside a step, twice in 12 steps
    return write(tmp_path / "rows.jsonl", random_rows(7))


def stop_after(monkeypatch, step, send=signal.SIGTERM):
    """Send the signal to this process while `step` runs."""
    plain = loop._step

    def stepping(run, number):
        if number == step:
            os.kill(os.getpid(), send)
        return plain(run, number)

    monkeypatch.setattr(loop, "_step", stepping)
    return plain


def result(folder):
    lines = read_metrics(folder / "metrics.jsonl")
    for line in lines:
        line.pop("step_s")
    return lines, load_file(folder / "step-00000012" / "model.safetensors")


@pytest.mark.parametrize("ends", [(5,), (5, 6)])
def test_interrupted_runs_equal_an_uninterrupted_one(tmp_path, monkeypatch, rows, ends):
    loop.train(recipe(tmp_path / "whole", rows))
    parts = recipe(tmp_path / "parts", rows)
    for end in ends:
        with monkeypatch.context() as patch:
            stop_after(patch, end - 1)
            with pytest.raises(SystemExit) as exit_info:
                loop.train(parts)
        assert exit_info.value.code == 143
    loop.train(parts)
    (lines, weights), (other_lines, other) = result(tmp_path / "whole"), result(tmp_path / "parts")
    assert [line["step"] for line in lines] == list(range(12))
    assert lines == other_lines
    assert weights.keys() == other.keys()
    assert all(torch.equal(weights[name], other[name]) for name in weights)


def test_resume_refuses_changed_settings_and_never_refuses_a_run(tmp_path, rows):
    loop.train(recipe(tmp_path / "run", rows, train={"max_steps": 2}))
    with pytest.raises(UsageError, match=r"optim\.lr was 0\.001, now 0\.002"):
        loop.train(recipe(tmp_path / "run", rows, train={"max_steps": 2}, optim={"lr": 2e-3}))
    with pytest.raises(UsageError, match="--resume never"):
        loop.train(recipe(tmp_path / "run", rows, train={"max_steps": 2}), resume="never")
    other = write(tmp_path / "other.jsonl", random_rows(7, seed=1))
    with pytest.raises(UsageError, match=r"data\.continuations"):
        loop.train(recipe(tmp_path / "run", other, train={"max_steps": 2}))


def test_a_checkpoint_from_before_a_key_existed_goes_on(tmp_path, rows):
    warm = {"fraction": 0.5, "ce": 1, "l1": 0, "confidence": 0, "survival": 0, "coverage": 0}
    target = tiny_world().target
    settings = setup.settings(recipe(tmp_path, rows, losses={"warmup": warm}), target, [])
    assert "drafter.head_dim" in settings
    newer = {"drafter.architecture", "drafter.anchor_predicts_next", "losses.soft_ce"}
    assert not newer & settings.keys()
    assert settings["losses.warmup"] == warm
    changes = {"drafter": {"anchor_predicts_next": False}, "losses": {"soft_ce": 0.5}}
    changed = setup.settings(recipe(tmp_path, rows, **changes), target, [])
    assert changed["drafter.anchor_predicts_next"] is False
    assert changed["losses.soft_ce"] == 0.5


def test_a_folder_that_another_process_trains_in_is_refused(tmp_path, rows):
    with (
        checkpoint.claim(tmp_path / "run"),
        pytest.raises(UsageError, match=r"output\.dir .*run: another process is training there"),
    ):
        loop.train(recipe(tmp_path / "run", rows))
    loop.train(recipe(tmp_path / "run", rows, train={"max_steps": 1}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run/drafter/notes.txt", "mine", "holds no drafter"),
        ("run/metrics.jsonl", "junk\n", r"metrics\.jsonl:1"),
        ("run/metrics.jsonl", '{"my": "data"}\n', r"metrics\.jsonl:1: not the metrics"),
        ("run", "a file", r"output\.dir .*run: cannot be written"),
    ],
)
def test_a_place_that_holds_something_else_is_refused_before_the_first_step(
    tmp_path, monkeypatch, rows, name, content, message
):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    monkeypatch.setattr(loop, "_step", lambda *_: pytest.fail("a step was taken"))
    with pytest.raises(UsageError, match=message):
        loop.train(recipe(tmp_path / "run", rows))
    assert path.read_text() == content


def poison(monkeypatch, steps):
    plain, combine, current = loop._step, loop.combine, []

    def stepping(run, number):
        current[:] = [number]
        return plain(run, number)

    def poisoned(*args, **options):
        loss, values = combine(*args, **options)
        return (loss * float("nan") if current[0] in steps else loss), values

    monkeypatch.setattr(loop, "_step", stepping)
    monkeypatch.setattr(loop, "combine", poisoned)


def test_a_step_without_finite_gradient_is_skipped_and_counted(tmp_path, monkeypatch, rows):
    poison(monkeypatch, {1, 2, 4})
    folder = loop.train(recipe(tmp_path / "run", rows, train={"max_steps": 6}))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["skipped"] for line in lines] == [False, True, True, False, True, False]
    assert all(t.isfinite().all() for t in load_file(folder / "model.safetensors").values())


def test_three_bad_steps_in_a_row_abort(tmp_path, monkeypatch, rows):
    poison(monkeypatch, {1, 2, 3})
    with pytest.raises(RuntimeError, match="3 non-finite steps in a row, the last was 3"):
        loop.train(recipe(tmp_path / "run", rows))
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 4


def test_learning_rate_and_loss_mix_follow_the_schedule(tmp_path, rows):
    warm = {"fraction": 0.5, "ce": 1, "l1": 0, "confidence": 0, "survival": 0, "coverage": 0}
    run = recipe(tmp_path, rows, losses={"warmup": warm}, optim={"lr": 0.5, "warmup_ratio": 0.2})
    rates = [setup.learning_rate(run, step, 20) for step in range(20)]
    assert max(rates) == 0.5
    assert rates[:4] == [0.125, 0.25, 0.375, 0.5]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert [setup.loss_weights(run, step, 20)["l1"] for step in (0, 9, 10, 19)] == [0, 0, 0.9, 0.9]


def test_training_overfits_and_exports_a_loadable_drafter(tmp_path, rows):
    train = {"max_steps": 60, "global_batch": 4}
    run = recipe(tmp_path / "run", rows, train=train, optim={"lr": 1e-2}, losses={"ce": 1.0})
    folder = loop.train(run)
    ce = [line["ce"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert sum(ce[-5:]) < sum(ce[:5]) / 2
    target = tiny_world().target
    drafter = load_drafter(folder, target.embed_weight, target.head_weight, target.fingerprint)
    assert drafter.config.mask_token_id == run.drafter.mask_token_id
