# SPDX-License-Identifier: Apache-2.0
"""The training flow, top-down: rows -> features -> block -> replay -> losses -> step -> checkpoint.

Every denominator is the sum over the whole optimizer step, over micro-batches and ranks
(algorithms.md 2.3), so the result depends on neither. Where a step has several micro-batches their
denominators are found first, in passes without a graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import signal
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
from treespark.training import branch, checkpoint, record, setup
from treespark.training.best import BestDrafter
from treespark.training.evaluate import simulated_acceptance
from treespark.training.losses import combine
from treespark.training.metrics import METRICS, MetricsLog, StepSums
from treespark.training.objective import (
    MicroBatch,
    MicroBatchPlan,
    micro_batch_terms,
    plan_micro_batch,
)
from treespark.training.ranks import Ranks, join

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from treespark.drafter.auto import AnyDrafter
    from treespark.recipe import Recipe
    from treespark.target.model import TargetModel
    from treespark.training.updates import Updates

logger = logging.getLogger(__name__)
_MAX_SKIPPED_IN_A_ROW = 3
# Exit code of a rank that stops because another one was told to.
_STOPPED_WITH_OTHERS = 128 + signal.SIGTERM


@dataclasses.dataclass
class _Run:
    """What stays the same over a run, and the weights it changes."""

    recipe: Recipe
    ranks: Ranks
    drafter: AnyDrafter
    updates: Updates
    features: FeatureSource
    rows: list[Row]
    holdout: list[Row]
    settings: dict[str, Any]
    total_steps: int
    last_step: int
    stop_ids: frozenset[int]
    best: BestDrafter | None
    maker: dict[str, Any]


def train(
    recipe: Recipe,
    *,
    resume: str = "auto",
    start_from: str | None = None,
    until: str | None = None,
) -> Path:
    """Train the recipe's drafter and return the folder it was exported to.

    Started by torchrun, all processes share every step; the first one writes. Interrupted runs
    (SIGTERM, Ctrl-C) save a checkpoint first and exit with 128 + the signal; `resume="auto"`
    continues from the newest one, on any number of processes, and with the same number with
    bit-identical results on a CPU; `resume="never"` refuses a folder that already holds one.
    start_from: RUN or RUN@STEP, the checkpoint that a run without one of its own begins with, see
    `branch`.  until: a step, or "warmup" for the last one of it, after which the run stops as when
    it is interrupted, and the folder of its checkpoint is returned.
    Raises UsageError for bad input and RuntimeError after three steps in a row without a finite
    gradient.
    """
    setup.check(recipe)
    devices.seed_everything(recipe.train.seed)
    target = setup.load_target(recipe)
    rows, holdout = _rows(recipe, target)
    drafter = setup.new_drafter(recipe, target, rows + holdout)
    settings = setup.settings(recipe, target, rows)
    total = setup.total_steps(recipe, len(rows))
    last = branch.last_step(until, recipe, total)
    other = None
    if start_from is not None and not checkpoint.saved_steps(recipe.output.dir):
        other = branch.branch_point(start_from, recipe, settings, total)
    decodes = recipe.train.decode_every > 0
    best = BestDrafter(recipe, target, holdout, settings) if decodes else None
    # All that input can be wrong about is known: only now is anything made.
    with (
        join(target.device) as ranks,
        setup.output_folder(recipe, ranks),
        contextlib.ExitStack() as open_until_the_end,
    ):
        run = _Run(
            recipe,
            ranks,
            drafter,
            setup.updates(recipe, drafter, ranks),
            open_until_the_end.enter_context(feature_source(target, recipe.data, rows + holdout)),
            rows,
            holdout,
            settings,
            total,
            last,
            frozenset(target.eos_token_ids),
            best,
            record.maker(recipe, target, drafter.config),
        )
        return _train(run, resume, other)


def _train(run: _Run, resume: str, other: Path | None) -> Path:
    """Take the run's steps; other: the checkpoint to begin with where there is no own one."""
    output = run.recipe.output.dir
    found, earlier = setup.start(output, run.settings, resume), None
    if found is None and other is not None:
        logger.info("%s: begins with %s", output, other)
        found, earlier = branch.load(other), other.parent / METRICS
    first, memory = (0, {}) if found is None else (found.step, found.memory)
    if found is not None:
        run.updates.restore(found.weights, found.optimizer, lambda: _first_loss(run, first))
    logger.info("%s: steps %d to %d, %d rows", output, first, run.last_step, len(run.rows))
    if run.best is not None and run.ranks.is_first:
        run.best.resume(memory.get("best"))
    # Nobody writes before all have read.
    run.ranks.wait()
    metrics = None
    if run.ranks.is_first:
        metrics = MetricsLog(output / METRICS, first_step=first, earlier=earlier)
    with metrics or contextlib.nullcontext():
        _steps(run, first, memory, metrics)
    if run.last_step < run.total_steps:
        return checkpoint.step_folder(output, max(first, run.last_step))
    folder = output / "drafter"
    with run.updates.whole_weights():
        if run.ranks.is_first:
            setup.export(run.recipe, run.drafter, folder)
            record.write(folder, run.maker, output / METRICS)
    run.ranks.wait()
    return folder


