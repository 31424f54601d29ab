# SPDX-License-Identifier: Apache-2.0
"""DFlash needs no code of its own: a block drafter without heads and cross-entropy alone."""

import pytest

from tests.training.tiny_run import random_rows, recipe, tiny_world, write
from treespark.drafter.auto import load_drafter
from treespark.serving.llm import LLM, SamplingParams
from treespark.training import loop
from treespark.training.metrics import read_metrics
from treespark.tree.policy import TreePolicy

CE_ALONE = {"ce": 1.0, "l1": 0.0, "confidence": 0.0, "survival": 0.0, "coverage": 0.0}


@pytest.mark.parametrize("ahead", [True, False], ids=["anchor_first", "in_place"])
def test_a_dflash_recipe_learns_and_exports_a_drafter_that_decodes(tmp_path, ahead):
    rows = write(tmp_path / "rows.jsonl", random_rows(7))
    run = recipe(
        tmp_path / "run",
        rows,
        drafter={
            "markov_rank": 0,
            "enable_confidence_head": False,
            "anchor_predicts_next": ahead,
        },
        losses=CE_ALONE,
        optim={"lr": 1e-2},
        train={"max_steps": 60, "global_batch": 4},
    )
    folder = loop.train(run)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    ce = [line["ce"] for line in lines]
    assert sum(ce[-5:]) < sum(ce[:5]) / 2
    # The target's distributions are not needed, so nothing that compares with them is there.
    assert not {"l1", "overlap", "survival", "confidence"} & lines[-1].keys()
    target = tiny_world().target
    drafter = load_drafter(folder, target.embed_weight, target.head_weight, target.fingerprint)
    assert drafter.config.anchor_predicts_next is ahead
    assert drafter.config.num_slots == (4 if ahead else 5)
    assert drafter.markov_head is drafter.confidence_head is None
    llm = LLM(target, drafter, TreePolicy(4, 1, 4))
    outputs = llm.generate([[7, 8, 9]], SamplingParams(20, ignore_eos=True))
    assert outputs[0].token_ids == tiny_world().reference([7, 8, 9], 20)
