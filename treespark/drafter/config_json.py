# SPDX-License-Identifier: Apache-2.0
"""Reads the config.json of drafter folders: our own, DeepSpec's and z-lab's.

Every refusal is a `UsageError` that names the folder and the field; no code in a folder is run.
"""

import json
import os
from pathlib import Path
from typing import Any

from treespark.drafter.config import DrafterConfig, TreeSparkConfig
from treespark.drafter.eagle3 import Eagle3Config
from treespark.errors import UsageError

OWN, OWN_EAGLE3 = TreeSparkConfig.model_type, Eagle3Config.model_type
DEEPSPEC, DEEPSPEC_EAGLE3, ZLAB = "Qwen3DSparkModel", "Qwen3Eagle3Model", "DFlashDraftModel"
# Layouts whose folders hold the target's embedding and head, too.
WITH_TARGET = (DEEPSPEC, DEEPSPEC_EAGLE3)
_SHARED_FIELDS = (
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
_OWN_FIELDS = (*_SHARED_FIELDS, "block_size", "rope_theta", "target_layer_ids", "num_target_layers")
_OPTIONAL_FIELDS = (
    "hidden_act",
    "tree",
    "target_fingerprint",
    "tie_word_embeddings",
    "initializer_range",
)
# Written by transformers or by us, without a meaning for loading.
_IGNORED_FIELDS = ("model_type", "architectures", "dtype", "transformers_version")
# Config, fields that must be there and fields that may be there, by model_type.
_OWN: dict[str, tuple[type[DrafterConfig], tuple[str, ...], tuple[str, ...]]] = {
    OWN: (
        TreeSparkConfig,
        (
            *_OWN_FIELDS,
            "mask_token_id",
            "markov_rank",
            "markov_head_type",
            "enable_confidence_head",
            "confidence_head_with_markov",
            "anchor_predicts_next",
        ),
        (*_OPTIONAL_FIELDS, "num_anchors"),
    ),
    OWN_EAGLE3: (Eagle3Config, (*_OWN_FIELDS, "step_loss_decay"), _OPTIONAL_FIELDS),
}


def read_config(folder: Path, num_target_layers: int | None = None) -> tuple[DrafterConfig, str]:
    """Return our config for a folder and the name of its layout.

    num_target_layers: of the target, for layouts that do not say it. Raises `UsageError` for what
    is no drafter that we know.
    """
    raw = read_json(folder, "config.json")
    if "auto_map" in raw:
        raise refusal(
            folder,
            "auto_map",
            raw["auto_map"],
            "code from a model folder is never run; delete the key to use the weights alone",
        )
    layout = layout_of(raw)
    if layout in _OWN:
        config_class, needed, optional = _OWN[layout]
        return _build(folder, config_class, _own_fields(folder, raw, needed, optional)), layout
    if layout == DEEPSPEC:
        return _build(folder, TreeSparkConfig, _deepspec_fields(folder, raw)), layout
    if layout == DEEPSPEC_EAGLE3:
        fields = _deepspec_eagle3_fields(folder, raw, num_target_layers)
        return _build(folder, Eagle3Config, fields), layout
    if layout == ZLAB:
        fields = _zlab_fields(folder, raw, num_target_layers)
        return _build(folder, TreeSparkConfig, fields), layout
    raise refusal(
        folder,
        "architectures",
        raw.get("architectures") or [],
        f"supported are [{DEEPSPEC!r}], [{DEEPSPEC_EAGLE3!r}], [{ZLAB!r}] and model_type "
        f"{OWN!r}, {OWN_EAGLE3!r}",
    )


def layout_of(raw: dict[str, Any]) -> str | None:
    """Return the layout that a config.json declares; None for any other model."""
    declared = [raw.get("model_type")], raw.get("architectures")
    layouts = (OWN, OWN_EAGLE3), (DEEPSPEC, DEEPSPEC_EAGLE3, ZLAB)
    for value, names in zip(declared, layouts, strict=True):
        for name in names:
            if value == [name]:
                return name
    return None


def refusal(folder: Path, field: str, value: object, reason: str) -> UsageError:
    """Return the error for a field of a drafter folder."""
    return UsageError(f"drafter {folder}: {field} is {value!r}; {reason}")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of a drafter folder; raises `UsageError`."""
    # Unlike Path.is_dir this says no, too, where the system refuses the name itself.
    if not os.path.isdir(folder):
        raise UsageError(f"drafter {folder}: no such folder")
    path = folder / name
    if not path.is_file():
        raise UsageError(f"drafter {folder}: {name} is missing; not a drafter folder")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise UsageError(f"drafter {folder}: {name} is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"drafter {folder}: {name} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UsageError(f"drafter {folder}: {name} must hold one JSON object")
    return raw


def _build(
    folder: Path, config_class: type[DrafterConfig], fields: dict[str, Any]
) -> DrafterConfig:
    try:
        return config_class(**fields)
    except (ValueError, TypeError) as error:
        raise UsageError(f"drafter {folder}: {error}") from error


def _get(folder: Path, raw: dict[str, Any], field: str) -> Any:
    if raw.get(field) is None:
        raise UsageError(f"drafter {folder}: {field} is missing in config.json")
    return raw[field]


def _own_fields(
    folder: Path, raw: dict[str, Any], needed: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, Any]:
    """Every field that shapes the model must be there; a field we do not know is an error."""
    fields = {name: _get(folder, raw, name) for name in needed}
    fields |= {name: raw[name] for name in optional if name in raw}
    if unknown := sorted(raw.keys() - fields.keys() - set(_IGNORED_FIELDS)):
        reason = "unknown to this version of treespark"
        raise refusal(folder, unknown[0], raw[unknown[0]], reason)
    return fields


def _check_plain_layers(folder: Path, raw: dict[str, Any]) -> None:
    """Refuse attention variants this backbone does not compute."""
    layer_types = raw.get("layer_types")
    plain = isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
    if layer_types is not None and not plain:
        raise refusal(folder, "layer_types", layer_types, "only 'full_attention' is supported")
    if layer_types is None and raw.get("use_sliding_window"):
        raise refusal(folder, "use_sliding_window", True, "only full attention is supported")
    if raw.get("attention_bias"):
        raise refusal(folder, "attention_bias", True, "only projections without bias")
    for field in ("rope_parameters", "rope_scaling"):
        rope = raw.get(field) or {}
        if not isinstance(rope, dict):
            raise refusal(folder, field, rope, "need an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise refusal(folder, f"{field}.rope_type", kind, "only 'default' is supported")


def _qwen3_fields(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields that all foreign layouts share, read from a copy of a Qwen3 config."""
    _check_plain_layers(folder, raw)
    fields = {name: _get(folder, raw, name) for name in _SHARED_FIELDS}
    theta = (raw.get("rope_parameters") or {}).get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise UsageError(f"drafter {folder}: rope_theta is missing in config.json")
    fields["rope_theta"] = theta
    fields["hidden_act"] = raw.get("hidden_act", "silu")
    return fields


def _deepspec_fields(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Anchor-first layout; `block_size` counts drafts."""
    fields = _qwen3_fields(folder, raw)
    for name in ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers"):
        fields[name] = _get(folder, raw, name)
    fields["markov_rank"] = _get(folder, raw, "markov_rank")
    fields["markov_head_type"] = (
        _get(folder, raw, "markov_head_type") if fields["markov_rank"] else "vanilla"
    )
    enabled = _get(folder, raw, "enable_confidence_head")
    fields["enable_confidence_head"] = enabled
    fields["confidence_head_with_markov"] = (
        _get(folder, raw, "confidence_head_with_markov") if enabled else False
    )
    fields["tie_word_embeddings"] = raw.get("tie_word_embeddings", False)
    fields["num_anchors"] = raw.get("num_anchors", 512)
    fields["anchor_predicts_next"] = True
    return fields


def _deepspec_eagle3_fields(
    folder: Path, raw: dict[str, Any], num_target_layers: int | None
) -> dict[str, Any]:
    """One layer; `ttt_length` counts the steps."""
    fields = _qwen3_fields(folder, raw)
    depth = _get(folder, raw, "draft_num_hidden_layers")
    if depth != fields["num_hidden_layers"]:
        reason = f"it must equal num_hidden_layers ({fields['num_hidden_layers']})"
        raise refusal(folder, "draft_num_hidden_layers", depth, reason)
    return {
        **fields,
        "block_size": _get(folder, raw, "ttt_length"),
        "target_layer_ids": _get(folder, raw, "target_layer_ids"),
        "num_target_layers": _num_target_layers(folder, raw, num_target_layers),
        "step_loss_decay": _get(folder, raw, "step_loss_decay"),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
    }


def _num_target_layers(folder: Path, raw: dict[str, Any], of_target: int | None) -> Any:
    found = raw.get("num_target_layers")
    if found is None and of_target is None:
        raise UsageError(
            f"drafter {folder}: num_target_layers is missing in config.json; load it with its "
            "target"
        )
    return of_target if found is None else found


def _zlab_fields(
    folder: Path, raw: dict[str, Any], num_target_layers: int | None
) -> dict[str, Any]:
    """In-place layout; its `block_size` counts the anchor, ours does not."""
    fields = _qwen3_fields(folder, raw)
    nested = _get(folder, raw, "dflash_config")
    allowed = {"mask_token_id", "target_layer_ids"}
    if not isinstance(nested, dict) or set(nested) != allowed:
        reason = f"need exactly the keys {', '.join(sorted(allowed))}"
        raise refusal(folder, "dflash_config", nested, reason)
    size = _get(folder, raw, "block_size")
    if not isinstance(size, int) or size < 2:
        raise refusal(folder, "block_size", size, "it counts the anchor: at least 2")
    return {
        **fields,
        **nested,
        "block_size": size - 1,
        "anchor_predicts_next": False,
        "num_target_layers": _num_target_layers(folder, raw, num_target_layers),
        "markov_rank": 0,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }
