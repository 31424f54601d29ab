# SPDX-License-Identifier: Apache-2.0
"""Target folders: what is refused, with which words, and what identifies a target."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from treespark.errors import UsageError
from treespark.target.families import default_mask_token_id, default_target_layer_ids, family_of
from treespark.target.model import TargetModel
from treespark.target.template import load_tokenizer, render_prompt, user_turn_marks


@pytest.fixture
def folder(qwen3, tmp_path):
    """A copy that a test may break."""
    return shutil.copytree(qwen3.folder, tmp_path / "target")


def edit(path, **changes):
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def refuse(folder, words: str):
    with pytest.raises(UsageError, match=words) as caught:
        TargetModel.from_pretrained(folder, device="cpu")
    assert "\n" not in str(caught.value)


def test_missing_folder_is_refused(tmp_path):
    refuse(tmp_path / "nowhere", "nowhere: no such folder")


def test_missing_config_is_refused(folder):
    (folder / "config.json").unlink()
    refuse(folder, r"config\.json: no such file")


def test_broken_config_is_refused(folder):
    (folder / "config.json").write_text('{"model_type": ')
    refuse(folder, r"config\.json: not readable as JSON")


def test_config_value_of_the_wrong_type_is_refused(folder):
    edit(folder / "config.json", hidden_size="wide")
    refuse(folder, r"config\.json: .*hidden_size")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_custom_code_is_refused(folder, file):
    edit(folder / file, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    refuse(folder, "auto_map asks for custom code")


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuse(folder, r"no model\.safetensors; pickled weights \(pytorch_model\.bin\)")


def test_missing_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    refuse(folder, r"no model\.safetensors$")


def test_missing_shard_is_refused(folder):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(folder, r"no model-00001-of-00002\.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_weights_are_refused(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refuse(folder, r"model\.safetensors: not a whole safetensors file")


def test_garbage_weights_are_refused(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)
    refuse(folder, r"model\.safetensors: not a whole safetensors file")


def test_missing_tensor_is_refused_by_name(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refuse(folder, r"1 tensors are missing, first model\.layers\.1\.mlp\.up_proj\.weight")


def test_tensor_of_another_shape_is_refused(folder):
    edit(folder / "config.json", intermediate_size=64)
    refuse(folder, r"mlp\.down_proj\.weight is \[32, 48\], config\.json asks for \[32, 64\]")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(folder, value):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refuse(folder, r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinite values")


@pytest.mark.parametrize(
    ("num_layers", "words"),
    [
        (3, r"11 tensors are unexpected, first model\.layers\.3\.input_layernorm"),
        (5, r"11 tensors are missing, first model\.layers\.4\.input_layernorm"),
        (0, "num_hidden_layers is 0; need an integer"),
    ],
)
def test_another_number_of_layers_is_refused_in_one_line(folder, capfd, num_layers, words):
    edit(folder / "config.json", num_hidden_layers=num_layers, layer_types=None)
    refuse(folder, words)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("extra", False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("lm_head.weight", True),
    ],
)
def test_tensors_beyond_the_model_are_refused_but_for_tables_and_a_tied_head(folder, name, allowed):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if allowed:
        TargetModel.from_pretrained(folder, device="cpu")
    else:
        refuse(folder, "1 tensors are unexpected, first extra")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (name, value)
            for name in ("vocab_size", "num_attention_heads")
            for value in (0, -1, "x")
        ),
        *((name, None) for name in ("vocab_size", "max_position_embeddings")),
        ("pad_token_id", 272),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 10**9),
        ("head_dim", 0),
        ("head_dim", 7),
        ("hidden_act", "nope"),
        ("dtype", "foo"),
        ("dtype", 3),
        ("architectures", {"a": 1}),
        ("architectures", 3),
        ("model_type", ["llama"]),
    ],
)
def test_config_value_that_cannot_work_is_refused_by_field(folder, field, value):
    edit(folder / "config.json", **{field: value})
    refuse(folder, field)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_type": "foo"}, "rope_type 'foo'.*allowed: default"),
        ({"rope_theta": "x"}, "rope_theta 'x'"),
        ({"rope_theta": 0}, "rope_theta 0"),
        ({"rope_theta": None}, "rope_theta None"),
        ({"rope_type": "linear", "factor": "x"}, "factor 'x'"),
        ({"rope_type": "linear"}, "factor"),
    ],
)
def test_rotary_positions_that_cannot_work_are_refused(folder, changes, words):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    edit(folder / "config.json", rope_parameters=rope | changes)
    refuse(folder, words)


@pytest.mark.parametrize("value", ["x", [None], {}, -1, True])
def test_stop_ids_that_are_no_ids_are_refused(folder, value):
    edit(folder / "generation_config.json", eos_token_id=value)
    refuse(folder, r"generation_config\.json: eos_token_id is")


def test_json_without_end_to_its_nesting_is_refused(folder):
    (folder / "config.json").write_text('{"a":' + "[" * 100_000)
    refuse(folder, r"config\.json: not readable as JSON: nested too deeply")


@pytest.mark.parametrize("name", ["../other/model.safetensors", ["x"], 3])
def test_shards_outside_the_folder_are_refused(folder, name):
    index = {"weight_map": {"a": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(folder, "weight_map needs names of files in this folder")


def test_name_longer_than_the_system_allows_is_no_folder(tmp_path):
    refuse(tmp_path / ("x" * 5000), "no such folder")


@pytest.mark.parametrize(
    ("file", "text"),
    [("tokenizer.json", "[]"), ("tokenizer_config.json", '{"tokenizer_class": 3}')],
)
def test_damaged_tokenizer_is_refused_when_it_is_needed(folder, file, text):
    (folder / file).write_text(text)
    target = TargetModel.from_pretrained(folder, device="cpu")
    with pytest.raises(UsageError, match=r"target: no usable tokenizer: cannot be loaded"):
        _ = target.tokenizer


@pytest.mark.parametrize(
    "template", ["{% if", "{{ nope.x }}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}"]
)
def test_chat_template_that_fails_is_refused(qwen3, template):
    tokenizer = copy.deepcopy(qwen3.ours.tokenizer)
    tokenizer.chat_template = template
    for use in (lambda: render_prompt(tokenizer, "hi"), lambda: user_turn_marks(tokenizer)):
        with pytest.raises(UsageError, match="its chat template cannot render") as caught:
            use()
        assert "\n" not in str(caught.value)


def test_text_that_is_not_utf_8_is_refused(qwen3):
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        render_prompt(qwen3.ours.tokenizer, "bad \udcff")


def test_folder_without_a_tokenizer_is_refused_without_a_warning(tmp_path, capfd):
    (tmp_path / "config.json").write_text('{"model_type": "treespark"}')
    with pytest.raises(UsageError, match=r"none of tokenizer\.json, .* is there$"):
        load_tokenizer(tmp_path)
    assert capfd.readouterr().err == ""


def test_quantized_weights_are_refused(folder):
    edit(folder / "config.json", quantization_config={"quant_method": "awq"})
    refuse(folder, "quantization_config is set")


def test_other_head_than_causal_lm_is_refused(folder):
    edit(folder / "config.json", architectures=["Qwen3DSparkModel"])
    refuse(folder, r"architectures \['Qwen3DSparkModel'\]")


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("qwen3_next", "refused, its linear-attention layers"),
        ("deepseek_v3", "refused, its cache holds compressed"),
        ("gemma3_text", "refused, its sliding-window layers"),
        ("gpt2", "not supported, allowed: llama, mistral, qwen2, qwen3"),
        (None, "not supported, allowed"),
    ],
)
def test_family_without_plain_keys_and_values_is_refused_by_name(folder, model_type, words):
    edit(folder / "config.json", model_type=model_type)
    refuse(folder, f"model_type {model_type!r}: {words}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "'linear_attention'"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, "sliding"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type 'dynamic'",
        ),
    ],
)
def test_config_with_other_state_is_refused(folder, changes, words):
    edit(folder / "config.json", **changes)
    refuse(folder, f"refused.*{words}")


def test_mistral_with_a_window_is_refused():
    config = AutoConfig.for_model("mistral", sliding_window=32)
    with pytest.raises(UsageError, match="sliding_window 32"):
        family_of(config)


def test_stop_ids_come_from_generation_config_then_config(folder):
    assert TargetModel.from_pretrained(folder, device="cpu").eos_token_ids == {258}
    edit(folder / "generation_config.json", eos_token_id=[258, 5])
    assert TargetModel.from_pretrained(folder, device="cpu").eos_token_ids == {258, 5}
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=7)
    assert TargetModel.from_pretrained(folder, device="cpu").eos_token_ids == {7}


def test_fingerprint_is_that_of_the_weights_not_of_dtype_or_shards(qwen3, folder, tmp_path):
    expected = qwen3.ours.fingerprint
    assert TargetModel.from_pretrained(folder, device="cpu", dtype="bf16").fingerprint == expected
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert TargetModel.from_pretrained(tmp_path / "shards", device="cpu").fingerprint == expected
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert TargetModel.from_pretrained(tmp_path / "half", device="cpu").fingerprint == expected


def test_fingerprint_changes_with_weights_and_with_config(qwen3, folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"] *= 1.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    changed = TargetModel.from_pretrained(folder, device="cpu").fingerprint
    edit(folder / "config.json", rms_norm_eps=1e-5)
    again = TargetModel.from_pretrained(folder, device="cpu").fingerprint
    assert len({qwen3.ours.fingerprint, changed, again}) == 3


def test_attributes_describe_the_target(qwen3):
    target = qwen3.ours
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (272, 32, 4)
    assert (target.max_context, target.dtype, target.device.type) == (512, torch.float32, "cpu")
    assert target.embed_weight is target.head_weight
    assert torch.equal(target.head_weight, qwen3.reference.lm_head.weight)
    assert not any(w.requires_grad for w in (target.embed_weight, target.head_weight))
    assert target.family.model_type == "qwen3"
    assert target.tokenizer.decode(target.tokenizer.encode("naïve ☃ 12")) == "naïve ☃ 12"


def test_folder_without_tokenizer_says_so_when_it_is_needed(folder):
    for path in folder.glob("*token*"):
        path.unlink()
    target = TargetModel.from_pretrained(folder, device="cpu")
    with pytest.raises(UsageError, match="no usable tokenizer"):
        _ = target.tokenizer


@pytest.mark.parametrize(
    ("num_layers", "num_taps", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (40, 5, [1, 10, 19, 28, 37]),
        (30, 5, [1, 8, 14, 20, 27]),
        (36, 1, [18]),
        (5, 2, [1, 2]),
    ],
)
def test_default_taps_are_those_of_the_published_drafters(num_layers, num_taps, expected):
    assert default_target_layer_ids(num_layers, num_taps) == expected


@pytest.mark.parametrize(("num_layers", "num_taps"), [(4, 2), (8, 9), (12, 0), (1, 1)])
def test_more_default_taps_than_inner_layers_are_refused(num_layers, num_taps):
    with pytest.raises(UsageError, match=f"number of taps {num_taps}"):
        default_target_layer_ids(num_layers, num_taps)


def test_default_mask_token_is_the_first_row_without_a_token(qwen3):
    tokenizer = qwen3.ours.tokenizer
    assert default_mask_token_id(tokenizer, 272) == 260
    # A full vocabulary: the only special token that nothing uses would be the padding one.
    with pytest.raises(UsageError, match="no unused id"):
        default_mask_token_id(tokenizer, 260)
