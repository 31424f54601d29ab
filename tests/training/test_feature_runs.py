# SPDX-License-Identifier: Apache-2.0
"""A store is filled ahead, in parts and by several processes, and verified by computing again."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.data.features_world import files, fill, flip, tapped
from tests.training.pair import run_pair
from tests.training.tiny_run import random_rows, recipe, write
from treespark import cli
from treespark.data.batches import load_rows
from treespark.data.features import OnlineFeatures, StoredFeatures
from treespark.errors import UsageError
from treespark.recipe import dump_recipe
from treespark.training import loop
from treespark.training.feature_runs import run_build, run_verify
from treespark.training.metrics import read_metrics


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path / "rows.jsonl", random_rows(7))


def stored(tmp_path, rows, **data):
    return recipe(
        tmp_path / "run", rows, data={"features": "store", "store": tmp_path / "store", **data}
    )


def verify(capsys, source, **options):
    """Result and report of a verification."""
    is_good = run_verify(source, as_json=True, **options)
    return is_good, json.loads(capsys.readouterr().out)


def test_training_after_a_build_computes_nothing(tmp_path, monkeypatch, rows):
    run = stored(tmp_path, rows)
    assert "7 rows, 0.1 MB" in run_build(run)
    monkeypatch.setattr(OnlineFeatures, "exact", lambda *_: pytest.fail("computed"))
    loop.train(run)
    assert "7 rows" in run_build(run)


def test_an_interrupted_build_goes_on(tmp_path, monkeypatch, rows):
    run, plain, calls = stored(tmp_path, rows), StoredFeatures.fill, []

    def filling(self, row):
        calls.append(row.id)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, row)

    monkeypatch.setattr(StoredFeatures, "fill", filling)
    with pytest.raises(SystemExit) as stopped:
        run_build(run)
    assert stopped.value.code == 143
    assert len(calls) == 3
    assert "7 rows" in run_build(run)
    assert sorted(calls) == sorted(set(calls))


def test_a_recipe_without_a_store_is_refused(tmp_path, rows):
    with pytest.raises(UsageError, match=r"data.features online: stores nothing"):
        run_build(recipe(tmp_path / "run", rows))


@pytest.mark.parametrize("taps_dtype", ["plain", "int8"])
def test_a_good_store_verifies_with_distributions_equal(tmp_path, capsys, rows, taps_dtype):
    run = stored(tmp_path, rows, taps_dtype=taps_dtype)
    run_build(run)
    is_good, found = verify(capsys, tmp_path / "store", target=run.target.model, num_rows=4)
    assert is_good
    assert (found["rows"], found["shards"], found["bad"]) == (7, 1, {})
    assert [(row["top1"], row["tv"], row["taps_error"]) for row in found["checked"]] == [
        (1.0, 0.0, 0.0)
    ] * 4
    # A seed draws the same rows, another one others, and never one twice.
    drawn = [
        [row["id"] for row in verify(capsys, tmp_path / "store", target=run.target.model,
                                     num_rows=4, seed=seed)[1]["checked"]]
        for seed in (0, 0, 1)
    ]  # fmt: skip
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 4
    # Without a target the files alone are read; more rows than there are is all of them.
    assert verify(capsys, tmp_path / "store") == (True, {**found, "checked": []})
    many = verify(capsys, tmp_path / "store", target=run.target.model, num_rows=100)[1]
    assert len(many["checked"]) == 7


@pytest.mark.parametrize("wrong", ["last_hidden", "taps"])
def test_rows_that_are_not_the_targets_are_bad_however_whole_their_files(
    tmp_path, capsys, monkeypatch, rows, wrong
):
    run, plain = stored(tmp_path, rows), OnlineFeatures.exact

    def computed_wrongly(self, row):
        features, hidden = plain(self, row)
        if wrong == "last_hidden":
            # As before the final norm: larger, so that distributions get sharper.
            return features, hidden * 1.2
        return torch.cat(features.chunk(2, -1)[::-1], -1), hidden

    with monkeypatch.context() as patch:
        patch.setattr(OnlineFeatures, "exact", computed_wrongly)
        run_build(run)
    is_good, found = verify(capsys, tmp_path / "store", target=run.target.model, num_rows=2)
    assert not is_good
    assert list(found["bad"]) == [files(tmp_path / "store")[0].name]
    value = "tv" if wrong == "last_hidden" else "taps_error"
    assert all(row[value] > 0.02 for row in found["checked"])


def test_the_verbs_build_and_name_bad_shards_with_exit_code_1(tmp_path, capsys, monkeypatch, rows):
    run = stored(tmp_path, rows)
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(run, tmp_path))

    def command(*args):
        monkeypatch.setattr("sys.argv", ["treespark", "features", *map(str, args)])
        monkeypatch.setattr("logging.basicConfig", lambda **options: None)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out = capsys.readouterr()
        return stopped.value.code, out.out + out.err

    assert command("build", path)[0] == 0
    code, text = command("verify", path, "--rows", 2)
    assert code == 0
    assert "0 of 1 shards bad" in text
    (shard,) = files(tmp_path / "store")
    flip(shard, 500)
    code, text = command("verify", path)
    assert code == 1
    assert f"bad: {shard.name}: sha256 differs" in text
    assert command("verify", tmp_path / "store")[0] == 1
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-50])
    code, text = command("build", path)
    assert code == 2
    assert f"{shard} is damaged ({len(whole) - 50} bytes, should be {len(whole)} bytes)" in text
    shard.unlink()
    assert "it is missing" in command("build", path)[1]
    assert command("build", path, "--on-bad-shard", "rebuild")[0] == 0
    assert [found.name for found in files(tmp_path / "store")] != [shard.name]
    assert command("verify", path)[0] == 0
    code, text = command("verify", path, "--set", "drafter.target_layer_ids=[1, 2]")
    assert code == 2
    assert "target_layer_ids was [0, 2], now [1, 2]" in text


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("store", {"overrides": ["train.seed=1"]}, "--set train.seed=1: only with a recipe"),
        ("empty", {}, r"manifest.json: cannot be read: No such file"),
        ("gone", {"target": Path("any")}, "gone: no such recipe, and no such folder of a feature"),
        ("gone.yaml", {}, "gone.yaml: no such recipe"),
    ],
)
def test_what_cannot_be_verified_is_refused(tmp_path, rows, source, options, message):
    fill(tmp_path / "store", tapped(), load_rows(
        [rows], max_tokens=64, block_size=4, vocab_size=272)[0])  # fmt: skip
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=message):
        run_verify(tmp_path / source, **options)


@pytest.mark.multi
@pytest.mark.timeout(600)
def test_two_ranks_share_a_store_and_lose_nothing_to_it(tmp_path, rows):
    train = {"max_steps": 8, "global_batch": 4, "zero_stage": 0}
    store = {"features": "store", "store": tmp_path / "store"}
    cases = [
        ("online", {"train": train}),
        ("fills", {"train": train, "data": store}),
        ("reads", {"train": train, "data": store}),
    ]
    run_pair(tmp_path, rows, cases)

    def losses(name):
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        return [{k: v for k, v in line.items() if k != "step_s"} for line in lines]

    assert losses("fills") == losses("online")
    assert losses("reads") == losses("online")
    writers = {path.name.split("-")[1] for path in files(tmp_path / "store")}
    assert len(writers) == 2
    is_good = run_verify(tmp_path / "store", target=tapped().path, num_rows=7)
    assert is_good
