# SPDX-License-Identifier: Apache-2.0
"""A drafter as it would be if its config said something else, and how far its drafts then reach.

Acceptance is that of greedy chains, simulated on answers of the target (`training/evaluate.py`), so
that a probe costs drafter passes only.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from treespark.bench.views import ViewedFeatures, taps_of
from treespark.drafter.config import TreeSparkConfig
from treespark.drafter.eagle3 import Eagle3Config
from treespark.target.families import default_mask_token_id
from treespark.training.evaluate import simulated_acceptance
from treespark.tree.policy import MAX_DEPTH, TreePolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from treespark.bench.views import Views
    from treespark.drafter.auto import AnyDrafter
    from treespark.target.model import TargetModel

# Tokens by which published drafters call their mask.
_MASK_TOKENS = ("<|MASK|>", "<|mask|>", "<mask>", "[MASK]")


@dataclass(frozen=True)
class Probe:
    """A drafter that differs in one thing.  cause: what that is about.  change: what it is."""

    cause: str
    change: str
    drafter: AnyDrafter


def nearby_layers(target: TargetModel, drafter: AnyDrafter) -> list[int]:
    """The drafter's layers and their neighbours, as far as they can be tapped."""
    found = {tap + shift for tap in taps_of(drafter) for shift in (-1, 0, 1)}
    return sorted(found & set(range(target.num_layers - 1)))


def acceptance(drafter: AnyDrafter, views: Views, policy: TreePolicy | None = None) -> float:
    """Return committed tokens a round of the policy, by default of the drafter's greedy chain."""
    depth = drafter.config.block_size
    chain = policy or TreePolicy(depth, 1, depth)
    longest = max(len(row.token_ids) - row.prompt_len for row in views.rows)
    counts = simulated_acceptance(
        drafter,
        views.rows,
        ViewedFeatures(views, taps_of(drafter)),
        {"one": chain},
        max_tokens=longest,
    )
    committed, rounds = counts["one"]
    return committed / max(1, rounds)


def twin(drafter: AnyDrafter, dtype: torch.dtype | None = None, **changes: Any) -> AnyDrafter:
    """Return the same weights under a changed config, in another dtype if that is given."""
    config = copy.deepcopy(drafter.config)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        made = type(drafter)(config)
    weights = {
        key: tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
        for key, tensor in drafter.state_dict().items()
    }
    made.load_state_dict(weights, strict=True, assign=True)
    return made.eval()


def probes(target: TargetModel, drafter: AnyDrafter) -> Iterator[Probe]:
    """Every alternative that is worth a try, one change each."""
    config = drafter.config
    if isinstance(config, TreeSparkConfig):
        yield from _layouts(drafter)
    yield from _layer_offsets(target, drafter)
    if isinstance(config, TreeSparkConfig):
        yield from _masks(target, drafter)
    if isinstance(config, Eagle3Config):
        other = not config.norm_before_residual
        change = f"norm_before_residual {str(other).lower()}"
        yield Probe("normed residual", change, twin(drafter, norm_before_residual=other))
    if drafter.compute_dtype != torch.float32:
        yield Probe("dtype", "the drafter in float32", twin(drafter, torch.float32))


def _layouts(drafter: AnyDrafter) -> Iterator[Probe]:
    """The other block layout: over as many slots, and over as many depths."""
    config = drafter.config
    assert isinstance(config, TreeSparkConfig)
    predicts = config.anchor_predicts_next
    for depth in (config.block_size + (-1 if predicts else 1), config.block_size):
        if 1 <= depth <= MAX_DEPTH:
            change = f"anchor_predicts_next {str(not predicts).lower()}, block_size {depth}"
            made = twin(drafter, anchor_predicts_next=not predicts, block_size=depth)
            yield Probe("block layout", change, made)


def _layer_offsets(target: TargetModel, drafter: AnyDrafter) -> Iterator[Probe]:
    for shift in (-1, 1):
        shifted = [tap + shift for tap in taps_of(drafter)]
        if shifted[0] >= 0 and shifted[-1] < target.num_layers - 1:
            made = twin(drafter, target_layer_ids=shifted)
            yield Probe("layer offset", f"target_layer_ids {shifted}", made)


def _masks(target: TargetModel, drafter: AnyDrafter) -> Iterator[Probe]:
    config = drafter.config
    assert isinstance(config, TreeSparkConfig)
    for token_id in _mask_candidates(target):
        if token_id != config.mask_token_id:
            made = twin(drafter, mask_token_id=token_id)
            yield Probe("mask token", f"mask_token_id {token_id}", made)


def _mask_candidates(target: TargetModel) -> list[int]:
    """Ids that a drafter's mask is likely to have, the likeliest first."""
    tokenizer = target.tokenizer
    named = [tokenizer.convert_tokens_to_ids(name) for name in _MASK_TOKENS]
    special = [getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "unk", "bos")]
    found = [
        default_mask_token_id(tokenizer, target.vocab_size),
        *(i for i in named if i is not None and i != tokenizer.unk_token_id),
        *(i for i in special if i is not None),
        *sorted(target.eos_token_ids),
        target.vocab_size - 1,
        0,
    ]
    return [i for i in dict.fromkeys(found) if 0 <= i < target.vocab_size]