def _steps(run: _Run, first: int, memory: dict[str, Any], log: MetricsLog | None) -> None:
    train, total, last = run.recipe.train, run.total_steps, run.last_step
    skipped = memory.get("skipped", 0)
    bar = tqdm(
        total=total, initial=first, unit="step", desc="train", disable=not run.ranks.is_first
    )
    with StopRequest() as stop, bar:
        for step in range(first, last):
            started, done = time.perf_counter(), step + 1
            outcome = _step(run, step)
            if log is not None:
                log.add(step, {**outcome, "step_s": time.perf_counter() - started})
            skipped = _count_skipped(outcome, skipped, step)
            bar.update()
            if step % 10 == 0:
                shown = [name for name in ("loss", "ce", "soft_ce") if name in outcome]
                bar.set_postfix({name: f"{outcome[name]:.3f}" for name in shown})
            if train.eval_every and (done % train.eval_every == 0 or done == total):
                _evaluate(run, step, log)
            if train.decode_every and (done % train.decode_every == 0 or done == total):
                _decode(run, step, log)
            # One rank may have been signalled: all stop at the same step.
            stopping = run.ranks.any(bool(stop))
            if stopping or done % train.save_every == 0 or done == last:
                _save(run, done, skipped, log)
            if stopping and done < last:
                logger.warning("stopped after step %d of %d; run it again to go on", done, total)
                raise SystemExit(stop.exit_code if stop else _STOPPED_WITH_OTHERS)


def _save(run: _Run, done: int, skipped: int, log: MetricsLog | None) -> None:
    weights, optimizer = run.updates.state()
    if log is not None:
        memory: dict[str, Any] = {"skipped": skipped}
        if run.best is not None:
            memory["best"] = run.best.record
        log.sync()
        root = run.recipe.output.dir
        checkpoint.save(root, done, weights, optimizer, settings=run.settings, memory=memory)
    run.ranks.wait()


def _rows(recipe: Recipe, target: TargetModel) -> tuple[list[Row], list[Row]]:
    rows, dropped = load_rows(
        recipe.data.continuations,
        max_tokens=recipe.data.max_tokens,
        block_size=recipe.drafter.block_size,
        vocab_size=target.vocab_size,
        max_context=target.max_context,
        fingerprint=target.fingerprint,
    )
    for reason, count in dropped.items():
        logger.info("dropped %d rows: %s", count, reason)
    return split_holdout(rows, recipe.data.holdout_rows, recipe.train.seed)


