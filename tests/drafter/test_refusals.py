# SPDX-License-Identifier: Apache-2.0
"""Folders that do not fit or are damaged are refused in one line naming folder and field."""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drafter.helpers import (
    assert_same,
    edit_config,
    edit_tensors,
    tiny_drafter,
    tiny_target,
    zlab_folder,
)
from treespark.drafter.export import check_destination
from treespark.drafter.loading import FROZEN_KEYS, TargetWeights
from treespark.drafter.modeling import TreeSparkDrafter
from treespark.errors import UsageError


def refused(folder: Path, match: str, target: TargetWeights | None = None) -> None:
    with pytest.raises(UsageError, match=match) as error:
        TreeSparkDrafter.from_pretrained(folder, target or tiny_target())
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "target"),
    [
        ("vocab_size", tiny_target(vocab=98)),
        ("hidden_size", tiny_target(hidden=16)),
        ("num_target_layers", replace(tiny_target(), num_layers=9)),
        ("target_fingerprint", replace(tiny_target(), fingerprint="another")),
    ],
)
def test_another_target_is_refused(own, field, target):
    refused(own, field, target)


CONFIG_EDITS: list[tuple[str, str, Callable[[dict[str, Any]], object]]] = [
    ("own", "auto_map", lambda c: c.update(auto_map={"AutoModel": "evil.Model"})),
    ("own", "mask_token_id", lambda c: c.update(mask_token_id=97)),
    ("own", "mask_token_id", lambda c: c.pop("mask_token_id")),
    ("own", "head_dim", lambda c: c.pop("head_dim")),
    ("own", "head_dim", lambda c: c.update(head_dim=16)),
    ("own", "anchor_predicts_next", lambda c: c.pop("anchor_predicts_next")),
    ("own", "anchor_predict_next", lambda c: c.update(anchor_predict_next=False)),
    ("own", "target_layer_ids", lambda c: c.update(target_layer_ids=[1, 3, 7])),
    ("own", "target_layer_ids", lambda c: c.update(target_layer_ids=5)),
    ("own", "target_fingerprint is 5; need a string", lambda c: c.update(target_fingerprint=5)),
    ("own", "lone surrogate", lambda c: c.update(target_fingerprint="\ud800")),
    ("own", "layer_types", lambda c: c.update(layer_types=["full_attention"] * 3)),
    ("own", "architectures", lambda c: c.update(model_type="llama")),
    ("deepspec", "auto_map", lambda c: c.update(auto_map={})),
    ("deepspec", "layer_types", lambda c: c["layer_types"].__setitem__(1, "sliding_attention")),
    ("deepspec", "layer_types", lambda c: c.update(layer_types=3)),
    (
        "deepspec",
        "use_sliding_window",
        lambda c: c.update(layer_types=None, use_sliding_window=True),
    ),
    ("deepspec", "attention_bias", lambda c: c.update(attention_bias=True)),
    ("deepspec", "rope_scaling", lambda c: c.update(rope_scaling={"rope_type": "yarn"})),
    ("deepspec", "rope_parameters", lambda c: c["rope_parameters"].update(rope_type="llama3")),
    ("deepspec", "rope_parameters", lambda c: c.update(rope_parameters=[1])),
    ("deepspec", "rope_theta", lambda c: [c.pop("rope_parameters"), c.pop("rope_theta")]),
    ("deepspec", "architectures", lambda c: c.update(architectures=["LlamaForCausalLM"])),
    ("deepspec", "dflash_config", lambda c: c.update(architectures=["DSparkDraftModel"])),
    ("deepspec", "architectures", lambda c: c.pop("architectures")),
    ("deepspec", "markov_head_type", lambda c: c.pop("markov_head_type")),
    ("deepspec", "markov_rank", lambda c: c.pop("markov_rank")),
    ("deepspec", "markov_rank", lambda c: c.update(markov_rank="8")),
    ("deepspec", "tensors are unexpected", lambda c: c.update(enable_confidence_head=False)),
    ("deepspec", "enable_confidence_head", lambda c: c.pop("enable_confidence_head")),
    ("deepspec", "tie_word_embeddings", lambda c: c.update(tie_word_embeddings=True)),
    ("deepspec", "hidden_act", lambda c: c.update(hidden_act="gelu")),
    ("deepspec", "tensors are missing", lambda c: c.update(num_hidden_layers=4, layer_types=None)),
    ("deepspec", "num_target_layers", lambda c: c.update(num_target_layers=6)),
]


@pytest.mark.parametrize(("layout", "match", "edit"), CONFIG_EDITS)
def test_a_config_that_does_not_fit_is_refused_by_field(request, layout, match, edit):
    folder = request.getfixturevalue(layout)
    edit_config(folder, edit)
    refused(folder, match)


ZLAB_EDITS: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("dflash_config", lambda c: c.pop("dflash_config")),
    ("dflash_config", lambda c: c["dflash_config"].update(projector_type="dspark")),
    ("dflash_config", lambda c: c["dflash_config"].pop("mask_token_id")),
    ("mask_token_id", lambda c: c["dflash_config"].update(mask_token_id=97)),
    ("target_layer_ids", lambda c: c["dflash_config"].update(target_layer_ids=[1, 3, 7])),
    ("block_size", lambda c: c.update(block_size=1)),
    ("auto_map", lambda c: c.update(auto_map={"AutoModel": "dflash.DFlashDraftModel"})),
]


