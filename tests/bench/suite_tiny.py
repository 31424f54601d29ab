# SPDX-License-Identifier: Apache-2.0
"""A tiny evaluation: random target and drafters, two datasets of short prompts, a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from tests.bench.bench_world import text_target, write_prompts
from tests.serving_world import drafter, eagle3_drafter

if TYPE_CHECKING:
    from pathlib import Path

TREE = {"depth": 5, "branching": 3, "budget": 12}
METHODS: list[dict[str, Any]] = [
    {"name": "autoregressive"},
    {"name": "dspark", "drafter": "block"},
    {"name": "treespark", "drafter": "block"},
]
# Every method of the paper.
ALL_METHODS: list[dict[str, Any]] = [
    *METHODS,
    {"name": "eagle3", "drafter": "eagle3"},
    {"name": "dflash", "drafter": "dflash"},
    {"name": "dspark-threshold", "drafter": "block"},
    {"name": "dspark-tree", "drafter": "block", "budget": 8},
    {"name": "ddtree", "drafter": "dflash"},
    {"name": "calibrated", "drafter": "block", "budget": 12},
    {"name": "best-first", "drafter": "block"},
    {"name": "quota", "method": "calibrated", "drafter": "block", "stop": "budget", "budget": 12},
]


def write_suite(folder: Path, made: tuple[str, ...] = ("block",), **changes: Any) -> Path:
    """Write drafters, prompts and the recipe `suite.yaml`; return the recipe's path."""
    target = text_target()
    make = {
        "block": lambda: drafter(target, tree=TREE),
        "dflash": lambda: drafter(
            target,
            seed=1,
            markov_rank=0,
            enable_confidence_head=False,
            anchor_predicts_next=False,
            tree=TREE,
        ),
        "eagle3": lambda: eagle3_drafter(target),
    }
    for name in made:
        if not (folder / name).exists():
            make[name]().save_pretrained(folder / name)
    for name in ("gsm8k", "mt-bench"):
        write_prompts(folder / "data" / f"{name}.jsonl", "turns")
    recipe = {
        "target": {"model": str(target.path), "dtype": "float32"},
        "drafters": {name: name for name in made},
        "data": "data",
        "datasets": [{"name": "gsm8k", "count": 2}, {"name": "mt-bench", "count": 1}],
        "methods": METHODS,
        "repeats": 1,
        "max_tokens": 6,
        "out": "run",
    } | changes
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path
