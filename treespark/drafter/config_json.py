# SPDX-License-Identifier: Apache-2.0
"""Says what a drafter folder is, by its config.json: our own layout or another project's.

Every refusal is a `UsageError` that names the folder and the field; no code in a folder is run.
"""

from pathlib import Path
from typing import Any

from treespark.drafter.config import DrafterConfig, TreeSparkConfig
from treespark.drafter.eagle3 import Eagle3Config
from treespark.drafter.foreign_config import (
    SHARED_FIELDS,
    deepspec_eagle3_fields,
    deepspec_fields,
    dflash_fields,
    llama_eagle3_fields,
    speculators_fields,
)
from treespark.drafter.json_fields import needed, read_json, refusal
from treespark.errors import UsageError

OWN, OWN_EAGLE3 = TreeSparkConfig.model_type, Eagle3Config.model_type
DEEPSPEC, DEEPSPEC_EAGLE3 = "Qwen3DSparkModel", "Qwen3Eagle3Model"
DFLASH, SPECFORGE_DSPARK = "DFlashDraftModel", "DSparkDraftModel"
LLAMA_EAGLE3, VLLM_EAGLE3 = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"
SPECULATORS = "speculators"
# What people call each layout.
LAYOUT_NAMES = {
    OWN: "treespark",
    OWN_EAGLE3: "treespark EAGLE-3",
    DEEPSPEC: "DeepSpec DSpark or DFlash",
    DEEPSPEC_EAGLE3: "DeepSpec EAGLE-3",
    DFLASH: "z-lab or SpecForge DFlash",
    SPECFORGE_DSPARK: "SpecForge DSpark",
    LLAMA_EAGLE3: "SpecForge EAGLE-3",
    VLLM_EAGLE3: "vLLM EAGLE-3",
    SPECULATORS: "speculators",
}
_OWN_FIELDS = (*SHARED_FIELDS, "block_size", "rope_theta", "target_layer_ids", "num_target_layers")
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
    OWN_EAGLE3: (
        Eagle3Config,
        (*_OWN_FIELDS, "step_loss_decay"),
        (*_OPTIONAL_FIELDS, "qk_norm", "norm_before_residual", "draft_vocab_size"),
    ),
}


def read_config(
    folder: Path, num_target_layers: int | None = None, *, skip_code: bool = False
) -> tuple[DrafterConfig, str]:
    """Return our config for a folder and the name of its layout.

    num_target_layers: of the target, for layouts that do not say it. skip_code: accept a folder
    that asks for code of its own, which is not run. Raises `UsageError` for what is no drafter that
    we know.
    """
    raw = read_json(folder, "config.json")
    if "auto_map" in raw and not skip_code:
        raise refusal(
            folder,
            "auto_map",
            raw["auto_map"],
            "code from a model folder is never run; delete the key, or let "
            "tools/convert_checkpoint.py write a folder without it",
        )
    layout = layout_of(raw)
    if layout in _OWN:
        config_class, names, optional = _OWN[layout]
        return _build(folder, config_class, _own_fields(folder, raw, names, optional)), layout
    if layout == DEEPSPEC:
        return _build(folder, TreeSparkConfig, deepspec_fields(folder, raw)), layout
    if layout == DEEPSPEC_EAGLE3:
        fields = deepspec_eagle3_fields(folder, raw, num_target_layers)
        return _build(folder, Eagle3Config, fields), layout
    if layout in (DFLASH, SPECFORGE_DSPARK):
        fields = dflash_fields(folder, raw, num_target_layers)
        return _build(folder, TreeSparkConfig, fields), layout
    if layout in (LLAMA_EAGLE3, VLLM_EAGLE3):
        fields = llama_eagle3_fields(folder, raw, num_target_layers)
        return _build(folder, Eagle3Config, fields), layout
    if layout == SPECULATORS:
        kind, fields = speculators_fields(folder, raw, num_target_layers)
        return _build(folder, kind, fields), layout
    known = ", ".join(f"[{name!r}]" for name in LAYOUT_NAMES if name not in (*_OWN, SPECULATORS))
    raise refusal(
        folder,
        "architectures",
        raw.get("architectures") or [],
        f"supported are {known}, model_type {OWN!r}, {OWN_EAGLE3!r} and speculators_model_type",
    )


def layout_of(raw: dict[str, Any]) -> str | None:
    """Return the layout that a config.json declares; None for any other model."""
    if isinstance(raw.get("speculators_model_type"), str):
        return SPECULATORS
    if raw.get("model_type") in (OWN, OWN_EAGLE3):
        return str(raw["model_type"])
    architectures = raw.get("architectures")
    if isinstance(architectures, list) and len(architectures) == 1:
        name = architectures[0]
        foreign = isinstance(name, str) and name in LAYOUT_NAMES
        return name if foreign and name not in (OWN, OWN_EAGLE3, SPECULATORS) else None
    return None


def _build(
    folder: Path, config_class: type[DrafterConfig], fields: dict[str, Any]
) -> DrafterConfig:
    try:
        return config_class(**fields)
    except (ValueError, TypeError) as error:
        raise UsageError(f"drafter {folder}: {error}") from error


def _own_fields(
    folder: Path, raw: dict[str, Any], names: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, Any]:
    """Every field that shapes the model must be there; a field we do not know is an error."""
    fields = {name: needed(folder, raw, name) for name in names}
    fields |= {name: raw[name] for name in optional if name in raw}
    if unknown := sorted(raw.keys() - fields.keys() - set(_IGNORED_FIELDS)):
        reason = "unknown to this version of treespark"
        raise refusal(folder, unknown[0], raw[unknown[0]], reason)
    return fields
