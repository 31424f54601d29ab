# SPDX-License-Identifier: Apache-2.0
"""What a run writes about its drafter into the drafter's folder, for `treespark doctor`.

For whom it was made, what its config has to say for it to work, and how far its drafts reached when
it was trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treespark import __version__
from treespark.data.jsonl import write_json_atomic
from treespark.drafter.inspect import TRAINED_FIELDS
from treespark.drafter.loading import RECORD
from treespark.errors import UsageError
from treespark.target.template import template_fingerprint, tokenizer_fingerprint
from treespark.training.metrics import read_metrics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from treespark.drafter.config import DrafterConfig
    from treespark.recipe import Recipe
    from treespark.target.model import TargetModel

_HELD_OUT = "acceptance/"


def maker(recipe: Recipe, target: TargetModel, config: DrafterConfig) -> dict[str, Any]:
    """Return who made a drafter, for which target, and its fields that must not change."""
    return {
        "treespark": __version__,
        "target": {
            "model": recipe.target.model.name,
            "fingerprint": target.fingerprint,
            "dtype": str(target.dtype).removeprefix("torch."),
            "template": _of_tokenizer(target, template_fingerprint),
            "tokenizer": _of_tokenizer(target, tokenizer_fingerprint),
        },
        "trained": {
            name: getattr(config, name) for name in TRAINED_FIELDS if hasattr(config, name)
        },
    }


def _of_tokenizer(target: TargetModel, fingerprint: Callable[[Any], str]) -> str | None:
    """None for a target without a tokenizer or a template: rows of ids need neither."""
    try:
        return fingerprint(target.tokenizer)
    except UsageError:
        return None


def write(folder: Path, made: dict[str, Any], metrics: Path) -> None:
    """Write the record of the drafter in `folder`, with the last acceptance on held-out rows."""
    held_out: dict[str, float] = {}
    steps = 0
    for line in read_metrics(metrics):
        steps = max(steps, line["step"] + 1)
        values = {
            name.removeprefix(_HELD_OUT): value
            for name, value in line.items()
            if name.startswith(_HELD_OUT)
        }
        held_out = values or held_out
    write_json_atomic(folder / RECORD, {**made, "steps": steps, "held_out": held_out})
