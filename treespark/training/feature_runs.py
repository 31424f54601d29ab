# SPDX-License-Identifier: Apache-2.0
"""The verbs `features build` and `features verify`: fill a store ahead of training, and check one.

Verifying computes random rows again. What was stored and what the target says now must have the
same best token everywhere and distributions closer than a total variation of 1e-3; on the machine
that filled the store they are equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from treespark.data.batches import load_rows
from treespark.data.feature_identity import Identity
from treespark.data.feature_store import FeatureStore, remove_bad_shards
from treespark.data.features import OnlineFeatures, stored_features
from treespark.data.interrupt import StopRequest
from treespark.device import rank_device
from treespark.errors import UsageError
from treespark.recipe import load_recipe
from treespark.sizes import readable
from treespark.target.model import TargetModel
from treespark.training import setup
from treespark.training.ranks import join

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from treespark.recipe import Recipe

logger = logging.getLogger(__name__)

_MAX_TV = 1e-3
# A wrong layer differs by its whole norm; another device's bfloat16 by far less than this.
_MAX_TAPS_ERROR = 0.02
# Positions whose distributions are compared at a time: two [positions, V] in float32.
_POSITIONS = 256


def run_build(recipe: Recipe, *, on_bad_shard: str = "fail") -> str:
    """Store the features of all rows that the recipe stores; return a line about the store.

    on_bad_shard: "fail" refuses a shard that is missing or of another length than listed; "rebuild"
    reads all shards and computes the rows of the damaged ones again.
    Started by torchrun, the processes share the rows. Interrupted (SIGTERM, Ctrl-C) it writes what
    it has and exits with 128 + the signal; it goes on from the rows that are there. Raises
    UsageError as `stored_features` does, and for a recipe without a store.
    """
    data = recipe.data
    if data.features == "online":
        raise UsageError(
            "data.features online: stores nothing; set data.features=store or mixed, and data.store"
        )
    target = setup.load_target(recipe)
    rows, dropped = load_rows(
        data.continuations,
        max_tokens=data.max_tokens,
        block_size=recipe.drafter.block_size,
        vocab_size=target.vocab_size,
        max_context=target.max_context,
    )
    for reason, count in dropped.items():
        logger.info("dropped %d rows: %s", count, reason)
    with StopRequest() as stop, join(target.device) as ranks, contextlib.ExitStack() as opened:
        if on_bad_shard == "rebuild":
            if ranks.is_first:
                _remove_bad_shards(recipe, target)
            ranks.wait()
        source = opened.enter_context(stored_features(target, data, rows))
        source.store.check_sizes()
        # Which rows are whose must not depend on how far another process is.
        own = source.chosen[ranks.rank :: ranks.world_size]
        todo = [row for row in own if row not in source.store]
        for row in tqdm(todo, unit="row", desc="features", disable=not ranks.is_first):
            source.fill(row)
            if stop:
                break
        source.store.flush()
        ranks.wait()
        source.store.refresh()
    store = source.store
    if stop:
        logger.warning("stopped with %d rows stored; run it again to go on", len(store))
        raise SystemExit(stop.exit_code)
    return f"{data.store}: {len(store)} rows, {readable(store.num_bytes)}"


def _remove_bad_shards(recipe: Recipe, target: TargetModel) -> None:
    data = recipe.data
    assert data.store is not None
    for name, reason in remove_bad_shards(data.store, Identity.of(target, data.taps_dtype)).items():
        logger.warning("%s: %s; its rows are computed again", name, reason)


@dataclasses.dataclass(frozen=True)
class RowCheck:
    """A row computed again.  top1: share of positions with the same best token.  tv: largest total
    variation.  taps_error: norm of the difference over the norm.
    """

    id: str
    shard: str
    top1: float
    tv: float
    taps_error: float

    @property
    def problem(self) -> str | None:
        """What is wrong with it; a NaN is."""
        if self.top1 == 1.0 and self.tv < _MAX_TV and self.taps_error < _MAX_TAPS_ERROR:
            return None
        return (
            f"row {self.id}: top-1 agreement {self.top1:.4f}, TV {self.tv:.1e}, features differ by "
            f"{self.taps_error:.1e}"
        )


def run_verify(
    source: Path,
    overrides: Sequence[str] = (),
    *,
    target: Path | None = None,
    num_rows: int = 8,
    seed: int = 0,
    as_json: bool = False,
) -> bool:
    """Read all shards of a store, compute `num_rows` random rows again, print what is found.

    source: a recipe with a store, or a store's folder; then `target` is its target, None for one
    whose rows are not computed again. Returns whether all is well. Raises UsageError where there is
    no store, and for one of another target.
    """
    store, model = _open(source, overrides, target)
    if not store.shards:
        raise UsageError(f"feature store {store.folder}: holds no rows")
    found = list(tqdm(store.check_shards(), total=len(store.shards), unit="shard", desc="verify"))
    bad = {shard.path.name: reason for shard, reason in found if reason}
    places = [
        (key, shard.path.name)
        for shard, _ in sorted(found, key=lambda pair: pair[0].path)
        for key in shard.keys
        if shard.path.name not in bad
    ]
    checks = []
    if model is not None and places:
        rng = np.random.default_rng(seed)
        drawn = rng.choice(len(places), size=min(num_rows, len(places)), replace=False)
        checks = [_check_row(store, model, *places[i]) for i in sorted(drawn.tolist())]
    bad |= {check.shard: check.problem for check in checks if check.problem}
    result = {
        "store": str(store.folder),
        "shards": len(store.shards),
        "rows": len(store),
        "bytes": store.num_bytes,
        "checked": [dataclasses.asdict(check) for check in checks],
        "bad": bad,
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n" if as_json else _text(result))
    return not bad


def _open(
    source: Path, overrides: Sequence[str], target: Path | None
) -> tuple[FeatureStore, TargetModel | None]:
    """The store, and its target with the store's taps."""
    if not source.exists():
        raise UsageError(f"{source}: no such recipe, and no such folder of a feature store")
    if not source.is_dir():
        if target is not None:
            raise UsageError(f"--target {target}: a recipe names its target itself")
        recipe = load_recipe(source, overrides)
        if recipe.data.store is None:
            raise UsageError(f"{source}: has no data.store")
        if not recipe.data.store.is_dir():
            raise UsageError(f"data.store {recipe.data.store}: no such folder")
        model = setup.load_target(recipe)
        return FeatureStore(recipe.data.store, Identity.of(model, recipe.data.taps_dtype)), model
    if overrides:
        raise UsageError(f"--set {overrides[0]}: only with a recipe")
    identity = Identity.read(source)
    if target is None:
        return FeatureStore(source, identity), None
    model = TargetModel.from_pretrained(target, dtype=identity.dtype, device=rank_device())
    model.set_taps(identity.target_layer_ids)
    return FeatureStore(source, Identity.of(model, identity.taps_dtype)), model


