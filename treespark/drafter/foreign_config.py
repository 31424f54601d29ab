# SPDX-License-Identifier: Apache-2.0
"""Fields of our configs from the config.json of other projects, one function a layout.

What differs between them and is lost on whoever ignores it: whether `block_size` counts the anchor
and slot 0 predicts (the block layout), and whether a tapped layer is named by its own number, as
here, or by the layer that reads its output, one higher. Sources: config classes and loaders of
DeepSpec, z-lab/dflash, SpecForge, SGLang, vLLM and speculators.
"""

import logging
from pathlib import Path
from typing import Any

from treespark.drafter.config import DrafterConfig, TreeSparkConfig
from treespark.drafter.eagle3 import Eagle3Config
from treespark.drafter.json_fields import layer_numbers, needed, nested, refusal
from treespark.errors import UsageError

logger = logging.getLogger(__name__)

SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)
# Steps of an EAGLE-3 drafter whose folder does not say how many it was trained for: SpecForge's
# default length of its training-time test.
_EAGLE3_STEPS = 7
_EAGLE3_TAPS = "eagle_aux_hidden_state_layer_ids"
_NO_MARKOV = {
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
# Keys of `dflash_config` and the values with which this backbone computes what they ask for.
_PLAIN_DFLASH: dict[str, tuple[Any, ...]] = {
    "attention_mode": ("gqa",),
    "causal": (False,),
    "use_swa": (False,),
    "shift_label": (False,),
    "projector_type": ("dflash", "dspark"),
}
_READ_DFLASH = {
    "mask_token_id",
    "target_layer_ids",
    "block_size",
    "num_target_layers",
    "sample_from_anchor",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
}
# Of training alone.
_SKIPPED_DFLASH = {"confidence_head_alpha", "loss_decay_gamma", "mask_token"}


def check_plain_layers(folder: Path, raw: dict[str, Any]) -> None:
    """Refuse attention variants this backbone does not compute."""
    layer_types = raw.get("layer_types")
    plain = isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
    if layer_types is not None and not plain:
        raise refusal(folder, "layer_types", layer_types, "only 'full_attention' is supported")
    if layer_types is None and raw.get("use_sliding_window"):
        raise refusal(folder, "use_sliding_window", True, "only full attention is supported")
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field):
            raise refusal(folder, field, raw[field], "only projections without bias")
    for field in ("rope_parameters", "rope_scaling"):
        rope = raw.get(field) or {}
        if not isinstance(rope, dict):
            raise refusal(folder, field, rope, "need an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise refusal(folder, f"{field}.rope_type", kind, "only 'default' is supported")


def qwen3_fields(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields that all foreign layouts share, read from the config of a Qwen3 or Llama model."""
    check_plain_layers(folder, raw)
    fields = {name: needed(folder, raw, name) for name in SHARED_FIELDS}
    theta = (raw.get("rope_parameters") or {}).get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise UsageError(f"drafter {folder}: rope_theta is missing in config.json")
    fields["rope_theta"] = theta
    fields["hidden_act"] = raw.get("hidden_act", "silu")
    return fields


def _num_target_layers(folder: Path, raw: dict[str, Any], of_target: int | None) -> Any:
    found = raw.get("num_target_layers")
    if found is None and of_target is None:
        raise UsageError(
            f"drafter {folder}: num_target_layers is missing in config.json; load it with its "
            "target"
        )
    return of_target if found is None else found


# ---------------------------------------------------------------------- DeepSpec


def deepspec_fields(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Anchor-first layout; `block_size` counts drafts."""
    fields = qwen3_fields(folder, raw)
    for name in ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers"):
        fields[name] = needed(folder, raw, name)
    fields["tie_word_embeddings"] = raw.get("tie_word_embeddings", False)
    fields["num_anchors"] = raw.get("num_anchors", 512)
    fields["anchor_predicts_next"] = True
    return fields | _heads(folder, raw)


def _heads(folder: Path, raw: dict[str, Any], within: str = "") -> dict[str, Any]:
    """Markov and confidence heads of a DSpark config."""
    rank = needed(folder, raw, "markov_rank", within)
    enabled = needed(folder, raw, "enable_confidence_head", within)
    return {
        "markov_rank": rank,
        "markov_head_type": (
            needed(folder, raw, "markov_head_type", within) if rank else "vanilla"
        ),
        "enable_confidence_head": enabled,
        "confidence_head_with_markov": (
            needed(folder, raw, "confidence_head_with_markov", within) if enabled else False
        ),
    }


def deepspec_eagle3_fields(
    folder: Path, raw: dict[str, Any], num_target_layers: int | None
) -> dict[str, Any]:
    """One layer; `ttt_length` counts the steps."""
    fields = qwen3_fields(folder, raw)
    depth = needed(folder, raw, "draft_num_hidden_layers")
    if depth != fields["num_hidden_layers"]:
        reason = f"it must equal num_hidden_layers ({fields['num_hidden_layers']})"
        raise refusal(folder, "draft_num_hidden_layers", depth, reason)
    return {
        **fields,
        "block_size": needed(folder, raw, "ttt_length"),
        "target_layer_ids": needed(folder, raw, "target_layer_ids"),
        "num_target_layers": _num_target_layers(folder, raw, num_target_layers),
        "step_loss_decay": needed(folder, raw, "step_loss_decay"),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
    }


# ---------------------------------------------------------------------- z-lab, SpecForge


def dflash_fields(
    folder: Path, raw: dict[str, Any], num_target_layers: int | None
) -> dict[str, Any]:
    """z-lab's and SpecForge's DFlash, in place, and SpecForge's DSpark, anchor-first.

    In place `block_size` counts the anchor, ours does not. Where it is given,
    `dflash_config.sample_from_anchor` says which of the two a folder is.
    """
    fields = qwen3_fields(folder, raw)
    options = nested(folder, raw, "dflash_config")
    _check_dflash_options(folder, options)
    for name in ("mask_token_id", "target_layer_ids"):
        fields[name] = needed(folder, options, name, "dflash_config")
    is_dspark = options.get("projector_type") == "dspark" or raw["architectures"] != [
        "DFlashDraftModel"
    ]
    size = options.get("block_size", raw.get("block_size"))
    counted = {"block_size": size, "num_target_layers": raw.get("num_target_layers")}
    counted |= {name: options[name] for name in counted if name in options}
    fields |= _block(folder, counted, options.get("sample_from_anchor", is_dspark), "dflash_config")
    fields["num_target_layers"] = _num_target_layers(folder, counted, num_target_layers)
    if not is_dspark:
        return fields | _NO_MARKOV
    if "sample_from_anchor" not in options:
        logger.warning(
            "drafter %s: dflash_config.sample_from_anchor is missing; taken as true, as SpecForge "
            "trains DSpark",
            folder,
        )
    # SpecForge writes the heads' fields beside `dflash_config` or in it.
    return fields | _heads(folder, {**raw, **options}, "dflash_config")


def _check_dflash_options(folder: Path, options: dict[str, Any]) -> None:
    for key, value in options.items():
        if key in _PLAIN_DFLASH and (value is None or value in _PLAIN_DFLASH[key]):
            continue
        if key in _PLAIN_DFLASH:
            allowed = " or ".join(map(repr, _PLAIN_DFLASH[key]))
            raise refusal(folder, f"dflash_config.{key}", value, f"only {allowed} is supported")
        if key not in _READ_DFLASH | _SKIPPED_DFLASH:
            reason = "unknown to this version of treespark"
            raise refusal(folder, f"dflash_config.{key}", value, reason)


def _block(
    folder: Path, raw: dict[str, Any], anchor_predicts_next: object, within: str = ""
) -> dict[str, Any]:
    """Layout and number of drafts of a block whose size counts slots."""
    if not isinstance(anchor_predicts_next, bool):
        name = f"{within}.sample_from_anchor" if within else "sample_from_anchor"
        raise refusal(folder, name, anchor_predicts_next, "true or false is needed")
    size = needed(folder, raw, "block_size")
    least = 1 if anchor_predicts_next else 2
    if type(size) is not int or size < least:
        reason = "it counts drafts" if anchor_predicts_next else "it counts the anchor"
        raise refusal(folder, "block_size", size, f"{reason}: at least {least}")
    return {
        "block_size": size if anchor_predicts_next else size - 1,
        "anchor_predicts_next": anchor_predicts_next,
    }


def llama_eagle3_fields(
    folder: Path, raw: dict[str, Any], num_target_layers: int | None
) -> dict[str, Any]:
    """SpecForge's EAGLE-3, as SGLang and vLLM load it: a Llama layer without head norms."""
    fields = _llama_fields(folder, raw)
    rows = raw.get("draft_vocab_size")
    layers = _num_target_layers(folder, raw, num_target_layers)
    return {
        **fields,
        "block_size": _EAGLE3_STEPS,
        "target_layer_ids": _eagle3_taps(folder, raw, layers),
        "num_target_layers": layers,
        "qk_norm": False,
        "norm_before_residual": raw.get("norm_before_residual", False),
        "draft_vocab_size": fields["vocab_size"] if rows is None else rows,
    }


def _llama_fields(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """`qwen3_fields`, with what a Llama config may leave to its defaults."""
    heads = needed(folder, raw, "num_attention_heads")
    filled = {
        "num_key_value_heads": heads,
        "head_dim": needed(folder, raw, "hidden_size") // heads if type(heads) is int else None,
        **{name: value for name, value in raw.items() if value is not None},
    }
    for field in ("target_hidden_size", "norm_before_fc"):
        if raw.get(field) not in (None, False, raw.get("hidden_size")):
            reason = "only features as wide as the drafter and without a norm are supported"
            raise refusal(folder, field, raw[field], reason)
    return qwen3_fields(folder, filled)


def _eagle3_taps(folder: Path, raw: dict[str, Any], num_layers: Any) -> list[int]:
    """The tapped layers.

    SGLang reads them in `eagle_config`, by their own numbers; vLLM beside it, by the number of the
    layer that reads their output. Without either both tap the same three.
    """
    name = _EAGLE3_TAPS
    inner = None
    if raw.get("eagle_config") is not None:
        inner = nested(folder, raw, "eagle_config").get(name)
    outer = raw.get(name)
    found = [
        layer_numbers(folder, f"{where}{name}", value, shift)
        for where, value, shift in (("eagle_config.", inner, 0), ("", outer, -1))
        if value is not None
    ]
    if not found:
        return _default_eagle3_taps(folder, num_layers)
    if found[0] != found[-1]:
        reason = f"eagle_config has {found[0]}; here each number must be one higher"
        raise refusal(folder, name, outer, reason)
    return found[0]


def _default_eagle3_taps(folder: Path, num_layers: Any) -> list[int]:
    """The three layers that SGLang and vLLM tap where a folder names none."""
    if type(num_layers) is not int:
        raise refusal(folder, "num_target_layers", num_layers, "need a number of layers")
    return [1, num_layers // 2 - 1, num_layers - 4]


# ---------------------------------------------------------------------- speculators


def speculators_fields(
    folder: Path, raw: dict[str, Any], num_target_layers: int | None
) -> tuple[type[DrafterConfig], dict[str, Any]]:
    """Config class and fields of an EAGLE-3, DFlash or DSpark export of speculators."""
    kind = raw["speculators_model_type"]
    layer = _layer_config(folder, nested(folder, raw, "transformer_layer_config"))
    steps = _speculative_tokens(raw)
    layers = _num_target_layers(folder, raw, num_target_layers)
    if kind == "eagle3":
        fields = _llama_fields(folder, {**layer, "norm_before_fc": raw.get("norm_before_fc")})
        taps = raw.get(_EAGLE3_TAPS)
        return Eagle3Config, {
            **fields,
            "block_size": _EAGLE3_STEPS if steps is None else steps,
            "target_layer_ids": (
                _default_eagle3_taps(folder, layers)
                if taps is None
                else layer_numbers(folder, _EAGLE3_TAPS, taps, -1)
            ),
            "num_target_layers": layers,
            "qk_norm": layer["model_type"] == "qwen3",
            "norm_before_residual": needed(folder, raw, "norm_before_residual"),
            "draft_vocab_size": needed(folder, raw, "draft_vocab_size"),
        }
    if kind not in ("dflash", "dspark"):
        reason = "supported are 'eagle3', 'dflash' and 'dspark'"
        raise refusal(folder, "speculators_model_type", kind, reason)
    return TreeSparkConfig, _speculators_block(folder, raw, layer, layers)


def _speculators_block(
    folder: Path, raw: dict[str, Any], layer: dict[str, Any], num_target_layers: Any
) -> dict[str, Any]:
    is_dspark = raw["speculators_model_type"] == "dspark"
    if raw.get("sample_from_anchor") is None and is_dspark:
        raise UsageError(
            f"drafter {folder}: sample_from_anchor is missing in config.json; older exports do not "
            "say whether slot 0 predicts (true) or not (false): add it, and let `treespark doctor` "
            "check it"
        )
    for field, plain in (("projector_type", "dflash"), ("shift_label", False)):
        if raw.get(field) not in (None, plain):
            raise refusal(folder, field, raw[field], f"only {plain!r} is supported")
    fields = qwen3_fields(folder, layer)
    rows = needed(folder, raw, "draft_vocab_size")
    if rows != fields["vocab_size"]:
        reason = f"a block drafter needs the whole vocabulary, {fields['vocab_size']} tokens"
        raise refusal(folder, "draft_vocab_size", rows, reason)
    name = "aux_hidden_state_layer_ids"
    return {
        **fields,
        **_block(folder, raw, raw.get("sample_from_anchor", False)),
        **(_heads(folder, raw) if is_dspark else _NO_MARKOV),
        "mask_token_id": needed(folder, raw, "mask_token_id"),
        "target_layer_ids": layer_numbers(folder, name, needed(folder, raw, name), -1),
        "num_target_layers": num_target_layers,
    }


def _layer_config(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The whole config of a drafter's layers: speculators writes what differs from its defaults."""
    from transformers import AutoConfig

    kind = raw.get("model_type")
    if kind not in ("llama", "qwen3"):
        reason = "supported are 'llama' and 'qwen3'"
        raise refusal(folder, "transformer_layer_config.model_type", kind, reason)
    given = {name: value for name, value in raw.items() if name != "model_type"}
    try:
        whole: dict[str, Any] = AutoConfig.for_model(kind, **given).to_dict()
    # Whatever a field of the file leads transformers to.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"drafter {folder}: transformer_layer_config: {reason}") from None
    return whole


def _speculative_tokens(raw: dict[str, Any]) -> Any:
    """Drafts of a round by the first proposal method, None if the folder does not say."""
    config = raw.get("speculators_config")
    methods = config.get("proposal_methods") if isinstance(config, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    return first.get("speculative_tokens") if isinstance(first, dict) else None
