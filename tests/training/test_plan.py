# SPDX-License-Identifier: Apache-2.0
"""The plan's arithmetic: published sizes, independent FLOP counts, and measured peaks of memory."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, Qwen3Config

from tests.training.live_bytes import LiveBytes
from tests.training.tiny_run import eagle3, random_rows, recipe, write
from treespark.data.batches import collate, load_rows
from treespark.data.feature_identity import Identity
from treespark.errors import UsageError
from treespark.recipe import load_recipe
from treespark.training import cost, setup
from treespark.training import plan as planning
from treespark.training.cost import Shapes, Workload
from treespark.training.losses import combine
from treespark.training.objective import MicroBatch, micro_batch_terms, plan_micro_batch
from treespark.training.plan import GIB, Machine

RECIPES = Path(__file__).parent.parent.parent / "recipes"
CARDS = Machine(8, 64 * GIB, 313e12, 0.35, 4 * 10**12)


def qwen3(size):
    hidden, inner, tied = {"4b": (2560, 9728, True), "8b": (4096, 12288, False)}[size]
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
        max_position_embeddings=40960,
    )


def shapes_of(size, *overrides):
    run = load_recipe(RECIPES / f"qwen3-{size}-treespark.yaml", overrides)
    target = qwen3(size)
    return run, Shapes.of(target, setup.drafter_config(run, target, 151669, None))


@pytest.mark.parametrize(
    ("size", "head_dim", "millions"),
    [("4b", 128, 615.2), ("4b", 192, 680.8), ("8b", 128, 1126.4), ("8b", 192, 1231.3)],
)
def test_parameters_are_those_of_the_published_drafters(size, head_dim, millions):
    _, shapes = shapes_of(size, f"drafter.head_dim={head_dim}")
    assert shapes.trainable / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize(
    ("size", "sparse", "dense", "losses", "target"),
    [("4b", 13.8, 19.5, 12.3, 11.5), ("8b", 25.1, 30.8, 19.0, 21.5)],
)
def test_flops_agree_with_a_count_made_elsewhere(size, sparse, dense, losses, target):
    """It is of 1,500 tokens, with a mask by blocks and without; replay takes the losses' logits."""
    run, shapes = shapes_of(size)
    parts = cost.flops_per_row(shapes, run, 1500)
    # Blocks are scored against their own slots and the whole context, and once more for gradients.
    assert sparse < parts["trunk"] / 1e12 < dense
    assert parts["losses"] / 1e12 == pytest.approx(losses, rel=0.05)
    assert parts["target"] / 1e12 == pytest.approx(target, rel=0.2)
    run, shapes = shapes_of(size, "train.keep_logits=true")
    kept = cost.flops_per_row(shapes, run, 1500)
    assert kept["replay"] / 1e12 == pytest.approx(1.0, rel=0.02)


def test_more_memory_means_larger_micro_batches_and_little_memory_higher_stages():
    run, shapes = shapes_of("8b")
    found = [
        planning.choose(shapes, run, dataclasses.replace(CARDS, memory_bytes=size * GIB))
        for size in (200, 64, 40)
    ]
    micro = [batch for _, batch, _ in found]
    assert micro == sorted(micro, reverse=True)
    assert micro[0] > micro[-1]
    for size, (stage, batch, chosen) in zip((200, 64, 40), found, strict=True):
        parts = cost.memory(shapes, run, 4096, stage=stage, devices=8, micro_batch=batch)
        assert sum(parts.values()) < size * GIB
        assert parts == chosen
    with pytest.raises(UsageError, match=r"--memory 8G: one row of data.max_tokens 4096 needs"):
        planning.choose(shapes, run, dataclasses.replace(CARDS, memory_bytes=8 * GIB))
    with pytest.raises(UsageError, match=r"--devices 7: cannot share train.global_batch 64"):
        planning.choose(shapes, run, dataclasses.replace(CARDS, devices=7))


def test_the_store_of_the_published_mixture_has_the_published_size():
    run, shapes = shapes_of("8b", "data.features=store", "data.store=store")
    result = planning.plan(run, shapes, CARDS, Workload(50_000, 1_500))
    assert result["store"]["bytes"] / 1e12 == pytest.approx(3.7, abs=0.05)
    assert result["store"]["fits"]
    assert result["steps"] == 7810
    assert result["store"]["read_bytes_per_s"] > 1e9


