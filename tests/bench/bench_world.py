# SPDX-License-Identifier: Apache-2.0
"""Folders for the bench commands: a tiny target with a tokenizer, a random drafter, prompts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.serving_world import TEXT_VOCAB, drafter, world

if TYPE_CHECKING:
    from pathlib import Path

    from treespark.target.model import TargetModel

QUESTIONS = ("how are you", "[bold]1 + 1[/bold]?", "write a loop")


def text_target() -> TargetModel:
    """A target of one token per byte."""
    return world(vocab=TEXT_VOCAB, eos=256, seed=3).target


def write_drafter(folder: Path) -> Path:
    """A random drafter of that target."""
    made = drafter(text_target(), tree={"depth": 5, "branching": 3, "budget": 12})
    made.save_pretrained(folder)
    return folder


def write_prompts(path: Path, key: str = "prompt") -> Path:
    """A prompt file of three rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"id": f"{path.stem}-{i}", key: [text] if key == "turns" else text}
        for i, text in enumerate(QUESTIONS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
