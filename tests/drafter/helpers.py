# SPDX-License-Identifier: Apache-2.0
"""Tiny drafters, checkpoint folders and fixture cases for the drafter tests."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from treespark.drafter.config import TreeSparkConfig
from treespark.drafter.loading import FROZEN_KEYS, TargetWeights
from treespark.drafter.modeling import TreeSparkDrafter

VOCAB, HIDDEN = 97, 32


def tiny_config(**changes: Any) -> TreeSparkConfig:
    """A 3-layer drafter for a target of 8 layers, hidden 32, vocabulary 97; head_dim 12."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "block_size": 5,
        "target_layer_ids": [1, 3, 5],
        "num_target_layers": 8,
        "mask_token_id": 96,
        "markov_rank": 8,
        "num_anchors": 4,
    }
    return TreeSparkConfig(**{**fields, **changes})


def tiny_target(seed: int = 0, vocab: int = VOCAB, hidden: int = HIDDEN) -> TargetWeights:
    """Random embedding and head of a target of 8 layers."""
    generator = torch.Generator().manual_seed(seed)
    return TargetWeights(
        embed_weight=torch.randn(vocab, hidden, generator=generator),
        head_weight=torch.randn(vocab, hidden, generator=generator),
        fingerprint=f"target-{seed}",
        num_layers=8,
    )


def tiny_drafter(seed: int = 0, **changes: Any) -> TreeSparkDrafter:
    """A drafter with weights large enough that every part of it matters."""
    torch.manual_seed(seed)
    target = tiny_target(seed)
    drafter = TreeSparkDrafter.init_from_target(
        tiny_config(target_fingerprint=target.fingerprint, **changes),
        target.embed_weight,
        target.head_weight,
    )
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.requires_grad:
                scale = 0.1 if "norm" in name else 0.25
                parameter.add_(torch.randn_like(parameter) * scale)
    return drafter


def features(seed: int, *shape: int, taps: int = 3) -> Tensor:
    """Random feature rows [*shape, taps * HIDDEN]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, taps * HIDDEN, generator=generator)


@dataclass
class ParityCase:
    """One folder of dspark_parity: the loaded drafter, its tensors and its reference losses."""

    drafter: TreeSparkDrafter
    tensors: dict[str, Tensor]
    losses: dict[str, float]

    def __getitem__(self, name: str) -> Tensor:
        """Return one stored tensor."""
        return self.tensors[name]


def load_case(folder: Path) -> ParityCase:
    """Read a dspark_parity folder through the loader under test."""
    return ParityCase(
        drafter=TreeSparkDrafter.from_pretrained(folder),
        tensors=load_file(folder / "case.safetensors"),
        losses=json.loads((folder / "losses.json").read_text()),
    )


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {k: t.clone() for k, t in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def zlab_folder(folder: Path, block_size: int = 6) -> TreeSparkDrafter:
    """Write a z-lab DFlash folder by hand; return the drafter that it must load as."""
    drafter = tiny_drafter(
        anchor_predicts_next=False,
        block_size=block_size - 1,
        markov_rank=0,
        enable_confidence_head=False,
        confidence_head_with_markov=False,
    )
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim hidden_act rms_norm_eps rope_theta max_position_embeddings "
        "num_target_layers"
    )
    raw = {name: getattr(drafter.config, name) for name in names.split()}
    raw |= {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 3, 5]},
        "layer_types": ["full_attention"] * 3,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {k: t for k, t in drafter.state_dict().items() if k not in FROZEN_KEYS}
    save_file(tensors, folder / "model.safetensors")
    return drafter


def assert_same(a: TreeSparkDrafter, b: TreeSparkDrafter) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[k], right[k]) for k in left)