def test_the_plan_of_a_store_is_the_size_that_the_store_counts(tmp_path):
    path = write(tmp_path / "rows.jsonl", random_rows(9))
    for kind in ("plain", "int8"):
        data = {"features": "store", "store": tmp_path / "store", "taps_dtype": kind}
        run = recipe(tmp_path, path, data=data)
        target = setup.load_target(run)
        rows, _ = load_rows([path], max_tokens=64, block_size=4, vocab_size=target.vocab_size)
        layout = Identity.of(target, kind).layout
        shapes = Shapes.of(target.config, setup.drafter_config(run, target.config, 0, None))
        workload = planning._workload(run, shapes.config, None, None)
        stored = cost.store_bytes(shapes, run, workload)
        assert stored == sum(map(layout.row_bytes, rows))


def test_a_mixed_store_is_as_large_as_allowed_and_the_target_computes_the_rest():
    changes = ("data.store=store", "data.store_bytes=1T", "data.features=")
    parts, sizes = {}, {}
    for kind in ("online", "mixed", "store"):
        run, shapes = shapes_of("8b", *changes[:2], changes[2] + kind)
        result = planning.plan(run, shapes, CARDS, Workload(50_000, 1_500))
        parts[kind] = result["flops_per_row"].get("target", 0.0)
        sizes[kind] = result["store"]["bytes"]
    assert sizes["mixed"] == 1 << 40
    share = (1 << 40) / sizes["store"]
    assert parts["mixed"] == pytest.approx((1 - share) * parts["online"])
    assert parts["store"] == 0


def measured_step(tmp_path, mode, make=recipe, data=None, apart=False, **changes):
    """Run one step of one row under `mode`; return recipe, shapes and the row.

    apart: trees are planned before, as where a step has several micro-batches.
    """
    rows = random_rows(4)
    for row in rows:
        row["output_token_ids"] = (row["output_token_ids"] * 4)[:56]
    path = write(tmp_path / "rows.jsonl", rows)
    data = {"num_anchors": 16, "tree_anchors": 0} | (data or {})
    run = make(tmp_path, path, data=data, **changes)
    target = setup.load_target(run)
    (row, *_), _ = load_rows([path], max_tokens=64, block_size=4, vocab_size=target.vocab_size)
    drafter = setup.new_drafter(run, target, [row])
    anchors = {"num_anchors": data["num_anchors"], "num_tree_anchors": data["tree_anchors"]}
    batch = collate([(0, row)], **anchors, seed=0)
    features, hidden = target.sequence_outputs(batch.input_ids, batch.lengths.tolist())
    micro = MicroBatch(batch, features, hidden)
    weights, objective = setup.loss_weights(run, 0, 10), setup.objective(run)
    with mode:
        made = plan_micro_batch(drafter, micro, objective, weights) if apart else None
        found = micro_batch_terms(drafter, micro, objective, weights, made)
        combine(found.terms, weights)[0].backward()
    return run, Shapes.of(target.config, drafter.config), row


NO_TREES = {"survival": 0.0, "coverage": 0.0}


@pytest.mark.parametrize(
    ("name", "make", "changes"),
    [
        ("activations", recipe, {"losses": NO_TREES}),
        ("losses", recipe, {"losses": NO_TREES, "train": {"keep_logits": True}}),
        ("replay", recipe, {"data": {"tree_anchors": 16}, "train": {"chunk_rows": 4}}),
        ("steps", eagle3, {}),
        ("steps and logits", eagle3, {"train": {"keep_logits": True}}),
    ],
)
def test_predicted_memory_is_that_of_a_measured_step(tmp_path, name, make, changes):
    live = LiveBytes()
    changes["train"] = {"global_batch": 1} | changes.get("train", {})
    run, shapes, row = measured_step(tmp_path, live, make, **changes)
    parts = cost.memory(shapes, run, len(row.token_ids), stage=0, devices=1, micro_batch=1)
    names = ("activations", "attention scores", "losses", "replay", "gradients")
    predicted = sum(parts[part] for part in names)
    assert 0.5 < predicted / live.peak < 2