@pytest.mark.parametrize(("match", "edit"), ZLAB_EDITS)
def test_a_zlab_config_that_does_not_fit_is_refused_by_field(tmp_path, match, edit):
    zlab_folder(tmp_path / "z")
    edit_config(tmp_path / "z", edit)
    refused(tmp_path / "z", match)


def test_zlab_layer_count_comes_from_the_target_or_is_asked_for(tmp_path):
    zlab_folder(tmp_path / "z")
    edit_config(tmp_path / "z", lambda c: c.pop("num_target_layers"))
    loaded = TreeSparkDrafter.from_pretrained(tmp_path / "z", tiny_target())
    assert loaded.config.num_target_layers == 8
    refused(tmp_path / "z", "num_target_layers", replace(tiny_target(), num_layers=None))


TENSOR_EDITS: list[tuple[str, str, Callable[[dict[str, Tensor]], object]]] = [
    ("own", "missing: fc.weight", lambda t: t.pop("fc.weight")),
    ("own", "unexpected: extra", lambda t: t.update(extra=torch.zeros(1))),
    ("own", "unexpected: lm_head", lambda t: t.update({"lm_head.weight": torch.zeros(97, 32)})),
    ("own", "fc.weight", lambda t: t.update({"fc.weight": torch.zeros(32, 64)})),
    ("own", "fc.weight", lambda t: t.update({"fc.weight": t["fc.weight"].long()})),
    ("own", "fc.weight holds NaN", lambda t: t["fc.weight"][1].fill_(float("nan"))),
    ("own", "norm.weight holds NaN or inf", lambda t: t["norm.weight"][:1].fill_(float("inf"))),
    ("deepspec", "lm_head.weight holds NaN", lambda t: t["lm_head.weight"][9].fill_(-torch.inf)),
    ("own", "missing: markov_head", lambda t: t.pop("markov_head.markov_w2.weight")),
    ("own", "missing: confidence_head", lambda t: t.pop("confidence_head.proj.bias")),
    ("deepspec", "missing: lm_head", lambda t: t.pop("lm_head.weight")),
    ("deepspec", "missing: norm", lambda t: t.pop("norm.weight")),
]


@pytest.mark.parametrize(("layout", "match", "edit"), TENSOR_EDITS)
def test_tensors_that_do_not_fit_are_refused_by_name(request, layout, match, edit):
    folder = request.getfixturevalue(layout)
    edit_tensors(folder, edit)
    refused(folder, match)


def test_deepspec_folder_without_embedding_and_head_takes_the_targets(deepspec):
    edit_tensors(deepspec, lambda t: [t.pop(key) for key in FROZEN_KEYS])
    assert_same(TreeSparkDrafter.from_pretrained(deepspec, tiny_target()), tiny_drafter())
    with pytest.raises(UsageError, match="with its target"):
        TreeSparkDrafter.from_pretrained(deepspec)


def test_own_folder_without_a_target_is_refused(own):
    with pytest.raises(UsageError, match="with its target"):
        TreeSparkDrafter.from_pretrained(own)


@pytest.mark.parametrize("keep", [0, 4, 100, 2000])
def test_truncated_weights_are_refused(own, keep):
    path = own / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(own, "model.safetensors cannot be read")


def test_damaged_header_is_refused(own):
    path = own / "model.safetensors"
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])
    refused(own, "model.safetensors cannot be read")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"a":' + "[" * 100_000])
def test_damaged_config_is_refused(own, text):
    (own / "config.json").write_text(text)
    refused(own, r"config\.json")


def test_missing_folder_config_or_weights_are_refused(tmp_path, own):
    refused(tmp_path / "nowhere", "no such folder")
    refused(tmp_path / ("x" * 5000), "no such folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "config.json is missing")
    (own / "model.safetensors").unlink()
    refused(own, "model.safetensors is missing")


class Canary:
    """Unpickling this writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "mp_rank_00_model_states.pt"])
def test_pickle_files_are_refused_and_never_opened(tmp_path, own, name):
    (own / "model.safetensors").unlink()
    canary = tmp_path / "canary"
    (own / name).write_bytes(pickle.dumps(Canary(canary)))
    refused(own, f"{name} is a pickle file")
    assert not canary.exists()


def test_code_in_a_folder_is_never_run(tmp_path, own):
    canary = tmp_path / "canary"
    (own / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Model: pass\n")
    edit_config(own, lambda c: c.update(auto_map={"AutoModel": "evil.Model"}))
    refused(own, "auto_map")
    assert not canary.exists()


@pytest.mark.parametrize("name", [["x"], 3, "../own/model.safetensors"])
def test_shard_names_that_are_none_are_refused(own, name):
    (own / "model.safetensors").unlink()
    (own / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    refused(own, "need names of safetensors files")


@pytest.mark.parametrize("place", ["file/x", "/proc/x", "y" * 300])
def test_destination_that_cannot_be_written_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"drafter output .*: cannot be written"):
        tiny_drafter().export_deepspec(tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_export_onto_its_own_source_is_refused(own, deepspec):
    check_destination(deepspec, own)
    with pytest.raises(UsageError, match="is the drafter that is exported"):
        check_destination(own.parent / "." / "own", own)
