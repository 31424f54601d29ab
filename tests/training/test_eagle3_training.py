# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 by the same loop: its loss by the formula, learning, resuming, refusals."""

import pytest
import torch
from safetensors.torch import load_file

from tests.training.test_loop import stop_after
from tests.training.tiny_run import eagle3, random_rows, recipe, tiny_world, write
from treespark.bench.training_report import write_training_report
from treespark.data.batches import collate, load_rows
from treespark.drafter.auto import load_drafter
from treespark.drafter.eagle3 import Eagle3Drafter
from treespark.errors import UsageError
from treespark.serving.llm import LLM, SamplingParams
from treespark.training import loop, setup
from treespark.training.losses import combine
from treespark.training.metrics import read_metrics
from treespark.training.objective import MicroBatch, micro_batch_terms, plan_micro_batch

DECAY = 0.8


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path / "rows.jsonl", random_rows(7))


def micro_batch(run, num_rows=3):
    """Drafter and one micro-batch of ragged rows, with every anchor that is valid."""
    target = setup.load_target(run)
    found, _ = load_rows(
        run.data.continuations, max_tokens=64, block_size=4, vocab_size=target.vocab_size
    )
    batch = collate(list(enumerate(found[:num_rows])), num_anchors=64, num_tree_anchors=0, seed=0)
    drafter = setup.new_drafter(run, target, found)
    micro = MicroBatch(batch, *target.sequence_outputs(batch.input_ids, batch.lengths.tolist()))
    return drafter, micro


def test_the_loss_is_the_decayed_cross_entropy_with_the_target_over_all_tokens(tmp_path, rows):
    """Every index and step by the formula of algorithms 2.7, one row at a time."""
    run = eagle3(tmp_path / "run", rows)
    drafter, micro = micro_batch(run)
    weights = setup.loss_weights(run, 0, 1)
    found = micro_batch_terms(drafter, micro, setup.objective(run), weights)
    total = torch.zeros(())
    for s, length in enumerate(micro.batch.lengths.tolist()):
        mask, hidden = micro.batch.loss_mask[s], micro.last_hidden[s]
        for index in range(length):
            # The token at index + 1 is the anchor, also when it is served.
            if index + 1 >= length or not mask[index + 1]:
                continue
            anchor = torch.tensor([[index + 1]])
            block = drafter.training_blocks(
                micro.batch.input_ids[s : s + 1], micro.features[s : s + 1], anchor, anchor > 0
            )[0, 0]
            for step in range(drafter.config.block_size):
                if index + 2 + step >= length:
                    break
                target = (hidden[index + 1 + step] @ drafter.lm_head.weight.T).softmax(-1)
                log_q = drafter.base_logits(block[step]).log_softmax(-1)
                total = total - DECAY**step * (target * log_q).sum()
    assert found.terms.keys() == {"soft_ce"}
    expected = total / micro.batch.lengths.sum()
    torch.testing.assert_close(found.terms["soft_ce"].value, expected, rtol=1e-4, atol=0)
    plan = plan_micro_batch(drafter, micro, setup.objective(run), weights)
    assert plan.denominators["soft_ce"] == micro.batch.lengths.sum()
    loss, _ = combine(found.terms, weights, denominators=plan.denominators)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)


def test_soft_targets_join_the_other_losses_of_a_block_drafter(tmp_path, rows):
    lines = {}
    for name, weight in (("off", 0.0), ("on", 0.5)):
        changes = {"train": {"max_steps": 1}, "losses": {"soft_ce": weight}}
        loop.train(recipe(tmp_path / name, rows, **changes))
        (lines[name],) = read_metrics(tmp_path / name / "metrics.jsonl")
    on, off = lines["on"], lines["off"]
    for key in ("ce", "l1", "confidence", "survival", "coverage", "overlap"):
        assert on[key] == pytest.approx(off[key], rel=1e-6)
    assert "soft_ce" not in off
    assert on["loss"] == pytest.approx(off["loss"] + 0.5 * on["soft_ce"], rel=1e-5)


def test_training_learns_and_exports_a_drafter_that_decodes(tmp_path, rows):
    train = {"max_steps": 60, "global_batch": 4, "eval_every": 60}
    run = eagle3(tmp_path / "run", rows, train=train, optim={"lr": 1e-2}, data={"holdout_rows": 1})
    folder = loop.train(run)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = [line["soft_ce"] for line in lines if "soft_ce" in line]
    overlaps = [line["overlap"][0] for line in lines if "overlap" in line]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert sum(overlaps[-5:]) > 2 * sum(overlaps[:5])
    assert list(lines[-1]) == ["step", "acceptance/chain"]
    target = tiny_world().target
    drafter = load_drafter(folder, target.embed_weight, target.head_weight, target.fingerprint)
    assert isinstance(drafter, Eagle3Drafter)
    assert drafter.config.step_loss_decay == pytest.approx(DECAY)
    outputs = LLM(target, drafter).generate([[7, 8, 9]], SamplingParams(20, ignore_eos=True))
    assert outputs[0].token_ids == tiny_world().reference([7, 8, 9], 20)
    page = write_training_report(tmp_path / "run", tmp_path / "report.html")
    assert "soft_ce" in page.read_text()


def test_an_interrupted_run_equals_an_uninterrupted_one(tmp_path, monkeypatch, rows):
    loop.train(eagle3(tmp_path / "whole", rows))
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(SystemExit):
            loop.train(eagle3(tmp_path / "parts", rows))
    loop.train(eagle3(tmp_path / "parts", rows))
    whole, parts = (
        [{**line, "step_s": 0} for line in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "parts")
    )
    assert [line["step"] for line in whole] == list(range(12))
    assert whole == parts
    weights, others = (
        load_file(tmp_path / name / "step-00000012" / "model.safetensors")
        for name in ("whole", "parts")
    )
    assert all(torch.equal(weights[name], others[name]) for name in weights | others)


def test_micro_batches_do_not_change_the_step(tmp_path, rows):
    lines = {}
    for size in (1, 2):
        train = {"max_steps": 1, "micro_batch": size}
        loop.train(eagle3(tmp_path / str(size), rows, train=train))
        (lines[size],) = read_metrics(tmp_path / str(size) / "metrics.jsonl")
    for key in ("loss", "soft_ce", "grad_norm"):
        assert lines[1][key] == pytest.approx(lines[2][key], rel=1e-5)


@pytest.mark.parametrize("name", ["survival", "coverage"])
def test_tree_losses_are_refused_by_name(tmp_path, rows, name):
    run = eagle3(tmp_path / "run", rows, losses={name: 0.1})
    with pytest.raises(UsageError, match=r"drafter\.architecture eagle3: drafts chains only"):
        loop.train(run)
    assert not (tmp_path / "run").exists()


def test_soft_targets_alone_are_a_loss_of_their_own(tmp_path, rows):
    nothing = eagle3(tmp_path / "run", rows, losses={"soft_ce": 0, "confidence": 1.0})
    with pytest.raises(UsageError, match="losses: no positive weight of a loss"):
        loop.train(nothing)
