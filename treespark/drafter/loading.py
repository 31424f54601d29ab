# SPDX-License-Identifier: Apache-2.0
"""Reads drafter folders: `config_json.py` says what a folder is, here its weights are checked.

Every refusal is a `UsageError` that names the folder and the field. Weights come from safetensors
only; nothing is ever initialised at random and no code in a folder is run.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from treespark.drafter.base import DrafterModel
from treespark.drafter.config import DrafterConfig
from treespark.drafter.config_json import (
    DEEPSPEC,
    DEEPSPEC_EAGLE3,
    LLAMA_EAGLE3,
    OWN,
    OWN_EAGLE3,
    SPECULATORS,
    VLLM_EAGLE3,
    read_config,
)
from treespark.drafter.foreign_tensors import (
    check_d2t,
    equal_when_rounded,
    settle_vocabulary,
    to_own_names,
)
from treespark.drafter.json_fields import read_json, refusal
from treespark.errors import UsageError

logger = logging.getLogger(__name__)

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# What a training run writes about its drafter, beside the weights.
RECORD = "treespark.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FROZEN_KEYS = ("embed_tokens.weight", "lm_head.weight")
# Layouts whose folders hold the target's embedding and head, both or neither.
_WITH_TARGET = (DEEPSPEC, DEEPSPEC_EAGLE3)
# Layouts whose folders may hold either.
_MAY_HOLD = (LLAMA_EAGLE3, VLLM_EAGLE3, SPECULATORS)


Loaded = TypeVar("Loaded", bound=DrafterModel)


@dataclass(frozen=True)
class TargetWeights:
    """What a drafter takes from its target: embedding and head [V, H], and who the target is."""

    embed_weight: Tensor
    head_weight: Tensor
    fingerprint: str | None = None
    num_layers: int | None = None


def load_folder(
    folder: Path,
    classes: Mapping[type[DrafterConfig], type[Loaded]],
    target: TargetWeights | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    keep_dtypes: bool = False,
    skip_code: bool = False,
) -> Loaded:
    """Return the drafter stored in `folder`, in evaluation mode.

    classes: the drafters that may come, by their config. dtype and device default to the target's
    embedding, without a target to what is stored and the CPU. keep_dtypes: the stored dtypes count
    with a target, too. Folders without embedding and head need `target`. skip_code: see
    `read_config`. Raises `UsageError` on any mismatch.
    """
    num_layers = None if target is None else target.num_layers
    config, layout = read_config(folder, num_layers, skip_code=skip_code)
    if type(config) not in classes:
        allowed = " or ".join(sorted(kind.model_type for kind in classes))
        raise refusal(folder, "model_type", config.model_type, f"need a drafter of {allowed}")
    if target is not None:
        check_target(folder, config, target)
        dtype = dtype or (None if keep_dtypes else target.embed_weight.dtype)
        device = device if device is not None else target.embed_weight.device
    tensors = read_weights(folder, config, layout, target)
    with torch.device("meta"):
        drafter = classes[type(config)](config)
    check_tensors(folder, drafter, tensors, layout)
    frozen = _frozen_tensors(folder, config, tensors, target)
    tensors = {
        key: frozen[key].to(device=device)
        if key in frozen
        else tensors[key].to(device=device, dtype=_stored_as(tensors[key], dtype))
        for key in drafter.state_dict()
    }
    drafter.load_state_dict(tensors, strict=True, assign=True)
    return drafter.eval()


def read_weights(
    folder: Path, config: DrafterConfig, layout: str, target: TargetWeights | None = None
) -> dict[str, Tensor]:
    """Return a folder's tensors by our names, before they are compared with its config.

    Settles in `config` whether an EAGLE-3 drafter has a head of its own. Raises `UsageError` for
    files that cannot be read and a wrong vocabulary map.
    """
    tensors = to_own_names(folder, layout, read_tensors(folder))
    if layout not in (OWN, OWN_EAGLE3):
        settle_vocabulary(folder, config, tensors, None if target is None else target.head_weight)
    elif "d2t" in tensors and config.has_own_head:
        rows, vocab_size = config.num_head_rows, config.vocab_size
        tensors["d2t"] = check_d2t(folder, tensors["d2t"], rows, vocab_size)
    return tensors


def frozen_keys(config: DrafterConfig) -> tuple[str, ...]:
    """Return the names of the tensors that are the target's."""
    return FROZEN_KEYS[:1] if config.has_own_head else FROZEN_KEYS


