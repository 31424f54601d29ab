# SPDX-License-Identifier: Apache-2.0
"""Reads drafter folders: our own, DeepSpec DSpark/DFlash and z-lab DFlash, decided by config.json.

Every refusal is a `UsageError` that names the folder and the field. Weights come from safetensors
only; nothing is ever initialised at random and no code in a folder is run.
"""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from treespark.drafter.config import TreeSparkConfig
from treespark.drafter.modeling import TreeSparkDrafter
from treespark.errors import UsageError

logger = logging.getLogger(__name__)

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FROZEN_KEYS = ("embed_tokens.weight", "lm_head.weight")
DEEPSPEC, ZLAB, OWN = "Qwen3DSparkModel", "DFlashDraftModel", "treespark"
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
    "block_size",
)
OWN_FIELDS = (
    *SHARED_FIELDS,
    "rope_theta",
    "target_layer_ids",
    "num_target_layers",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "anchor_predicts_next",
)
OPTIONAL_FIELDS = (
    "hidden_act",
    "num_anchors",
    "tree",
    "target_fingerprint",
    "tie_word_embeddings",
    "initializer_range",
)
# Written by transformers or by us, without a meaning for loading.
IGNORED_FIELDS = ("model_type", "architectures", "dtype", "transformers_version")


@dataclass(frozen=True)
class TargetWeights:
    """What a drafter takes from its target: embedding and head [V, H], and who the target is."""

    embed_weight: Tensor
    head_weight: Tensor
    fingerprint: str | None = None
    num_layers: int | None = None


def load_folder(
    folder: Path,
    target: TargetWeights | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    drafter_class: type[TreeSparkDrafter] = TreeSparkDrafter,
) -> TreeSparkDrafter:
    """Return the drafter stored in `folder`, in evaluation mode.

    dtype and device default to the target's embedding, without a target to what is stored and the
    CPU. Folders without embedding and head need `target`. Raises `UsageError` on any mismatch.
    """
    config, layout = read_config(folder, target)
    if target is not None:
        check_target(folder, config, target)
        dtype = dtype or target.embed_weight.dtype
        device = device if device is not None else target.embed_weight.device
    tensors = read_tensors(folder)
    with torch.device("meta"):
        drafter = drafter_class(config)
    check_tensors(folder, drafter, tensors, layout)
    frozen = _frozen_tensors(folder, tensors, target)
    tensors = {
        key: frozen[key].to(device=device)
        if key in FROZEN_KEYS
        else tensors[key].to(device=device, dtype=dtype)
        for key in drafter.state_dict()
    }
    drafter.load_state_dict(tensors, strict=True, assign=True)
    return drafter.eval()


# ---------------------------------------------------------------------- config.json


def read_config(folder: Path, target: TargetWeights | None = None) -> tuple[TreeSparkConfig, str]:
    """Return our config for a folder and its layout name: OWN, DEEPSPEC or ZLAB."""
    raw = _read_json(folder, "config.json")
    if "auto_map" in raw:
        raise _refusal(
            folder,
            "auto_map",
            raw["auto_map"],
            "code from a model folder is never run; delete the key to use the weights alone",
        )
    architectures = raw.get("architectures") or []
    if raw.get("model_type") == OWN:
        return _build(folder, _own_fields(folder, raw)), OWN
    if architectures == [DEEPSPEC]:
        return _build(folder, _deepspec_fields(folder, raw)), DEEPSPEC
    if architectures == [ZLAB]:
        return _build(folder, _zlab_fields(folder, raw, target)), ZLAB
    raise _refusal(
        folder,
        "architectures",
        architectures,
        f"supported are [{DEEPSPEC!r}], [{ZLAB!r}] and model_type {OWN!r}",
    )


def _refusal(folder: Path, field: str, value: object, reason: str) -> UsageError:
    return UsageError(f"drafter {folder}: {field} is {value!r}; {reason}")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
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


def _build(folder: Path, fields: dict[str, Any]) -> TreeSparkConfig:
    try:
        return TreeSparkConfig(**fields)
    except (ValueError, TypeError) as error:
        raise UsageError(f"drafter {folder}: {error}") from error


