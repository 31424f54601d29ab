# SPDX-License-Identifier: Apache-2.0
"""What a drafter folder is, and whether it fits a target: facts for people and programs."""

from pathlib import Path
from typing import Any

import torch

from treespark.drafter.auto import DRAFTERS
from treespark.drafter.config import DrafterConfig, TreeSparkConfig
from treespark.drafter.config_json import LAYOUT_NAMES, read_config
from treespark.drafter.eagle3 import Eagle3Config
from treespark.drafter.json_fields import read_json, refusal
from treespark.drafter.loading import (
    RECORD,
    TargetWeights,
    check_tensors,
    frozen_keys,
    misfits,
    read_weights,
)

# Fields of a config that the weights were trained for and nothing else shows.
TRAINED_FIELDS = (
    "block_size",
    "anchor_predicts_next",
    "mask_token_id",
    "target_layer_ids",
    "norm_before_residual",
)
# Of a record. Refuses NaN and infinity as well.
_LARGEST = 1e15


def describe(folder: Path, target: TargetWeights | None = None) -> dict[str, Any]:
    """Return what the folder is, ready for JSON; `misfits` is None without a target.

    The weights are read and compared with config.json, code in the folder is not run. Raises
    `UsageError` for what is no drafter, or is damaged.
    """
    layers = None if target is None else target.num_layers
    config, layout = read_config(folder, layers, skip_code=True)
    tensors = read_weights(folder, config, layout, target)
    with torch.device("meta"):
        drafter = DRAFTERS[type(config)](config)
    check_tensors(folder, drafter, tensors, layout)
    frozen = frozen_keys(config)
    trained = {key: tensor for key, tensor in tensors.items() if key not in frozen}
    return {
        "folder": str(folder),
        "layout": LAYOUT_NAMES[layout],
        "runs_code": "auto_map" in read_json(folder, "config.json"),
        **_architecture(config),
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "head_rows": config.num_head_rows,
        "max_position_embeddings": config.max_position_embeddings,
        "target_layer_ids": config.target_layer_ids,
        "num_target_layers": config.num_target_layers,
        "target_fingerprint": config.target_fingerprint,
        "parameters": sum(t.numel() for t in trained.values() if t.is_floating_point()),
        "dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in trained.values()}),
        "holds": [key for key in frozen if key in tensors],
        "tree": config.tree,
        "record": training_record(folder),
        "misfits": None if target is None else explained_misfits(config, target),
    }


def training_record(folder: Path) -> dict[str, Any] | None:
    """Return what the trainer wrote about the drafter, None if there is nothing.

    Raises `UsageError` for a file that is no JSON object, or whose parts are none.
    """
    if not (folder / RECORD).is_file():
        return None
    record = read_json(folder, RECORD)
    for name in ("target", "trained", "held_out"):
        if not isinstance(record.get(name) or {}, dict):
            raise refusal(folder, f"{RECORD} {name}", record[name], "need an object")
    numbers = {f"held_out.{name}": value for name, value in (record.get("held_out") or {}).items()}
    for name, value in (numbers | {"steps": record.get("steps", 0)}).items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) <= _LARGEST:
            raise refusal(folder, f"{RECORD} {name}", value, "need a number")
    return record


def _architecture(config: DrafterConfig) -> dict[str, Any]:
    """Name, depths and block layout of a drafter, in this project's words."""
    if isinstance(config, Eagle3Config):
        return {"architecture": "EAGLE-3", "block_size": config.block_size, "block_layout": None}
    assert isinstance(config, TreeSparkConfig)
    parts = [f"{config.markov_head_type} Markov head of rank {config.markov_rank}"]
    if config.enable_confidence_head:
        parts.append("confidence head")
    name = f"block drafter, {', '.join(parts)}" if config.markov_rank else "block drafter (DFlash)"
    layout = "slot 0 predicts (anchor-first)" if config.anchor_predicts_next else "in place"
    return {
        "architecture": name,
        "block_size": config.block_size,
        "block_layout": layout,
        "mask_token_id": config.mask_token_id,
    }


def explained_misfits(config: DrafterConfig, target: TargetWeights) -> list[str]:
    """Return a line for each field in which drafter and target differ."""
    return [
        f"{field}: the drafter has {ours!r}, the target {theirs!r}"
        for field, ours, theirs in misfits(config, target)
    ]