def _stored_as(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


# ---------------------------------------------------------------------- target and tensors


def check_target(folder: Path, config: DrafterConfig, target: TargetWeights) -> None:
    """Raise `UsageError` unless the drafter was made for a target of this shape and identity."""
    for field, ours, theirs in misfits(config, target):
        raise refusal(folder, field, ours, f"the target has {theirs!r}: another target model")


def misfits(config: DrafterConfig, target: TargetWeights) -> list[tuple[str, object, object]]:
    """Return (field, drafter's value, target's value) of everything in which they differ."""
    vocab_size, hidden_size = target.embed_weight.shape
    pairs: list[tuple[str, object, object]] = [
        ("vocab_size", config.vocab_size, vocab_size),
        ("hidden_size", config.hidden_size, hidden_size),
    ]
    if target.num_layers is not None:
        pairs.append(("num_target_layers", config.num_target_layers, target.num_layers))
    if target.fingerprint is not None and config.target_fingerprint is not None:
        pairs.append(("target_fingerprint", config.target_fingerprint, target.fingerprint))
    return [(field, ours, theirs) for field, ours, theirs in pairs if ours != theirs]


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
                f"opened; convert it to {WEIGHTS_NAME} where it is trusted: load it there with "
                "torch.load(..., weights_only=True), write it with safetensors.torch.save_file"
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
    weight_map = read_json(folder, INDEX_NAME).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(map(_is_shard_name, names)):
        raise refusal(folder, f"{INDEX_NAME} weight_map", names, "need names of safetensors files")
    return sorted(set(names))


def _is_shard_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def check_tensors(
    folder: Path, drafter: DrafterModel, tensors: dict[str, Tensor], layout: str
) -> None:
    """Raise `UsageError` unless names and shapes are those the config asks for, all values finite.

    Embedding and head of the target must be absent in our own and DFlash folders; in DeepSpec
    folders both or neither are there, in others either may be.
    """
    expected = {key: tuple(t.shape) for key, t in drafter.state_dict().items()}
    frozen = frozen_keys(drafter.config)
    stored = [key for key in frozen if key in tensors]
    left_out = [key for key in frozen if layout not in _MAY_HOLD or key not in stored]
    if layout not in _WITH_TARGET or not stored:
        expected = {key: shape for key, shape in expected.items() if key not in left_out}
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
        if key == "d2t":
            continue
        if not tensors[key].is_floating_point():
            raise UsageError(f"drafter {folder}: {key} holds {tensors[key].dtype}, need floats")
        if not tensors[key].sum(dtype=torch.float32).isfinite():
            raise UsageError(f"drafter {folder}: {key} holds NaN or infinite values")


def _frozen_tensors(
    folder: Path, config: DrafterConfig, tensors: dict[str, Tensor], target: TargetWeights | None
) -> dict[str, Tensor]:
    """Embedding and head: the target's if the folder has none or equal ones, else the folder's."""
    keys = frozen_keys(config)
    if target is None:
        if any(key not in tensors for key in keys):
            raise UsageError(
                f"drafter {folder}: it has no embed_tokens and lm_head; load it with its target"
            )
        return {key: tensors[key] for key in keys}
    frozen = {}
    for key, weight in zip(keys, (target.embed_weight, target.head_weight), strict=False):
        stored = tensors.get(key)
        if stored is None or equal_when_rounded(stored, weight):
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
