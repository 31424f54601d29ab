# SPDX-License-Identifier: Apache-2.0
"""What a drafter takes from its target, read from the target's folder without loading the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from safetensors import safe_open

from treespark.errors import UsageError
from treespark.target.folder import check_folder, fingerprint, load_config

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Tables:
    """Embedding and head [V, H] in the stored dtype, and who the target is."""

    embed_weight: Tensor
    head_weight: Tensor
    fingerprint: str
    num_layers: int


def read_tables(folder: Path) -> Tables:
    """Return the tables of a target folder.

    Raises UsageError as loading the target does, and where a table is missing.
    """
    files = check_folder(folder)
    config = load_config(folder)
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in {_EMBEDDING, _HEAD} & set(weights.keys()):
                found[name] = weights.get_tensor(name)
    if config.tie_word_embeddings:
        found.pop(_HEAD, None)
    for name in (_EMBEDDING,) if config.tie_word_embeddings else (_EMBEDDING, _HEAD):
        if name not in found:
            raise UsageError(f"target {folder}: no tensor {name}")
    return Tables(
        found[_EMBEDDING],
        found.get(_HEAD, found[_EMBEDDING]),
        fingerprint(config, files),
        config.num_hidden_layers,
    )
