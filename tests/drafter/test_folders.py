# SPDX-License-Identifier: Apache-2.0
"""Drafter folders survive being written and read: our layout, DeepSpec, z-lab DFlash."""

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafter.helpers import (
    assert_same,
    features,
    tiny_drafter,
    tiny_target,
    zlab_folder,
)
from treespark.drafter.auto import Drafter, load_drafter
from treespark.drafter.loading import FROZEN_KEYS, TargetWeights
from treespark.drafter.modeling import TreeSparkDrafter
from treespark.errors import UsageError

VARIANTS: list[dict[str, Any]] = [
    {},
    {"markov_head_type": "gated", "head_dim": 20},
    {"markov_head_type": "rnn"},
    {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
    {"confidence_head_with_markov": False},
]


# ------------------------------------------------------------------ round trips


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("ahead", [True, False])
def test_own_folder_round_trip_keeps_weights_and_config(tmp_path, changes, ahead):
    drafter = tiny_drafter(anchor_predicts_next=ahead, **changes)
    drafter.save_pretrained(tmp_path / "a")
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert not stored.keys() & set(FROZEN_KEYS)
    assert stored.keys() | set(FROZEN_KEYS) == drafter.state_dict().keys()
    target = tiny_target()
    loaded = TreeSparkDrafter.from_pretrained(tmp_path / "a", target)
    assert_same(loaded, drafter)
    assert loaded.embed_tokens.weight.data_ptr() == target.embed_weight.data_ptr()
    assert loaded.lm_head.weight.data_ptr() == target.head_weight.data_ptr()
    assert not loaded.training
    fields = drafter.config.to_dict()
    assert {k: loaded.config.to_dict()[k] for k in fields} == fields
    frozen = {n for n, p in loaded.named_parameters() if not p.requires_grad}
    assert frozen == set(FROZEN_KEYS)


@pytest.mark.parametrize("changes", VARIANTS)
def test_deepspec_export_round_trip(tmp_path, changes):
    drafter = tiny_drafter(**changes)
    drafter.export_deepspec(tmp_path / "d")
    raw = json.loads((tmp_path / "d" / "config.json").read_text())
    assert raw["architectures"] == ["Qwen3DSparkModel"]
    assert ("markov_head_type" in raw) is (raw["markov_rank"] > 0)
    assert ("confidence_head_with_markov" in raw) is raw["enable_confidence_head"]
    assert load_file(tmp_path / "d" / "model.safetensors").keys() == drafter.state_dict().keys()
    for target in (None, tiny_target()):
        loaded = TreeSparkDrafter.from_pretrained(tmp_path / "d", target)
        assert_same(loaded, drafter)
        assert loaded.config.anchor_predicts_next is True


def test_golden_folders_survive_both_layouts(fixtures_dir, tmp_path):
    """Load a DeepSpec folder, save it as ours, load that, export it again: the same tensors."""
    for folder in sorted((fixtures_dir / "dspark_parity").iterdir()):
        first = TreeSparkDrafter.from_pretrained(folder)
        target = TargetWeights(first.embed_tokens.weight, first.lm_head.weight)
        first.save_pretrained(tmp_path / folder.name / "own")
        second = TreeSparkDrafter.from_pretrained(tmp_path / folder.name / "own", target)
        second.export_deepspec(tmp_path / folder.name / "deepspec")
        original = load_file(folder / "model.safetensors")
        exported = load_file(tmp_path / folder.name / "deepspec" / "model.safetensors")
        assert original.keys() == exported.keys()
        assert all(torch.equal(original[k], exported[k]) for k in original)
        raw, ours = (
            json.loads((p / "config.json").read_text())
            for p in (folder, tmp_path / folder.name / "deepspec")
        )
        shared = raw.keys() & ours.keys() - {"dtype"}
        assert {k: ours[k] for k in shared} == {k: raw[k] for k in shared}


def test_in_place_drafter_has_no_deepspec_form(tmp_path):
    with pytest.raises(UsageError, match="anchor_predicts_next"):
        tiny_drafter(anchor_predicts_next=False).export_deepspec(tmp_path / "d")
    assert not any(tmp_path.iterdir())


def test_zlab_folder_loads_in_place_with_one_depth_less(tmp_path):
    drafter = zlab_folder(tmp_path / "z", block_size=6)
    loaded = TreeSparkDrafter.from_pretrained(tmp_path / "z", tiny_target())
    assert_same(loaded, drafter)
    assert loaded.config.block_size == 5
    assert loaded.config.num_slots == 6
    assert loaded.config.anchor_predicts_next is False
    assert loaded.markov_head is None
    assert loaded.confidence_head is None
    cache = loaded.new_cache(1, 8)
    loaded.extend_context(cache, 0, 0, features(0, 4))
    assert loaded.draft_block(cache, [0], [4], torch.tensor([1])).shape[:2] == (1, 5)


def test_sharded_weights_load(deepspec):
    tensors = load_file(deepspec / "model.safetensors")
    (deepspec / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i in range(2):
        part = {k: tensors[k] for k in names[i::2]}
        save_file(part, deepspec / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    index = deepspec / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same(TreeSparkDrafter.from_pretrained(deepspec), tiny_drafter())
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../own/model.safetensors"}}))
    with pytest.raises(UsageError, match="weight_map"):
        TreeSparkDrafter.from_pretrained(deepspec)


@pytest.mark.parametrize("layout", ["own", "deepspec"])
def test_bfloat16_load_casts_everything_but_the_targets_tables(request, layout):
    folder, target = request.getfixturevalue(layout), tiny_target()
    loaded = TreeSparkDrafter.from_pretrained(folder, target, dtype=torch.bfloat16)
    for name, tensor in loaded.state_dict().items():
        expected = torch.float32 if name in FROZEN_KEYS else torch.bfloat16
        assert tensor.dtype == expected, name
    low = replace(
        target,
        embed_weight=target.embed_weight.bfloat16(),
        head_weight=target.head_weight.bfloat16(),
    )
    loaded = TreeSparkDrafter.from_pretrained(folder, low)
    assert {t.dtype for t in loaded.state_dict().values()} == {torch.bfloat16}
    assert loaded.lm_head.weight.data_ptr() == low.head_weight.data_ptr()


def test_weights_can_be_stored_in_bfloat16(tmp_path):
    tiny_drafter().save_pretrained(tmp_path / "a", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = TreeSparkDrafter.from_pretrained(tmp_path / "a", tiny_target())
    assert loaded.fc.weight.dtype == torch.float32


def test_tied_target_is_stored_twice_in_a_deepspec_folder(tmp_path):
    drafter = tiny_drafter()
    drafter.attach_target(drafter.embed_tokens.weight, drafter.embed_tokens.weight)
    drafter.export_deepspec(tmp_path / "d")
    stored = load_file(tmp_path / "d" / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], stored["lm_head.weight"])


def test_other_embedding_in_a_deepspec_folder_is_kept_and_reported(deepspec, caplog):
    other = replace(tiny_target(), embed_weight=tiny_target(9).embed_weight)
    with caplog.at_level(logging.WARNING):
        loaded = TreeSparkDrafter.from_pretrained(deepspec, other)
    assert torch.equal(loaded.embed_tokens.weight, tiny_target().embed_weight)
    assert [r.args[1] for r in caplog.records] == ["embed_tokens.weight"]


def test_load_drafter_gives_what_the_engine_calls(own):
    target = tiny_target()
    loaded = load_drafter(
        own, target.embed_weight, target.head_weight, target.fingerprint, torch.float32, "cpu", 8
    )
    assert isinstance(loaded, Drafter)
    assert_same(loaded, tiny_drafter())


def test_saving_again_replaces_weights_and_keeps_other_files(own):
    (own / "README.md").write_text("card")
    # Of the weights that are replaced: the doctor would compare others with it.
    (own / "treespark.json").write_text("{}")
    tiny_drafter(seed=1, block_size=4).save_pretrained(own)
    loaded = TreeSparkDrafter.from_pretrained(own, tiny_target(1))
    assert_same(loaded, tiny_drafter(seed=1, block_size=4))
    assert (own / "README.md").read_text() == "card"
    assert not (own / "treespark.json").exists()
    assert sorted(p.name for p in own.parent.iterdir()) == ["own"]


def test_a_failed_save_leaves_the_old_folder_untouched(own, monkeypatch):
    before = {p.name: p.read_bytes() for p in own.iterdir()}

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("treespark.drafter.export.save_file", fail)
    with pytest.raises(UsageError, match="own: cannot be written: disk full"):
        tiny_drafter(seed=1).save_pretrained(own)
    assert {p.name: p.read_bytes() for p in own.iterdir()} == before
    assert sorted(p.name for p in own.parent.iterdir()) == ["own"]


def test_a_folder_with_something_else_is_never_overwritten(tmp_path):
    target_folder = tmp_path / "target"
    target_folder.mkdir()
    (target_folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match="holds no drafter"):
        tiny_drafter().save_pretrained(target_folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="it is a file"):
        tiny_drafter().save_pretrained(tmp_path / "file")
    assert (target_folder / "config.json").read_text() == '{"model_type": "llama"}'


def test_written_files_have_the_usual_permissions(tmp_path):
    tiny_drafter().save_pretrained(tmp_path / "drafter")
    (tmp_path / "plain").write_text("")
    usual = (tmp_path / "plain").stat().st_mode
    assert {p.stat().st_mode for p in (tmp_path / "drafter").iterdir()} == {usual}
