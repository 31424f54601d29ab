# SPDX-License-Identifier: Apache-2.0
"""Config fields: defaults, refusals that name the field, tap rule, parameter counts."""

import json

import pytest
import torch
from transformers import AutoConfig

from tests.drafter.helpers import tiny_config, tiny_drafter
from treespark.drafter import auto
from treespark.drafter.config import (
    TreeSparkConfig,
    count_parameters,
    default_target_layer_ids,
)
from treespark.drafter.modeling import TreeSparkDrafter
from treespark.errors import UsageError


@pytest.mark.parametrize(
    ("num_target_layers", "num_draft_layers", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (40, 5, [1, 10, 19, 28, 37]),
        (30, 3, [1, 14, 27]),
        (30, 1, [15]),
    ],
)
def test_default_taps_follow_the_published_rule(num_target_layers, num_draft_layers, expected):
    assert default_target_layer_ids(num_target_layers, num_draft_layers) == expected


@pytest.mark.parametrize(("n", "m"), [(6, 5), (3, 2), (1, 1)])
def test_default_taps_of_a_shallow_target_are_refused(n, m):
    with pytest.raises(UsageError, match="target_layer_ids"):
        default_target_layer_ids(n, m)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_layer_ids", [1, 3, 7]),  # the last of 8 layers
        ("target_layer_ids", [1, 3, 9]),
        ("target_layer_ids", [-1, 3]),
        ("target_layer_ids", [3, 1]),
        ("target_layer_ids", [1, 1]),
        ("target_layer_ids", []),
        ("target_layer_ids", ["1"]),
        ("mask_token_id", 97),
        ("mask_token_id", -1),
        ("mask_token_id", None),
        ("block_size", 0),
        ("block_size", 2.0),
        ("block_size", True),
        ("head_dim", 13),
        ("num_key_value_heads", 3),
        ("vocab_size", "97"),
        ("markov_rank", -1),
        ("markov_head_type", "lstm"),
        ("anchor_predicts_next", "yes"),
        ("confidence_head_with_markov", None),
        ("rope_theta", 0),
        ("rms_norm_eps", "small"),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", True),
        ("tree", {"depth": 5, "branching": 4}),
        ("tree", {"depth": 6, "branching": 4, "budget": 8}),
        ("tree", {"depth": 5, "branching": 0, "budget": 8}),
        ("tree", {"depth": 5, "branching": 10**7, "budget": 8}),
        ("tree", {"depth": 5, "branching": 4, "budget": 10**6}),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**12),
        ("head_dim", 10**6),
        ("block_size", 65),
        ("markov_rank", 10**9),
        ("max_position_embeddings", 5),
        ("rope_theta", float("inf")),
        ("rms_norm_eps", float("nan")),
        ("initializer_range", 10**400),
    ],
)
def test_a_field_that_cannot_work_is_named(field, value):
    with pytest.raises(UsageError, match=rf"drafter config: {field}"):
        tiny_config(**{field: value})


def test_absurd_number_of_layers_is_refused_before_their_taps_are_listed():
    with pytest.raises(UsageError, match="drafter config: num_hidden_layers"):
        tiny_config(num_hidden_layers=10**9, target_layer_ids=None)


def test_confidence_on_markov_needs_a_markov_head():
    with pytest.raises(UsageError, match="confidence_head_with_markov"):
        tiny_config(markov_rank=0)
    tiny_config(markov_rank=0, confidence_head_with_markov=False)
    tiny_config(markov_rank=0, enable_confidence_head=False)


def test_config_survives_json(tmp_path):
    config = tiny_config(anchor_predicts_next=False, head_dim=8, target_fingerprint="abc")
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "treespark"
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, auto.TreeSparkConfig)
    assert loaded.to_dict() == {**config.to_dict(), "_name_or_path": str(tmp_path)}


def test_counts_equal_the_published_sizes():
    """Qwen3-4B drafters: 615.2 M trainable at head_dim 128, 680.8 M at 192, 777.9 M frozen."""
    for head_dim, millions in ((128, 615.2), (192, 680.8)):
        counts = count_parameters(TreeSparkConfig(head_dim=head_dim))
        assert round(counts["trainable"] / 1e6, 1) == millions
        assert round(counts["frozen"] / 1e6, 1) == 777.9


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn", "anchor_predicts_next": False},
        {"markov_rank": 0, "enable_confidence_head": False},
        {"confidence_head_with_markov": False, "head_dim": 20},
    ],
)
def test_counts_equal_the_real_parameters(changes):
    drafter = tiny_drafter(**changes)
    counts = count_parameters(drafter.config)
    sizes = [(p.requires_grad, p.numel()) for p in drafter.parameters()]
    assert counts["trainable"] == sum(n for grad, n in sizes if grad)
    assert counts["frozen"] == sum(n for grad, n in sizes if not grad)


def test_fresh_weights_are_normal_with_plain_norms_and_zero_biases():
    torch.manual_seed(0)
    table = torch.randn(97, 32)
    config = tiny_config(markov_head_type="gated", initializer_range=0.02)
    drafter = TreeSparkDrafter.init_from_target(config, table, table)
    for name, parameter in drafter.named_parameters():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            assert parameter.data_ptr() == table.data_ptr()
            assert not parameter.requires_grad
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            # 5 standard errors of a sample standard deviation.
            slack = 5 * 0.02 / (2 * parameter.numel()) ** 0.5
            assert abs(parameter.std().item() - 0.02) < slack, name


def test_a_target_of_another_size_is_refused_when_attached():
    with pytest.raises(UsageError, match="embedding"):
        TreeSparkDrafter.init_from_target(tiny_config(), torch.randn(90, 32), torch.randn(97, 32))
    with pytest.raises(UsageError, match="head"):
        TreeSparkDrafter.init_from_target(tiny_config(), torch.randn(97, 32), torch.randn(97, 16))
