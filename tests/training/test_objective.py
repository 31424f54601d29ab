# SPDX-License-Identifier: Apache-2.0
"""The objective equals the golden losses; its denominators are those of the whole step."""

import pytest
import torch

from tests.drafter.helpers import load_case
from tests.training.tiny_run import random_rows, recipe, write
from treespark.data.batches import Batch
from treespark.drafter.modeling import TreeSparkDrafter
from treespark.errors import UsageError
from treespark.target.model import TargetModel
from treespark.training import loop
from treespark.training.metrics import read_metrics
from treespark.training.objective import MicroBatch, Objective, micro_batch_terms
from treespark.training.replay import CoverageSettings
from treespark.tree.policy import TreePolicy


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "dflash_block7"])
def test_base_losses_match_the_golden_ones(fixtures_dir, name):
    case = load_case(fixtures_dir / "dspark_parity" / name)
    ids, keep = case["input_ids"], case["block_keep_mask"].bool()
    lengths = torch.full((ids.shape[0],), ids.shape[1])
    anchors, mask = case["anchor_positions"], case["loss_mask"].bool()
    batch = Batch([], ids, lengths, mask, anchors, keep, torch.zeros_like(keep))
    weights = {"ce": 0.1, "l1": 0.9, "confidence": 1.0, "survival": 0.0, "coverage": 0.0}
    found = micro_batch_terms(
        case.drafter,
        MicroBatch(batch, case["features"], case["target_last_hidden"]),
        Objective(TreePolicy(), CoverageSettings()),
        weights,
    )
    for key, term in found.terms.items():
        expected = case.losses["conf" if key == "confidence" else key]
        assert float(term.value.detach()) == pytest.approx(expected, rel=1e-4)


def first_line(tmp_path, name, **changes):
    rows = write(tmp_path / "rows.jsonl", random_rows(7))
    loop.train(recipe(tmp_path / name, rows, **changes))
    return read_metrics(tmp_path / name / "metrics.jsonl")


def test_micro_batches_do_not_change_the_step(tmp_path):
    one = first_line(tmp_path, "one", train={"max_steps": 1, "micro_batch": 1})[0]
    two = first_line(tmp_path, "two", train={"max_steps": 1, "micro_batch": 2})[0]
    for key in ("loss", "ce", "l1", "confidence", "survival", "coverage", "grad_norm"):
        assert one[key] == pytest.approx(two[key], rel=1e-5)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_kept_logits_do_not_change_the_step(tmp_path, micro_batch):
    """Trees then take the logits of their blocks, also at depths that do not count."""
    train = {"max_steps": 2, "micro_batch": micro_batch}
    kept = first_line(tmp_path, "kept", train={**train, "keep_logits": True})
    again = first_line(tmp_path, "again", train={**train, "keep_logits": False})
    for one, two in zip(kept, again, strict=True):
        for key in ("loss", "ce", "l1", "confidence", "survival", "coverage", "grad_norm"):
            assert one[key] == pytest.approx(two[key], rel=1e-5), key
        assert one["overlap"] == pytest.approx(two["overlap"], abs=2e-5)
        assert one["reference_hit"] == two["reference_hit"]


def test_without_tree_weights_the_step_is_the_step_without_replay(tmp_path):
    off = {"survival": 0.0, "coverage": 0.0}
    a = first_line(tmp_path, "a", losses=off)
    b = first_line(tmp_path, "b", losses=off, data={"tree_anchors": 0})
    assert [{**x, "step_s": 0} for x in a] == [{**x, "step_s": 0} for x in b]


def test_replay_adds_no_target_call_and_no_backbone_pass(tmp_path, monkeypatch):
    calls = {"target": 0, "backbone": 0}
    for name, owner, method in (
        ("target", TargetModel, "sequence_outputs"),
        ("backbone", TreeSparkDrafter, "training_blocks"),
    ):
        plain = getattr(owner, method)

        def counted(*args, name=name, plain=plain):
            calls[name] += 1
            return plain(*args)

        monkeypatch.setattr(owner, method, counted)
    first_line(tmp_path, "one", train={"max_steps": 1, "micro_batch": 2})
    assert calls == {"target": 2, "backbone": 1}
    # Of several micro-batches each needs the others' denominators before its own losses.
    first_line(tmp_path, "two", train={"max_steps": 1, "micro_batch": 1})
    assert calls == {"target": 4, "backbone": 1 + 4}


@pytest.mark.parametrize("mask", [256, 272, 7])
def test_a_mask_token_in_use_is_refused(tmp_path, mask):
    with pytest.raises(UsageError, match=f"mask_token_id {mask}"):
        first_line(tmp_path, "run", drafter={"mask_token_id": mask})
