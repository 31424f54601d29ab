# SPDX-License-Identifier: Apache-2.0
"""A tiny target, random rows and a recipe for the training tests."""

import json
import math
import random
from pathlib import Path
from typing import Any

from tests.serving_world import TEXT_VOCAB, World, world
from treespark.recipe import Recipe

MASK = 270


def tiny_world() -> World:
    """A random float32 Llama with the byte tokenizer; ids from 258 on are never used."""
    return world("llama", TEXT_VOCAB, eos=256)


def random_rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Ragged rows of 3 to 8 prompt and 12 to 24 answer tokens."""
    draw = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [draw.randrange(256) for _ in range(draw.randint(low, high))]

    return [
        {"id": f"r{i}", "prompt_token_ids": ids(3, 8), "output_token_ids": ids(12, 24)}
        for i in range(number)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write JSONL; return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(
    folder: Path, rows: Path, model: Path | None = None, **changes: dict[str, Any]
) -> Recipe:
    """A float32 recipe of 12 steps; `changes` are merged into its sections."""
    values: dict[str, dict[str, Any]] = {
        "target": {"model": model or tiny_world().target.path, "dtype": "float32"},
        "drafter": {
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "intermediate_size": 48,
            "block_size": 4,
            "markov_rank": 8,
            "mask_token_id": MASK,
            "target_layer_ids": [0, 2],
        },
        "policy": {"depth": 4, "branching": 2, "budget": 6},
        "data": {"continuations": [rows], "num_anchors": 6, "tree_anchors": 3, "max_tokens": 64},
        "losses": {},
        "optim": {"lr": 1e-3},
        "train": {
            "max_steps": 12,
            "global_batch": 2,
            "dtype": "float32",
            "save_every": 100,
            "eval_every": 0,
        },
        "output": {"dir": folder},
    }
    for section, values_of in changes.items():
        values[section] |= values_of
    return Recipe.model_validate(values)


EAGLE3: dict[str, dict[str, Any]] = {
    "drafter": {
        "architecture": "eagle3",
        "num_hidden_layers": 1,
        "markov_rank": 0,
        "enable_confidence_head": False,
        "mask_token_id": None,
    },
    "policy": {"branching": 1, "budget": 4},
    "losses": {
        "ce": 0.0,
        "l1": 0.0,
        "confidence": 0.0,
        "survival": 0.0,
        "coverage": 0.0,
        "soft_ce": 1.0,
        # Each step weighs 0.8 of the one before.
        "gamma": -1 / math.log(0.8),
    },
}


def eagle3(folder: Path, rows: Path, **changes: dict[str, Any]) -> Recipe:
    """The recipe of an EAGLE-3 drafter; `changes` are merged into its sections."""
    sections = {name: EAGLE3.get(name, {}) | changes.get(name, {}) for name in EAGLE3 | changes}
    return recipe(folder, rows, **sections)
