# SPDX-License-Identifier: Apache-2.0
"""What `treespark doctor` reads off a target's and a drafter's folders, before it drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from treespark.drafter.config import TreeSparkConfig
from treespark.drafter.inspect import TRAINED_FIELDS, explained_misfits
from treespark.target.template import template_fingerprint, tokenizer_fingerprint

if TYPE_CHECKING:
    from treespark.bench.views import Views
    from treespark.drafter.auto import AnyDrafter
    from treespark.drafter.config import DrafterConfig
    from treespark.drafter.loading import TargetWeights
    from treespark.target.model import TargetModel

# Older releases have known faults in their own guard against hostile pickles (CVE-2026-24747).
_SAFE_TORCH = (2, 10)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool
    detail: str


def check_folders(
    model: TargetModel,
    config: DrafterConfig,
    record: dict[str, Any] | None,
    weights: TargetWeights,
) -> list[Check]:
    """Return the checks that need no forward pass."""
    problems = explained_misfits(config, weights)
    told = "" if config.target_fingerprint else "; the drafter does not say which target it is for"
    checks = [Check("target", not problems, "; ".join(problems) or f"sizes fit{told}")]
    checks += [_block_layout(config), _training_record(config, record)]
    checks.append(_template(model, record))
    checks.append(_vocabulary(model, config))
    checks.append(_torch())
    return [check for check in checks if check.detail]


def check_views(model: TargetModel, drafter: AnyDrafter, views: Views) -> list[Check]:
    """Return the checks of what the drafter is given and computes from it."""
    taps = drafter.config.target_layer_ids
    assert taps is not None
    bad = sorted({layer for (layer, _), out in views.outputs.items() if not out.isfinite().all()})
    detail = f"layers {taps} exist and are finite"
    if used := [layer for layer in bad if layer in taps]:
        detail = f"layers {used} give NaN or infinity in {model.dtype}"
    checks = [Check("features", not used, detail)]
    tables = {
        "embed_tokens.weight": (drafter.embed_tokens.weight, model.embed_weight),
        "lm_head.weight": (drafter.lm_head.weight, model.head_weight),
    }
    if drafter.config.has_own_head:
        tables.pop("lm_head.weight")
    foreign = [k for k, (own, its) in tables.items() if own.data_ptr() != its.data_ptr()]
    checks.append(
        Check(
            "embedding and head",
            not foreign,
            f"{', '.join(foreign)} of the drafter's folder differs from the target's: made for "
            "another target"
            if foreign
            else "the target's",
        )
    )
    row = views.rows[0]
    anchors = torch.tensor([[row.prompt_len]], device=model.device)
    ids = torch.from_numpy(row.token_ids)[None].to(model.device)
    with torch.no_grad():
        keep = torch.ones_like(anchors, dtype=torch.bool)
        hidden = drafter.training_blocks(ids, views([row], taps), anchors, keep)
    finite = bool(hidden.isfinite().all())
    name = str(drafter.compute_dtype).removeprefix("torch.")
    said = f"drafts in {name} are finite" if finite else f"drafts in {name} are NaN or infinite"
    checks.append(Check("numbers", finite, said))
    mask = getattr(drafter.config, "mask_token_id", None)
    if mask is not None:
        seen = [r.id for r in views.rows if (r.token_ids == mask).any()]
        what = f"prompt {seen[0]} or its answer has it" if seen else "in no prompt and no answer"
        checks.append(Check("mask token", not seen, f"id {mask}: {what}"))
    return checks


def _block_layout(config: DrafterConfig) -> Check:
    if not isinstance(config, TreeSparkConfig):
        return Check("block layout", True, f"none: {config.block_size} steps, one after the other")
    how = "slot 0 predicts depth 1" if config.anchor_predicts_next else "slot d predicts depth d"
    slots = f"{config.num_slots} slots, anchor included"
    return Check("block layout", True, f"{config.block_size} depths from {slots}; {how}")


def _training_record(config: DrafterConfig, record: dict[str, Any] | None) -> Check:
    if record is None:
        return Check("training record", True, "none in the drafter's folder")
    trained = record.get("trained") or {}
    changed = [
        f"{name} was {trained[name]!r} in training, config.json says {getattr(config, name)!r}"
        for name in TRAINED_FIELDS
        if name in trained and trained[name] != getattr(config, name, None)
    ]
    return Check("training record", not changed, "; ".join(changed) or "agrees with config.json")


def _template(model: TargetModel, record: dict[str, Any] | None) -> Check:
    recorded = (record or {}).get("target") or {}
    now = {
        "template": template_fingerprint(model.tokenizer),
        "tokenizer": tokenizer_fingerprint(model.tokenizer),
    }
    changed = [
        f"the target's {name} is not the one of training"
        for name, value in now.items()
        if recorded.get(name) not in (None, value)
    ]
    known = any(recorded.get(name) for name in now)
    same = "as in training" if known else "the drafter does not say which it was trained with"
    return Check("template", not changed, "; ".join(changed) or same)


def _vocabulary(model: TargetModel, config: DrafterConfig) -> Check:
    """The mask is no token that a text can hold, and the tokenizer has no id beyond the table."""
    problems = []
    if len(model.tokenizer) > model.vocab_size:
        problems.append(
            f"the tokenizer has {len(model.tokenizer)} ids, vocab_size is {model.vocab_size}"
        )
    if isinstance(config, TreeSparkConfig) and config.mask_token_id in model.eos_token_ids:
        problems.append(f"mask_token_id {config.mask_token_id} is what ends an answer")
    detail = f"{config.vocab_size} tokens"
    if config.num_head_rows < config.vocab_size:
        detail += f", of which {config.num_head_rows} can be drafted"
    return Check("vocabulary", not problems, "; ".join(problems) or detail)


def _torch() -> Check:
    numbers = torch.__version__.split("+")[0].split(".")[:2]
    safe = tuple(int(part) for part in numbers if part.isdigit()) >= _SAFE_TORCH
    older = (
        f"torch {torch.__version__} is older than 2.10: never open pickled weights with it; "
        "treespark itself opens none"
    )
    return Check("torch", True, "" if safe else older)