def _get(folder: Path, raw: dict[str, Any], field: str) -> Any:
    if raw.get(field) is None:
        raise UsageError(f"drafter {folder}: {field} is missing in config.json")
    return raw[field]


def _own_fields(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Every field that shapes the model must be there; a field we do not know is an error."""
    fields = {name: _get(folder, raw, name) for name in OWN_FIELDS}
    fields |= {name: raw[name] for name in OPTIONAL_FIELDS if name in raw}
    if unknown := sorted(raw.keys() - fields.keys() - set(IGNORED_FIELDS)):
        reason = "unknown to this version of treespark"
        raise _refusal(folder, unknown[0], raw[unknown[0]], reason)
    return fields


def _check_plain_layers(folder: Path, raw: dict[str, Any]) -> None:
    """Refuse attention variants this backbone does not compute."""
    layer_types = raw.get("layer_types")
    plain = isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
    if layer_types is not None and not plain:
        raise _refusal(folder, "layer_types", layer_types, "only 'full_attention' is supported")
    if layer_types is None and raw.get("use_sliding_window"):
        raise _refusal(folder, "use_sliding_window", True, "only full attention is supported")
    if raw.get("attention_bias"):
        raise _refusal(folder, "attention_bias", True, "only projections without bias")
    for field in ("rope_parameters", "rope_scaling"):
        rope = raw.get(field) or {}
        if not isinstance(rope, dict):
            raise _refusal(folder, field, rope, "need an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise _refusal(folder, f"{field}.rope_type", kind, "only 'default' is supported")


def _qwen3_fields(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields that both foreign layouts share, read from a copy of a Qwen3 config."""
    _check_plain_layers(folder, raw)
    fields = {name: _get(folder, raw, name) for name in SHARED_FIELDS}
    theta = (raw.get("rope_parameters") or {}).get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise UsageError(f"drafter {folder}: rope_theta is missing in config.json")
    fields["rope_theta"] = theta
    fields["hidden_act"] = raw.get("hidden_act", "silu")
    return fields


def _deepspec_fields(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Anchor-first layout; `block_size` counts drafts."""
    fields = _qwen3_fields(folder, raw)
    for name in ("mask_token_id", "target_layer_ids", "num_target_layers", "markov_rank"):
        fields[name] = _get(folder, raw, name)
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


def _zlab_fields(folder: Path, raw: dict[str, Any], target: TargetWeights | None) -> dict[str, Any]:
    """In-place layout; its `block_size` counts the anchor, ours does not."""
    fields = _qwen3_fields(folder, raw)
    nested = _get(folder, raw, "dflash_config")
    allowed = {"mask_token_id", "target_layer_ids"}
    if not isinstance(nested, dict) or set(nested) != allowed:
        reason = f"need exactly the keys {', '.join(sorted(allowed))}"
        raise _refusal(folder, "dflash_config", nested, reason)
    size = fields["block_size"]
    if not isinstance(size, int) or size < 2:
        raise _refusal(folder, "block_size", size, "it counts the anchor: at least 2")
    num_layers = raw.get("num_target_layers")
    if num_layers is None and target is not None:
        num_layers = target.num_layers
    if num_layers is None:
        raise UsageError(f"drafter {folder}: num_target_layers is missing in config.json")
    return {
        **fields,
        **nested,
        "block_size": size - 1,
        "anchor_predicts_next": False,
        "num_target_layers": num_layers,
        "markov_rank": 0,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }


# ---------------------------------------------------------------------- target and tensors


def check_target(folder: Path, config: TreeSparkConfig, target: TargetWeights) -> None:
    """Raise `UsageError` unless the drafter was made for a target of this shape and identity."""
    vocab_size, hidden_size = target.embed_weight.shape
    pairs: list[tuple[str, object, object]] = [
        ("vocab_size", config.vocab_size, vocab_size),
        ("hidden_size", config.hidden_size, hidden_size),
    ]
    if target.num_layers is not None:
        pairs.append(("num_target_layers", config.num_target_layers, target.num_layers))
    if target.fingerprint is not None and config.target_fingerprint is not None:
        pairs.append(("target_fingerprint", config.target_fingerprint, target.fingerprint))
    for field, ours, theirs in pairs:
        if ours != theirs:
            raise _refusal(folder, field, ours, f"the target has {theirs!r}: another target model")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the folder's safetensors file, or of the shards its index names."""
    if (folder / WEIGHTS_NAME).is_file():
        names = [WEIGHTS_NAME]
    elif (folder / INDEX_NAME).is_file():
        names = _shard_names(folder)
    else:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise UsageError(
                f"drafter {folder}: {pickles[0]} is a pickle file, which can run code and is never "
                f"opened; convert it to {WEIGHTS_NAME}"
            )
        raise UsageError(f"drafter {folder}: {WEIGHTS_NAME} is missing")
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            part = load_file(folder / name)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"drafter {folder}: {name} cannot be read: {error}") from error
        if doubled := sorted(tensors.keys() & part.keys()):
            raise UsageError(f"drafter {folder}: tensor {doubled[0]} is in two files")
        tensors.update(part)
    return tensors


def _shard_names(folder: Path) -> list[str]:
    weight_map = _read_json(folder, INDEX_NAME).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(map(_is_shard_name, names)):
        raise _refusal(folder, f"{INDEX_NAME} weight_map", names, "need names of safetensors files")
    return sorted(set(names))


def _is_shard_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def check_tensors(
    folder: Path, drafter: TreeSparkDrafter, tensors: dict[str, Tensor], layout: str
) -> None:
    """Raise `UsageError` unless names and shapes are those the config asks for, all values finite.

    Embedding and head must be absent in our own and z-lab folders; in DeepSpec folders both or
    neither are there.
    """
    expected = {key: tuple(t.shape) for key, t in drafter.state_dict().items()}
    stored = [key for key in FROZEN_KEYS if key in tensors]
    if layout != DEEPSPEC or not stored:
        expected = {key: shape for key, shape in expected.items() if key not in FROZEN_KEYS}
    for word, names in (
        ("missing", expected.keys() - tensors.keys()),
        ("unexpected", tensors.keys() - expected.keys()),
    ):
        if names:
            first = ", ".join(sorted(names)[:3])
            raise UsageError(f"drafter {folder}: {len(names)} tensors are {word}: {first}")
    for key, shape in expected.items():
        found = tuple(tensors[key].shape)
        if found != shape:
            hint = ""
            if key.endswith("q_proj.weight") or key.endswith("q_norm.weight"):
                hint = f" (head_dim {drafter.config.head_dim} in config.json)"
            raise UsageError(
                f"drafter {folder}: {key} is {list(found)}, config.json asks for "
                f"{list(shape)}{hint}"
            )
        if not tensors[key].is_floating_point():
            raise UsageError(f"drafter {folder}: {key} holds {tensors[key].dtype}, need floats")
        if not tensors[key].sum(dtype=torch.float32).isfinite():
            raise UsageError(f"drafter {folder}: {key} holds NaN or infinite values")


def _frozen_tensors(
    folder: Path, tensors: dict[str, Tensor], target: TargetWeights | None
) -> dict[str, Tensor]:
    """Embedding and head: the target's if the folder has none or equal ones, else the folder's."""
    if target is None:
        if any(key not in tensors for key in FROZEN_KEYS):
            raise UsageError(
                f"drafter {folder}: it has no embed_tokens and lm_head; load it with its target"
            )
        return {key: tensors[key] for key in FROZEN_KEYS}
    frozen = {}
    for key, weight in zip(FROZEN_KEYS, (target.embed_weight, target.head_weight), strict=True):
        stored = tensors.get(key)
        if stored is None or _equal_when_rounded(stored, weight):
            frozen[key] = weight.detach()
            continue
        logger.warning(
            "drafter %s: its %s differs from the target's and is kept; it was made for other "
            "weights, expect shorter acceptance",
            folder,
            key,
        )
        frozen[key] = stored.to(weight.dtype)
    return frozen


def _equal_when_rounded(stored: Tensor, weight: Tensor) -> bool:
    """Whether the tensors agree in the coarser of their two dtypes."""
    return torch.equal(stored.to(weight), weight) or torch.equal(weight.to(stored), stored)
