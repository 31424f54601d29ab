# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 folders survive being written and read, in our layout and DeepSpec's."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.drafter.helpers import assert_same, edit_config, edit_tensors, tiny_drafter, tiny_target
from tests.drafter.test_eagle3 import golden_folders, load_golden, tiny_eagle3
from treespark.drafter.auto import Drafter, load_drafter
from treespark.drafter.eagle3 import Eagle3Config, Eagle3Drafter
from treespark.drafter.loading import FROZEN_KEYS
from treespark.drafter.modeling import TreeSparkDrafter
from treespark.errors import UsageError


@pytest.fixture
def own(tmp_path):
    tiny_eagle3(step_loss_decay=0.7).save_pretrained(tmp_path / "own")
    return tmp_path / "own"


def load(folder, target=None):
    target = target or tiny_target()
    return load_drafter(folder, target.embed_weight, target.head_weight, target.fingerprint)


def test_own_folder_round_trip_keeps_weights_and_config(own):
    drafter = tiny_eagle3(step_loss_decay=0.7)
    stored = load_file(own / "model.safetensors")
    assert stored.keys() | set(FROZEN_KEYS) == drafter.state_dict().keys()
    assert not stored.keys() & set(FROZEN_KEYS)
    loaded = load(own)
    assert isinstance(loaded, Eagle3Drafter)
    assert isinstance(loaded, Drafter)
    assert_same(loaded, drafter)
    fields = drafter.config.to_dict()
    assert {k: loaded.config.to_dict()[k] for k in fields} == fields
    assert loaded.config.tree == {"depth": 4, "branching": 1, "budget": 4}
    assert isinstance(AutoConfig.from_pretrained(own), Eagle3Config)


def test_golden_folders_survive_both_layouts(fixtures_dir, tmp_path):
    for number, folder in enumerate(golden_folders(fixtures_dir)):
        first, work = load_golden(folder), tmp_path / str(number)
        first.save_pretrained(work / "own")
        weights = (first.embed_tokens.weight, first.lm_head.weight)
        second = load_drafter(work / "own", *weights)
        assert isinstance(second, Eagle3Drafter)
        second.export_deepspec(work / "deepspec")
        assert_same(Eagle3Drafter.from_pretrained(work / "deepspec"), first)
        original = load_file(folder / "model.safetensors")
        exported = load_file(work / "deepspec" / "model.safetensors")
        assert original.keys() == exported.keys()
        assert all(torch.equal(original[k], exported[k]) for k in original)
        raw, ours = (
            json.loads((p / "config.json").read_text()) for p in (folder, work / "deepspec")
        )
        shared = raw.keys() & ours.keys() - {"dtype"}
        assert {"ttt_length", "step_loss_decay", "draft_num_hidden_layers"} <= shared
        assert {k: ours[k] for k in shared} == {k: raw[k] for k in shared}


def test_default_taps_are_those_of_five_layers():
    assert Eagle3Config().target_layer_ids == [1, 9, 17, 25, 33]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; an EAGLE-3 drafter has 1"),
        ({"step_loss_decay": 0}, "step_loss_decay is 0; a number in 0..1"),
        ({"step_loss_decay": True}, "step_loss_decay is True"),
        ({"block_size": 0}, "block_size is 0"),
        ({"markov_rank": 8}, "markov_rank is 8; unknown"),
        ({"num_anchors": 8}, "num_anchors is 8; unknown"),
        ({"tree": {"depth": 5, "branching": 1, "budget": 4}}, "tree.depth is 5"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused_by_field(own, change, words):
    edit_config(own, lambda raw: raw.update(change))
    with pytest.raises(UsageError, match=words) as caught:
        load(own)
    assert str(own) in str(caught.value)


def test_deepspec_fields_are_needed_and_must_agree(tmp_path):
    tiny_eagle3().export_deepspec(tmp_path / "d")
    edit_config(tmp_path / "d", lambda raw: raw.update(draft_num_hidden_layers=2))
    with pytest.raises(UsageError, match="draft_num_hidden_layers is 2; it must equal"):
        load(tmp_path / "d")
    edit_config(tmp_path / "d", lambda raw: raw.pop("draft_num_hidden_layers"))
    with pytest.raises(UsageError, match="draft_num_hidden_layers is missing"):
        load(tmp_path / "d")


def test_a_golden_folder_without_its_target_says_what_is_missing(fixtures_dir):
    with pytest.raises(UsageError, match=r"num_target_layers is missing .* with its target"):
        Eagle3Drafter.from_pretrained(golden_folders(fixtures_dir)[0])


def test_missing_and_foreign_tensors_are_named(own):
    edit_tensors(own, lambda tensors: tensors.pop("layers.0.hidden_norm.weight"))
    with pytest.raises(UsageError, match=r"1 tensors are missing: layers\.0\.hidden_norm"):
        load(own)


def test_each_class_refuses_the_other_architecture(own, tmp_path):
    with pytest.raises(UsageError, match=r"model_type is 'treespark_eagle3'; need .* treespark$"):
        TreeSparkDrafter.from_pretrained(own, tiny_target())
    tiny_drafter().save_pretrained(tmp_path / "block")
    with pytest.raises(UsageError, match=r"model_type is 'treespark'; need .* treespark_eagle3"):
        Eagle3Drafter.from_pretrained(tmp_path / "block", tiny_target())