def _check_row(store: FeatureStore, model: TargetModel, key: str, shard: str) -> RowCheck:
    row, kept = store.load(key)
    again = store.layout.keep(row, *OnlineFeatures(model).exact(row))
    was, now = (store.layout.view(k, model.device) for k in (kept, again))
    top1, tv = _agreement(model, was.last_hidden, now.last_hidden)
    difference = (was.features.float() - now.features.float()).norm() / now.features.float().norm()
    return RowCheck(row.id, shard, top1, tv, float(difference))


def _agreement(model: TargetModel, was: Tensor, now: Tensor) -> tuple[float, float]:
    """Share of equal best tokens, and the largest total variation, of states [k, H]."""
    same, distances = [], []
    for a, b in zip(was.split(_POSITIONS), now.split(_POSITIONS), strict=True):
        p, q = (model.logits(part).softmax(-1) for part in (a, b))
        same.append(p.argmax(-1) == q.argmax(-1))
        distances.append((p - q).abs().sum(-1) / 2)
    return float(torch.cat(same).float().mean()), float(torch.cat(distances).max())


def _text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['store']}: {result['rows']} rows in {result['shards']} shards, "
        f"{readable(result['bytes'])}"
    ]
    for row in result["checked"]:
        lines.append(
            f"row {row['id']}: top-1 agreement {row['top1']:.4f}, TV {row['tv']:.1e}, features "
            f"differ by {row['taps_error']:.1e}"
        )
    if not result["checked"]:
        lines.append("no row was computed again (--target names the model of a store)")
    lines += [f"bad: {name}: {reason}" for name, reason in result["bad"].items()]
    lines.append(f"{len(result['bad'])} of {result['shards']} shards bad")
    return "\n".join(lines) + "\n"