def _step(run: _Run, step: int) -> dict[str, Any]:
    """One optimizer update; returns what was measured.  A non-finite gradient changes nothing."""
    weights = setup.loss_weights(run.recipe, step, run.total_steps)
    objective = setup.objective(run.recipe)
    micros = [_micro_batch(run, draws) for draws in _draws(run, step)]
    run.features.prefetch([row for draws in _draws(run, step + 1) for _, row in draws])
    plans: list[MicroBatchPlan | None] = [None] * len(micros)
    denominators = None
    if len(micros) > 1:
        # The first backward needs the denominators of all micro-batches, the last one's included.
        with run.updates.whole_weights():
            found = [plan_micro_batch(run.drafter, micro, objective, weights) for micro in micros]
        plans, denominators = list(found), _step_denominators(run, found)
    sums = StepSums(list(weights), run.drafter.config.block_size)
    for micro, plan in zip(micros, plans, strict=True):

        def loss(micro: MicroBatch = micro, plan: MicroBatchPlan | None = plan) -> Tensor:
            found = micro_batch_terms(run.drafter, micro, objective, weights, plan)
            total, values = combine(
                found.terms,
                weights,
                world_size=run.ranks.world_size,
                denominators=denominators or _step_denominators(run, [found.plan]),
                accumulation_steps=len(micros),
            )
            sums.add(values, found.counters)
            return total

        run.updates.backward(loss)
    rate = setup.learning_rate(run.recipe, step, run.total_steps)
    norm = run.updates.step(rate)
    return {
        **sums.over(run.ranks, weights),
        "grad_norm": norm,
        "skipped": not math.isfinite(norm),
        "lr": rate,
    }


def _draws(run: _Run, step: int) -> list[Sequence[tuple[int, Row]]]:
    """The micro-batches of this rank; which rows make up a step does not depend on the ranks."""
    train, ranks = run.recipe.train, run.ranks
    draws = rows_of_step(run.rows, step, train.global_batch, train.seed)
    return list(micro_batches(draws[ranks.rank :: ranks.world_size], train.micro_batch))


def _micro_batch(run: _Run, draws: Sequence[tuple[int, Row]]) -> MicroBatch:
    data, seed = run.recipe.data, run.recipe.train.seed
    batch = collate(
        draws, num_anchors=data.num_anchors, num_tree_anchors=data.tree_anchors, seed=seed
    ).to(run.drafter.device)
    return MicroBatch(batch, *run.features(batch.rows))


def _step_denominators(run: _Run, plans: Sequence[MicroBatchPlan]) -> dict[str, Tensor]:
    """Denominators of the whole step: summed over micro-batches and ranks (algorithms.md 2.3)."""
    names = list(plans[0].denominators)
    local = torch.stack([sum(plan.denominators[name] for plan in plans) for name in names])
    return dict(zip(names, run.ranks.sum(local).unbind(), strict=True))


def _first_loss(run: _Run, step: int) -> Tensor:
    """The loss of this rank's first micro-batch of a step, by itself."""
    weights = setup.loss_weights(run.recipe, step, run.total_steps)
    micro = _micro_batch(run, _draws(run, step)[0])
    objective = setup.objective(run.recipe)
    found = micro_batch_terms(run.drafter, micro, objective, weights)
    return combine(found.terms, weights, denominators=found.plan.denominators)[0]


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


def _evaluate(run: _Run, step: int, log: MetricsLog | None) -> None:
    """Log the acceptance lengths of chain and trees on the held-out rows, if there are any."""
    if not run.holdout:
        return
    policy = setup.policy(run.recipe)
    chain = dataclasses.replace(policy, branching=1, budget=policy.depth, frontier=None)
    policies = {"chain": chain}
    for budget in () if run.drafter.config.chain_only else sorted({8, 16, policy.budget}):
        policies[f"tree{budget}"] = dataclasses.replace(policy, budget=budget)
    with run.updates.whole_weights():
        counts = simulated_acceptance(
            run.drafter,
            run.holdout,
            run.features,
            policies,
            stop_ids=run.stop_ids,
            rank=run.ranks.rank,
            world_size=run.ranks.world_size,
        )
    sums = run.ranks.sum(torch.tensor(list(counts.values()), device=run.ranks.device))
    lengths = {name: float(c / r) for name, (c, r) in zip(policies, sums, strict=True)}
    logger.info("held-out acceptance length: %s", {k: round(v, 3) for k, v in lengths.items()})
    if log is not None:
        log.add(step, {f"acceptance/{name}": value for name, value in lengths.items()})


def _decode(run: _Run, step: int, log: MetricsLog | None) -> None:
    """Log the acceptance length of really decoding held-out prompts; keep the best drafter."""
    assert run.best is not None
    with run.updates.whole_weights():
        if log is not None:
            acceptance = run.best.judge(run.drafter, step + 1)
            log.add(step, {"decode/acceptance": acceptance})
    run.ranks.wait()
