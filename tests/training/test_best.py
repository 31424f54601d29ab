# SPDX-License-Identifier: Apache-2.0
"""The best drafter by real decoding: what is measured and kept, and that training ignores it."""

import json
import shutil

import pytest
import torch

from tests.training.test_loop import stop_after
from tests.training.tiny_run import random_rows, recipe, tiny_world, write
from treespark.bench.metrics import acceptance_length
from treespark.data.batches import load_rows, split_holdout
from treespark.errors import UsageError
from treespark.serving.llm import LLM, SamplingParams
from treespark.training import best, checkpoint, loop, setup
from treespark.training.metrics import read_metrics

STEPS = 6
TRAIN = {"max_steps": STEPS, "save_every": 4, "decode_every": 2, "decode_tokens": 12}
# Large enough steps for acceptance to change within six of them.
CHANGES = {"data": {"holdout_rows": 3}, "optim": {"lr": 3e-2}, "losses": {"ce": 1.0}}


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path / "rows.jsonl", random_rows(8))


def run(folder, rows, **train):
    return recipe(folder, rows, train={**TRAIN, **train}, **CHANGES)


def record(folder):
    return json.loads((folder / "best" / "treespark.json").read_text())


def decoded(folder):
    """{steps done: acceptance} of a run's metrics."""
    lines = read_metrics(folder / "metrics.jsonl")
    found = [line for line in lines if "decode/acceptance" in line]
    return {line["step"] + 1: line["decode/acceptance"] for line in found}


def scripted(monkeypatch, *values):
    """Let the next decodings reach these acceptance lengths."""
    left = iter(values)
    monkeypatch.setattr(best, "decoded_acceptance", lambda *_: next(left))


def steps_and_weights(folder):
    """All metrics but times and decodings, and the last checkpoint without what it remembers."""
    lines = read_metrics(folder / "metrics.jsonl")
    kept = [{**line, "step_s": 0} for line in lines if "loss" in line]
    step = folder / f"step-{STEPS:08d}"
    return kept, json.loads((step / "state.json").read_text())["torch_rng"], step


def test_decoding_changes_no_bit_of_training(tmp_path, rows):
    loop.train(run(tmp_path / "on", rows))
    loop.train(run(tmp_path / "off", rows, decode_every=0))
    on, off = steps_and_weights(tmp_path / "on"), steps_and_weights(tmp_path / "off")
    assert on[:2] == off[:2]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (on[2] / name).read_bytes() == (off[2] / name).read_bytes()
    assert not (tmp_path / "off" / "best").exists()


def test_the_kept_drafter_decodes_as_well_as_its_record_says(tmp_path, rows):
    current = run(tmp_path / "run", rows, decode_prompts=2)
    loop.train(current)
    values = decoded(tmp_path / "run")
    assert list(values) == [2, 4, 6]
    kept = record(tmp_path / "run")
    assert kept["acceptance"] == max(values.values()) == values[kept["step"]]
    assert kept["num_prompts"] == 2
    target = tiny_world().target
    found, _ = load_rows([rows], max_tokens=64, block_size=4, vocab_size=target.vocab_size)
    held = split_holdout(found, 3, current.train.seed)[1][:2]
    llm = LLM(target, tmp_path / "run" / "best", setup.policy(current))
    prompts = [row.token_ids[: row.prompt_len].tolist() for row in held]
    answers = llm.generate(prompts, SamplingParams(12))
    assert acceptance_length([answer.metrics for answer in answers]) == kept["acceptance"]
    plain = LLM(target).generate(prompts, SamplingParams(12))
    assert [a.token_ids for a in answers] == [a.token_ids for a in plain]


