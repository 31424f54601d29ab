# SPDX-License-Identifier: Apache-2.0
"""Folders as other projects write them are read as what they are, or refused by field or tensor."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file

from tests.drafter.foreign import LAYOUTS, MAKER, foreign_target, load, make
from tests.drafter.helpers import edit_config, edit_tensors
from treespark.drafter.eagle3 import Eagle3Drafter
from treespark.drafter.loading import TargetWeights
from treespark.drafter.modeling import TreeSparkDrafter
from treespark.errors import UsageError

# What each folder must be read as: depths, whether slot 0 predicts, Markov rank.
BLOCKS = {
    "deepspec-dspark": (5, True, 8),
    "deepspec-dflash": (5, True, 0),
    "zlab-dflash": (5, False, 0),
    "specforge-dflash": (5, False, 0),
    "specforge-dspark": (5, True, 8),
    "speculators-dflash": (5, False, 0),
    "speculators-dspark": (5, True, 8),
}
# Steps, head norms, normed residual, rows of a head of its own.
EAGLES = {
    "deepspec-eagle3": (4, True, False, None),
    "specforge-eagle3": (7, False, False, MAKER.REDUCED),
    "specforge-eagle3-whole": (7, False, False, MAKER.VOCAB_SIZE),
    "speculators-eagle3": (3, False, True, MAKER.REDUCED),
}


def test_every_layout_of_the_tool_is_expected_here():
    assert BLOCKS.keys() | EAGLES.keys() == LAYOUTS.keys()


@pytest.mark.parametrize("layout", BLOCKS)
def test_a_block_drafter_is_read_as_what_its_makers_mean(tmp_path, layout):
    folder = make(layout, tmp_path / "d")
    drafter = load(folder)
    assert isinstance(drafter, TreeSparkDrafter)
    config = drafter.config
    found = (config.block_size, config.anchor_predicts_next, config.markov_rank)
    assert found == BLOCKS[layout]
    assert config.num_slots == json.loads((folder / "config.json").read_text())["block_size"]
    assert config.target_layer_ids == MAKER.TAPS
    assert config.mask_token_id == MAKER.VOCAB_SIZE - 1
    assert config.enable_confidence_head is (config.markov_rank > 0)
    assert (config.rope_theta, config.hidden_act) == (1e6, "silu")
    stored = load_file(folder / "model.safetensors")
    for key, tensor in stored.items():
        name = key.removeprefix("logit_head.")
        assert name == "verifier_norm.weight" or torch.equal(drafter.state_dict()[name], tensor)


@pytest.mark.parametrize("layout", EAGLES)
def test_an_eagle3_drafter_is_read_as_what_its_makers_mean(tmp_path, layout):
    folder = make(layout, tmp_path / "d")
    drafter = load(folder)
    assert isinstance(drafter, Eagle3Drafter)
    config = drafter.config
    found = (
        config.block_size,
        config.qk_norm,
        config.norm_before_residual,
        config.draft_vocab_size,
    )
    assert found == EAGLES[layout]
    # specforge-eagle3 names no layers: SGLang and vLLM then tap these of 8.
    taps = [1, 3, 4] if layout == "specforge-eagle3" else MAKER.TAPS
    assert config.target_layer_ids == taps
    stored = load_file(folder / "model.safetensors")
    for key, tensor in stored.items():
        name = key.replace("midlayer.", "layers.0.")
        assert name == "t2d" or torch.equal(drafter.state_dict()[name], tensor)


def test_a_reduced_head_proposes_only_its_own_tokens(tmp_path):
    drafter = load(make("specforge-eagle3", tmp_path / "d"))
    hidden = torch.randn(2, 3, MAKER.HIDDEN)
    logits = drafter.base_logits(hidden)
    assert logits.shape == (2, 3, MAKER.VOCAB_SIZE)
    rows = torch.arange(MAKER.REDUCED)
    assert torch.equal(logits[..., 2 * rows], hidden @ drafter.lm_head.weight.T)
    others = torch.ones(MAKER.VOCAB_SIZE, dtype=torch.bool)
    others[2 * rows] = False
    assert (logits[..., others] == float("-inf")).all()
    tokens, _ = drafter.chain(hidden, torch.tensor([1, 2]))
    assert (tokens % 2 == 0).all()
    assert (tokens < 2 * MAKER.REDUCED).all()


def test_the_targets_head_in_an_eagle3_folder_is_not_kept_twice(tmp_path):
    folder = make("specforge-eagle3-whole", tmp_path / "d")
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    drafter = load(folder, TargetWeights(foreign_target().embed_weight, head, None, 8))
    assert drafter.config.draft_vocab_size is None
    assert drafter.lm_head.weight.data_ptr() == head.data_ptr()


def test_a_missing_layout_of_specforges_dspark_is_reported(tmp_path, caplog):
    folder = make("specforge-dspark", tmp_path / "d")
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "sample_from_anchor is missing; taken as true" in caplog.text
    edit_config(folder, lambda c: c["dflash_config"].update(sample_from_anchor=False))
    caplog.clear()
    config = load(folder).config
    assert (config.block_size, config.anchor_predicts_next) == (4, False)
    assert not caplog.records


REFUSED = [
    ("zlab-dflash", "auto_map", lambda c: c.update(auto_map={"AutoModel": "x.Y"})),
    (
        "specforge-dflash",
        r"dflash_config\.causal",
        lambda c: c["dflash_config"].update(causal=True),
    ),
    (
        "specforge-dflash",
        r"dflash_config\.projector_type is 'domino'",
        lambda c: c["dflash_config"].update(projector_type="domino"),
    ),
    (
        "specforge-dflash",
        r"dflash_config\.selector_rank",
        lambda c: c["dflash_config"].update(selector_rank=4),
    ),
    (
        "specforge-dspark",
        r"dflash_config\.markov_rank is missing",
        lambda c: c["dflash_config"].pop("markov_rank"),
    ),
    ("specforge-dspark", "block_size is 0", lambda c: c.update(block_size=0)),
    (
        "specforge-dspark",
        r"dflash_config\.sample_from_anchor is 1",
        lambda c: c["dflash_config"].update(sample_from_anchor=1),
    ),
    ("specforge-eagle3", "norm_before_fc", lambda c: c.update(norm_before_fc=True)),
    ("specforge-eagle3", "target_hidden_size", lambda c: c.update(target_hidden_size=64)),
    ("specforge-eagle3", "mlp_bias", lambda c: c.update(mlp_bias=True)),
    ("specforge-eagle3", "draft_vocab_size is 300", lambda c: c.update(draft_vocab_size=300)),
    ("specforge-eagle3", "d2t is .*draft_vocab_size", lambda c: c.update(draft_vocab_size=39)),
    ("specforge-eagle3", "eagle_config is 3", lambda c: c.update(eagle_config=3)),
    ("specforge-eagle3", "num_hidden_layers is 2", lambda c: c.update(num_hidden_layers=2)),
    (
        "specforge-eagle3",
        r"rope_scaling\.rope_type is 'llama3'",
        lambda c: c.update(rope_scaling={"rope_type": "llama3"}),
    ),
    (
        "specforge-eagle3-whole",
        r"eagle_aux_hidden_state_layer_ids is \[1, 3, 5\]; eagle_config has \[1, 3, 5\]",
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, 5]),
    ),
    (
        "speculators-eagle3",
        "norm_before_residual is missing",
        lambda c: c.pop("norm_before_residual"),
    ),
    (
        "speculators-eagle3",
        "eagle_aux_hidden_state_layer_ids is 3",
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=3),
    ),
    (
        "speculators-eagle3",
        "transformer_layer_config is missing",
        lambda c: c.pop("transformer_layer_config"),
    ),
    (
        "speculators-eagle3",
        r"transformer_layer_config\.model_type is 'gpt2'",
        lambda c: c["transformer_layer_config"].update(model_type="gpt2"),
    ),
    (
        "speculators-eagle3",
        "speculators_model_type is 'mtp'",
        lambda c: c.update(speculators_model_type="mtp"),
    ),
    ("speculators-dflash", "draft_vocab_size is 40", lambda c: c.update(draft_vocab_size=40)),
    ("speculators-dflash", "block_size is 1; it counts", lambda c: c.update(block_size=1)),
    ("speculators-dflash", "mask_token_id is missing", lambda c: c.pop("mask_token_id")),
    (
        "speculators-dflash",
        "projector_type is 'domino'",
        lambda c: c.update(projector_type="domino"),
    ),
    ("speculators-dspark", "sample_from_anchor is missing", lambda c: c.pop("sample_from_anchor")),
    (
        "speculators-dspark",
        "aux_hidden_state_layer_ids is missing",
        lambda c: c.pop("aux_hidden_state_layer_ids"),
    ),
    ("speculators-dspark", "confidence_head_with_markov", lambda c: c.update(markov_rank=0)),
]


@pytest.mark.parametrize(("layout", "match", "edit"), REFUSED)
def test_what_this_drafter_cannot_be_is_refused_by_field(tmp_path, layout, match, edit):
    folder = make(layout, tmp_path / "d")
    edit_config(folder, edit)
    with pytest.raises(UsageError, match=match) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


TENSORS = [
    ("specforge-eagle3", "draft_vocab_size is 40; of 272 tokens", lambda t: t.pop("d2t")),
    ("specforge-eagle3", "d2t names a token twice", lambda t: t["d2t"].__setitem__(1, 1 - 2)),
    ("specforge-eagle3", "d2t names token 540", lambda t: t["d2t"].__setitem__(0, 540)),
    ("specforge-eagle3", "t2d and d2t", lambda t: t["t2d"].__setitem__(1, True)),
    ("specforge-eagle3", "missing: lm_head", lambda t: t.pop("lm_head.weight")),
    ("specforge-eagle3", r"d2t is .*torch\.float32", lambda t: t.update(d2t=t["d2t"].float())),
    (
        "specforge-eagle3",
        "unexpected: layers.0.self_attn.q_norm",
        lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(12)}),
    ),
    (
        "specforge-eagle3",
        "is there twice",
        lambda t: t.update({"layers.0.hidden_norm.weight": torch.ones(32)}),
    ),
    ("zlab-dflash", "d2t maps a reduced vocabulary", lambda t: t.update(d2t=torch.arange(40))),
    ("zlab-dflash", "unexpected: lm_head", lambda t: t.update({"lm_head.weight": torch.ones(1)})),
    ("speculators-dspark", "missing: markov_head", lambda t: t.pop("markov_head.markov_w2.weight")),
    ("speculators-eagle3", "missing: fc.weight", lambda t: t.pop("fc.weight")),
]


@pytest.mark.parametrize(("layout", "match", "edit"), TENSORS)
def test_tensors_that_are_not_exactly_the_layouts_are_refused_by_name(
    tmp_path, layout, match, edit
):
    folder = make(layout, tmp_path / "d")
    edit_config(folder, lambda c: c.pop("auto_map", None))
    edit_tensors(folder, edit)
    with pytest.raises(UsageError, match=match):
        load(folder)


def test_pickled_weights_are_refused_with_the_way_to_convert_them(tmp_path):
    folder = make("specforge-eagle3", tmp_path / "d")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is a pickle .*weights_only=True"):
        load(folder)


def test_a_folder_that_does_not_say_how_deep_its_target_is_asks_for_it(tmp_path):
    folder = make("speculators-dflash", tmp_path / "d")
    with pytest.raises(UsageError, match=r"num_target_layers is missing .* with its target"):
        TreeSparkDrafter.from_pretrained(folder)
