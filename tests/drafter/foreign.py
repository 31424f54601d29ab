# SPDX-License-Identifier: Apache-2.0
"""Folders of other projects' layouts by tools/make_tiny_drafters.py, and a target they fit."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import torch

from treespark.drafter.auto import DRAFTERS, AnyDrafter
from treespark.drafter.loading import TargetWeights, load_folder


def _tool() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "make_tiny_drafters.py"
    spec = importlib.util.spec_from_file_location("make_tiny_drafters", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = _tool()
LAYOUTS = MAKER.LAYOUTS


def foreign_target(seed: int = 5) -> TargetWeights:
    """Random embedding and head of the target that the tool's drafters fit."""
    generator = torch.Generator().manual_seed(seed)
    shape = (MAKER.VOCAB_SIZE, MAKER.HIDDEN)
    embed, head = (torch.randn(shape, generator=generator) for _ in range(2))
    return TargetWeights(embed, head, "foreign", MAKER.NUM_LAYERS)


def make(layout: str, folder: Path, seed: int = 0) -> Path:
    """Write a folder of the layout, without what asks for code to be run."""
    MAKER.make_tiny_drafter(layout, folder, MAKER.Maker(seed=seed))
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def load(folder: Path, target: TargetWeights | None = None) -> AnyDrafter:
    """Load any drafter next to the target."""
    return load_folder(folder, DRAFTERS, target or foreign_target())