@pytest.mark.parametrize("end", [1, 3, 5])
def test_an_interrupted_run_keeps_the_same_best(tmp_path, monkeypatch, rows, end):
    loop.train(run(tmp_path / "whole", rows))
    with monkeypatch.context() as patch:
        stop_after(patch, end - 1)
        with pytest.raises(SystemExit):
            loop.train(run(tmp_path / "parts", rows))
    loop.train(run(tmp_path / "parts", rows))
    assert decoded(tmp_path / "parts") == decoded(tmp_path / "whole")
    for name in ("treespark.json", "config.json", "model.safetensors"):
        files = [tmp_path / part / "best" / name for part in ("parts", "whole")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_only_a_better_step_replaces_the_best_also_after_a_resume(tmp_path, monkeypatch, rows):
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        scripted(patch, 1.5, 1.5)
        with pytest.raises(SystemExit):
            loop.train(run(tmp_path / "run", rows))
    first = record(tmp_path / "run")
    assert (first["step"], first["acceptance"]) == (2, 1.5)
    weights = (tmp_path / "run" / "best" / "model.safetensors").read_bytes()
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    scripted(monkeypatch, 1.25)
    loop.train(run(tmp_path / "run", rows))
    assert record(tmp_path / "run") == first
    assert (tmp_path / "run" / "best" / "model.safetensors").read_bytes() == weights
    state = json.loads((tmp_path / "run" / "step-00000006" / "state.json").read_text())
    assert state["memory"]["best"] == first
    scripted(monkeypatch, 1.75)
    loop.train(run(tmp_path / "again", rows))
    assert record(tmp_path / "again")["step"] == 6


def test_a_kill_between_the_two_renames_loses_no_best(tmp_path, rows):
    loop.train(run(tmp_path / "run", rows))
    kept = record(tmp_path / "run")
    aside = tmp_path / "run" / ".best.old.abc"
    aside.mkdir()
    (tmp_path / "run" / "best").rename(aside / "old")
    (tmp_path / "run" / "..best.new.xyz").mkdir()
    loop.train(run(tmp_path / "run", rows))
    assert record(tmp_path / "run") == kept
    assert [p.name for p in (tmp_path / "run").glob(".*best*")] == []


def test_the_best_of_another_measure_or_run_does_not_count(tmp_path, monkeypatch, rows, caplog):
    scripted(monkeypatch, 3.0, 3.0, 3.0, 1.0)
    loop.train(run(tmp_path / "run", rows))
    for step in (4, 6):
        shutil.rmtree(tmp_path / "run" / f"step-{step:08d}")
    other = run(tmp_path / "run", rows, max_steps=2, decode_tokens=20)
    loop.train(other)
    assert record(tmp_path / "run")["acceptance"] == 1.0
    shutil.rmtree(tmp_path / "run" / "best")
    loop.train(other)
    assert "not what the checkpoint remembers, acceptance 1.000 after step 2" in caplog.text


def test_decoding_touches_no_generator(tmp_path, rows):
    current = run(tmp_path / "run", rows)
    loop.train(current)
    target, state = tiny_world().target, torch.get_rng_state()
    best.decoded_acceptance(target, tmp_path / "run" / "best", [[1, 2]], setup.policy(current), 4)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"holdout_rows": 0}}, "decode_every 2: needs data.holdout_rows above 0"),
        ({"train": {"decode_prompts": 4}}, r"decode_prompts 4: allowed 1\.\.3 \(data.holdout_rows"),
        ({"train": {"decode_tokens": 1}}, "decode_tokens"),
    ],
)
def test_decoding_that_cannot_be_is_refused_in_the_recipe(tmp_path, rows, changes, message):
    sections = {**CHANGES, **changes, "train": {**TRAIN, **changes.get("train", {})}}
    with pytest.raises(ValueError, match=message):
        recipe(tmp_path / "run", rows, **sections)


def test_decoding_that_cannot_be_is_refused_before_the_first_step(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(loop, "_step", lambda *_: pytest.fail("a step was taken"))
    sections = {**CHANGES, "train": TRAIN}
    losses = {"losses": {"survival": 0.0, "coverage": 0.0}}
    rnn = recipe(
        tmp_path / "a", rows, drafter={"markov_head_type": "rnn"}, **{**sections, **losses}
    )
    with pytest.raises(UsageError, match=r"decode_every 2: .*set policy\.branching=1, now 2"):
        loop.train(rnn)
    (tmp_path / "b" / "best").mkdir(parents=True)
    (tmp_path / "b" / "best" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="best: it exists and holds no drafter"):
        loop.train(run(tmp_path / "b", rows))
    bare = random_rows(8)
    for row in bare:
        row["output_token_ids"] = row.pop("prompt_token_ids") + row["output_token_ids"]
        row["prompt_token_ids"] = []
    with pytest.raises(UsageError, match=r"held-out row r\d has no prompt to decode"):
        loop.train(run(tmp_path / "c", write(tmp_path / "bare.jsonl", bare)))
    assert checkpoint.saved_steps(tmp_path / "c") == []
