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
from treespark.data.interrupt import StopRequest
from treespark.training import checkpoint, setup
from treespark.training.evaluate import simulated_acceptance
from treespark.training.losses import LossTerm, combine
from treespark.training.masters import MasterWeights
from treespark.training.metrics import MetricsLog
from treespark.training.objective import micro_batch_terms

if TYPE_CHECKING:
    from pathlib import Path

    from treespark.drafter.modeling import TreeSparkDrafter
    from treespark.recipe import Recipe
    from treespark.target.model import TargetModel

logger = logging.getLogger(__name__)
_MAX_SKIPPED_IN_A_ROW = 3


@dataclasses.dataclass
class _Run:
    """What stays the same over a run, and the weights it changes."""

    recipe: Recipe
    drafter: TreeSparkDrafter
    masters: MasterWeights
    optimizer: torch.optim.Optimizer
    features: FeatureSource
    rows: list[Row]
    holdout: list[Row]
    settings: dict[str, Any]
    total_steps: int


def train(recipe: Recipe, *, resume: str = "auto") -> Path:
    """Train the recipe's drafter and return the folder it was exported to.

    Interrupted runs (SIGTERM, Ctrl-C) save a checkpoint first and exit with 128 + the signal;
    `resume="auto"` continues from the newest one with bit-identical results on a CPU,
    `resume="never"` refuses a folder that already holds one. Raises UsageError for bad input and
    RuntimeError after three steps in a row without a finite gradient.
    """
    setup.check(recipe)
    devices.seed_everything(recipe.train.seed)
    target = setup.load_target(recipe)
    rows, holdout = _rows(recipe, target)
    drafter = setup.new_drafter(recipe, target, rows + holdout)
    masters = MasterWeights(drafter)
    run = _Run(
        recipe,
        drafter,
        masters,
        setup.optimizer(recipe, masters),
        feature_source(target, recipe.data.features, recipe.data.store),
        rows,
        holdout,
        setup.settings(recipe, target, rows),
        setup.total_steps(recipe, len(rows)),
    )
    output = recipe.output.dir
    first, memory = setup.start(output, masters, run.optimizer, run.settings, resume)
    logger.info("%s: steps %d to %d, %d rows", output, first, run.total_steps, len(rows))
    with MetricsLog(output / "metrics.jsonl", first_step=first) as log:
        _steps(run, first, memory, log)
    return setup.export(recipe, drafter, output / "drafter")


def _steps(run: _Run, first: int, memory: dict[str, Any], log: MetricsLog) -> None:
    train, total = run.recipe.train, run.total_steps
    skipped = memory.get("skipped", 0)
    bar = tqdm(total=total, initial=first, unit="step", desc="train")
    with StopRequest() as stop, bar:
        for step in range(first, total):
            started, done = time.perf_counter(), step + 1
            rate = setup.set_learning_rate(run.recipe, run.optimizer, step, total)
            outcome = _step(run, step)
            log.add(step, {**outcome, "lr": rate, "step_s": time.perf_counter() - started})
            skipped = _count_skipped(outcome, skipped, step)
            bar.update()
            if step % 10 == 0:
                ce = outcome.get("ce", math.nan)
                bar.set_postfix(loss=f"{outcome['loss']:.3f}", ce=f"{ce:.3f}")
            if train.eval_every and (done % train.eval_every == 0 or done == total):
                _evaluate(run, step, log)
            if stop or done % train.save_every == 0 or done == total:
                log.sync()
                _save(run, done, {"skipped": skipped})
            if stop and done < total:
                logger.warning("stopped after step %d of %d; run it again to go on", done, total)
                raise SystemExit(stop.exit_code)


def _save(run: _Run, done: int, memory: dict[str, Any]) -> None:
    root, parameters = run.recipe.output.dir, run.masters.parameters
    checkpoint.save(root, done, parameters, run.optimizer, settings=run.settings, memory=memory)


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


def _step(run: _Run, step: int) -> dict[str, Any]:
    """One optimizer update; returns what was measured.  A non-finite gradient changes nothing."""
    data, train = run.recipe.data, run.recipe.train
    weights = setup.loss_weights(run.recipe, step, run.total_steps)
    objective = setup.objective(run.recipe)
    terms: dict[str, LossTerm] = {}
    counters: dict[str, LossTerm] = {}
    draws = rows_of_step(run.rows, step, train.global_batch, train.seed)
    for part in micro_batches(draws, train.micro_batch):
        batch = collate(
            part, num_anchors=data.num_anchors, num_tree_anchors=data.tree_anchors, seed=train.seed
        ).to(run.drafter.device)
        features, last_hidden = run.features(batch.rows)
        new_terms, new_counters = micro_batch_terms(
            run.drafter, batch, features, last_hidden, objective, weights
        )
        _add(terms, new_terms)
        _add(counters, new_counters)
    loss, values = combine(terms, weights)
    loss.backward()
    run.masters.collect_gradients()
    parameters = run.masters.parameters.values()
    norm = torch.nn.utils.clip_grad_norm_(parameters, run.recipe.optim.grad_clip)
    finite = bool(torch.isfinite(norm))
    if finite:
        run.optimizer.step()
        run.masters.publish()
    run.optimizer.zero_grad(set_to_none=True)
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


def _evaluate(run: _Run, step: int, log: MetricsLog) -> None:
    """Log the acceptance lengths of chain and trees on the held-out rows, if there are any."""
    if not run.holdout:
        return
    head = run.drafter.markov_head
    if head is not None and head.head_type == "rnn":
        logger.info("no held-out acceptance: an rnn head drafts no trees")
        return
    policy = setup.policy(run.recipe)
    chain = dataclasses.replace(policy, branching=1, budget=policy.depth, frontier=None)
    policies = {"chain": chain}
    for budget in sorted({8, 16, policy.budget}):
        policies[f"tree{budget}"] = dataclasses.replace(policy, budget=budget)
    lengths = simulated_acceptance(run.drafter, run.holdout, run.features, policies)
    logger.info("held-out acceptance length: %s", {k: round(v, 3) for k, v in lengths.items()})
    log.add(step, {f"acceptance/{name}": value for name, value in lengths.items()})
