# SPDX-License-Identifier: Apache-2.0
"""The training flow, top-down: rows -> features -> block -> replay -> losses -> step -> checkpoint.

A step's graphs are kept for all of its micro-batches and differentiated once, so every denominator
is the sum over the whole optimizer step (algorithms.md 2.3) and the result does not depend on the
micro-batch size.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from treespark import device as devices
from treespark.data.batches import (
    Row,
    collate,
    load_rows,
    micro_batches,
    rows_of_step,
    split_holdout,
)
from treespark.data.features import FeatureSource, feature_source
from treespark.training import checkpoint, setup
from treespark.training.evaluate import simulated_acceptance
from treespark.training.losses import LossTerm, combine
from treespark.training.masters import MasterWeights
from treespark.training.metrics import MetricsLog
from treespark.training.objective import micro_batch_terms
from treespark.training.stop import StopRequest

if TYPE_CHECKING:
    from pathlib import Path

    from treespark.drafter.modeling import TreeSparkDrafter
    from treespark.recipe import Recipe
    from treespark.target.model import TargetModel

logger = logging.getLogger(__name__)
_MAX_SKIPPED_IN_A_ROW = 3


def train(recipe: Recipe, *, resume: str = "auto") -> Path:
    """Train the recipe's drafter and return the folder it was exported to.

    Interrupted runs (SIGTERM, Ctrl-C) save a checkpoint first; `resume="auto"` continues from the
    newest one with bit-identical results on a CPU, `resume="never"` refuses a folder that already
    holds one.
    """
    devices.seed_everything(recipe.train.seed)
    target = setup.load_target(recipe)
    rows, holdout = _rows(recipe, target)
    drafter = setup.new_drafter(recipe, target, rows)
    features = feature_source(target, recipe.data.features, recipe.data.store)
    masters = MasterWeights(drafter)
    optimizer = setup.optimizer(recipe, masters)
    total_steps = setup.total_steps(recipe, len(rows))
    output = recipe.output.dir
    settings = setup.settings(recipe, target, len(rows))
    first = setup.start(output, masters, optimizer, settings, resume)
    log = MetricsLog(output / "metrics.jsonl", first_step=first)
    logger.info(
        "%s: steps %d..%d of %d, %d rows", output, first, total_steps, total_steps, len(rows)
    )

    skipped = 0
    with (
        StopRequest() as stop,
        tqdm(total=total_steps, initial=first, unit="step", desc="train") as bar,
    ):
        for step in range(first, total_steps):
            started = time.perf_counter()
            learning_rate = setup.set_learning_rate(recipe, optimizer, step, total_steps)
            outcome = _step(recipe, drafter, masters, optimizer, features, rows, step, total_steps)
            skipped = _count_skipped(outcome, skipped, step)
            log.add(step, {**outcome, "lr": learning_rate, "step_s": time.perf_counter() - started})
            bar.update()
            if step % 10 == 0:
                bar.set_postfix(
                    loss=f"{outcome['loss']:.3f}", ce=f"{outcome.get('ce', math.nan):.3f}"
                )
            done = step + 1
            if recipe.train.eval_every and (
                done % recipe.train.eval_every == 0 or done == total_steps
            ):
                log.add(step, _evaluate(recipe, drafter, holdout, features))
            if stop.requested or done % recipe.train.save_every == 0 or done == total_steps:
                log.flush()
                checkpoint.save(
                    output, done, masters.parameters, optimizer, settings=settings, memory={}
                )
            if stop.requested and done < total_steps:
                logger.warning(
                    "stopped after step %d of %d; the same command continues", done, total_steps
                )
                raise SystemExit(stop.exit_code)
    return setup.export(recipe, drafter, output / "drafter")


def _rows(recipe: Recipe, target: TargetModel) -> tuple[list[Row], list[Row]]:
    rows, dropped = load_rows(
        recipe.data.continuations,
        max_tokens=recipe.data.max_tokens,
        block_size=recipe.drafter.block_size,
        vocab_size=target.vocab_size,
    )
    for reason, count in dropped.items():
        logger.info("dropped %d rows: %s", count, reason)
    return split_holdout(rows, recipe.data.holdout_rows, recipe.train.seed)


def _step(
    recipe: Recipe,
    drafter: TreeSparkDrafter,
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    features: FeatureSource,
    rows: list[Row],
    step: int,
    total_steps: int,
) -> dict[str, Any]:
    """One optimizer update; returns what was measured. A non-finite gradient changes nothing."""
    weights, objective = setup.loss_weights(recipe, step, total_steps), setup.objective(recipe)
    terms: dict[str, LossTerm] = {}
    counters: dict[str, LossTerm] = {}
    for draws in micro_batches(
        rows_of_step(rows, step, recipe.train.global_batch, recipe.train.seed),
        recipe.train.micro_batch,
    ):
        batch = collate(
            draws,
            num_anchors=recipe.data.num_anchors,
            num_tree_anchors=recipe.data.tree_anchors,
            seed=recipe.train.seed,
        )
        new_terms, new_counters = micro_batch_terms(
            drafter, batch.to(drafter.device), *features(batch.rows), objective, weights
        )
        _add(terms, new_terms)
        _add(counters, new_counters)
    loss, values = combine(terms, weights)
    loss.backward()
    masters.collect_gradients()
    norm = torch.nn.utils.clip_grad_norm_(masters.parameters.values(), recipe.optim.grad_clip)
    finite = bool(torch.isfinite(norm))
    if finite:
        optimizer.step()
        masters.publish()
    optimizer.zero_grad(set_to_none=True)
    return {
        "loss": float(loss.detach()),
        **{name: float(value) for name, value in values.items()},
        **{name: [round(x, 5) for x in term.value.tolist()] for name, term in counters.items()},
        "grad_norm": float(norm),
        "skipped": not finite,
    }


def _add(total: dict[str, LossTerm], new: dict[str, LossTerm]) -> None:
    for name, term in new.items():
        total[name] = total[name] + term if name in total else term


def _count_skipped(outcome: dict[str, Any], skipped: int, step: int) -> int:
    if not outcome["skipped"]:
        return 0
    logger.warning("step %d: gradient is not finite, step skipped", step)
    if skipped + 1 >= _MAX_SKIPPED_IN_A_ROW:
        raise RuntimeError(
            f"{_MAX_SKIPPED_IN_A_ROW} non-finite steps in a row, the last was {step}: "
            "lower optim.lr"
        )
    return skipped + 1


def _evaluate(
    recipe: Recipe, drafter: TreeSparkDrafter, holdout: list[Row], features: FeatureSource
) -> dict[str, Any]:
    """Acceptance lengths of chain and trees on the held-out rows."""
    policy = setup.policy(recipe)
    budgets = sorted({8, 16, policy.budget})
    policies = {"chain": dataclasses.replace(policy, branching=1, budget=policy.depth)}
    policies |= {f"tree{budget}": dataclasses.replace(policy, budget=budget) for budget in budgets}
    lengths = simulated_acceptance(drafter, holdout, features, policies)
    logger.info("held-out acceptance length: %s", {k: round(v, 3) for k, v in lengths.items()})
    return {f"acceptance/{name}": value for name, value in lengths.items()}
