# SPDX-License-Identifier: Apache-2.0
"""The record beside a trained drafter says whom it was made for and how far its drafts reached."""

import json

from tests.training.tiny_run import MASK, random_rows, recipe, tiny_world, write
from treespark.drafter.inspect import describe, training_record
from treespark.drafter.loading import TargetWeights
from treespark.target.template import template_fingerprint, tokenizer_fingerprint
from treespark.training import loop
from treespark.training.metrics import read_metrics


def test_training_writes_the_record_that_inspect_and_doctor_read(tmp_path):
    rows = write(tmp_path / "rows.jsonl", random_rows(8))
    train = {"max_steps": 4, "eval_every": 2}
    folder = loop.train(recipe(tmp_path / "run", rows, train=train, data={"holdout_rows": 2}))
    target = tiny_world().target
    record = training_record(folder)
    assert record["target"] == {
        "model": target.path.name,
        "fingerprint": target.fingerprint,
        "dtype": "float32",
        "template": template_fingerprint(target.tokenizer),
        "tokenizer": tokenizer_fingerprint(target.tokenizer),
    }
    assert record["trained"] == {
        "block_size": 4,
        "anchor_predicts_next": True,
        "mask_token_id": MASK,
        "target_layer_ids": [0, 2],
    }
    assert record["steps"] == 4
    last = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" not in line]
    assert record["held_out"]["chain"] == last[-1]["acceptance/chain"]
    assert record["held_out"].keys() == {"chain", "tree6", "tree8", "tree16"}
    weights = TargetWeights(
        target.embed_weight, target.head_weight, target.fingerprint, target.num_layers
    )
    assert describe(folder, weights)["record"] == record


def test_a_finished_run_that_is_run_again_keeps_its_record(tmp_path):
    rows = write(tmp_path / "rows.jsonl", random_rows(8))
    run = recipe(tmp_path / "run", rows, train={"max_steps": 2, "eval_every": 2})
    path = loop.train(run) / "treespark.json"
    first = path.read_bytes()
    assert json.loads(first)["held_out"] == {}
    loop.train(run)
    assert path.read_bytes() == first