# The counter knows the products that write into their first argument not by itself.
IN_PLACE = {torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1]}
# So little else that a product too many or too few would show.
THIN = {"num_hidden_layers": 1, "head_dim": 8, "intermediate_size": 8, "markov_rank": 16}
TREES, NO_TEACHER = {"tree_anchors": 16}, {"l1": 0.0, "confidence": 0.0}


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize(
    ("make", "losses", "data", "apart"),
    [
        (recipe, {}, {}, False),
        (recipe, NO_TEACHER, {}, False),
        (recipe, {}, TREES, False),
        (recipe, {}, TREES, True),
        (recipe, NO_TEACHER, TREES, False),
        (recipe, NO_TEACHER, TREES, True),
        (recipe, {"soft_ce": 1.0}, TREES, False),
        (recipe, {"soft_ce": 1.0, "ce": 0.0, **NO_TEACHER}, TREES, False),
        (eagle3, {}, {}, False),
    ],
)
def test_predicted_flops_are_those_of_a_measured_step(
    tmp_path, make, losses, data, apart, keep_logits
):
    counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
    changes = {"losses": losses, "train": {"keep_logits": keep_logits, "global_batch": 1}}
    if make is recipe:
        changes["drafter"] = THIN
    run, shapes, row = measured_step(
        tmp_path, counter, make, {"num_anchors": 48, **data}, apart, **changes
    )
    parts = cost.flops_per_row(shapes, run, len(row.token_ids), plans_apart=apart)
    predicted = sum(value for name, value in parts.items() if name != "target")
    # Every anchor counts in full, also where the row ends before its last depth, and every position
    # as if an anchor needed it.
    assert counter.get_total_flops() / predicted == pytest.approx(1, abs=0.06)


def test_a_warm_up_counts_by_its_share_of_the_steps():
    found = []
    for fraction in (0.25, 0.75):
        off = "l1: 0, confidence: 0, survival: 0, coverage: 0"
        run, shapes = shapes_of("8b", f"losses.warmup={{fraction: {fraction}, ce: 1.0, {off}}}")
        found.append(cost.flops_per_row(shapes, run, 1500))
    run, shapes = shapes_of("8b")
    whole = cost.flops_per_row(shapes, run, 1500)
    for parts, share in zip(found, (0.75, 0.25), strict=True):
        assert parts["replay"] == pytest.approx(share * whole["replay"])
        assert parts["losses"] < whole["losses"]
    assert found[0]["trunk"] == pytest.approx(whole["trunk"])


def target_of(name):
    if name.startswith("qwen3"):
        return qwen3(name[6:8])
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )


@pytest.mark.parametrize(
    "path",
    sorted(p for p in RECIPES.rglob("*-*-*.yaml") if p.parent.name != "bench"),
    ids=lambda path: path.stem,
)
def test_every_shipped_recipe_has_a_plan(path):
    run, target = load_recipe(path), target_of(path.stem)
    is_small = path.stem.startswith("smollm2")
    machine = Machine(1, 24 * GIB, 0.3e12, 0.35, 10**12) if is_small else CARDS
    config = setup.drafter_config(run, target, run.drafter.mask_token_id, None)
    result = planning.plan(run, Shapes.of(target, config), machine, Workload(50_000, 250))
    assert result["hours"] > 0
    # Real decoding is in every recipe, and costs little.
    assert 0 < result["decoding"]["share"] < 0.05
    assert result["parameters"]["trainable"] > 0
    flops, memory = result["flops_per_row"], result["memory"]
    assert flops["trunk"] > 0
    assert flops["losses"] > 0
    replays = bool(run.losses.survival or run.losses.coverage)
    assert (flops["replay"] > 0) is (memory["replay"] > 0) is replays


def test_the_verb_reads_the_data_or_asks_for_its_size(tmp_path, capsys):
    rows = write(tmp_path / "rows.jsonl", random_rows(9))
    run = recipe(tmp_path, rows)
    planning.run_plan(run, dataclasses.replace(CARDS, devices=1), None, None, as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert result["parameters"]["trainable"] > 0
    assert result["steps"] == 12
    planning.run_plan(run, dataclasses.replace(CARDS, devices=1), 50, 100, as_json=False)
    assert "set train.zero_stage=0 train.micro_batch=2" in capsys.readouterr().out
    gone = recipe(tmp_path, tmp_path / "gone.jsonl")
    with pytest.raises(UsageError, match=r"gone.jsonl: not there yet; give --rows"):
        planning.run_plan(gone, CARDS, None, None, as_json=True)
