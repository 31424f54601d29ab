# SPDX-License-Identifier: Apache-2.0
"""`treespark bench calibrate`: how often a drafter's tokens are right, by the chance it gave them.

Trees that grow by survival count an edge of draft probability q as sigmoid(alpha * logit(q) +
beta). The two constants belong to one drafter and its target: here they are fitted, by logistic
regression, on drafted edges whose ancestors were all accepted. Whether such an edge was right is
known from its verification, so any prompts will do.

Source: algorithms 4.1 (Zhou et al.).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich import box
from rich.table import Table
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

from treespark.bench.suite_methods import BRANCH_CAP, NODE_CAP
from treespark.bench.tables import wide_console
from treespark.bench.workload import load_prompts, needed_length
from treespark.data.jsonl import check_file, write_json_atomic
from treespark.drafter.growing import Growth
from treespark.errors import UsageError
from treespark.serving.engine import Engine
from treespark.serving.llm import load_drafter_for
from treespark.serving.params import SamplingParams
from treespark.serving.scheduler import Request
from treespark.target.model import TargetModel
from treespark.tree.builder import BUDGET, PUBLISHED_ALPHA, PUBLISHED_BETA, TreeBuilder
from treespark.tree.policy import TreePolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from treespark.bench.workload import Prompt
    from treespark.drafter.auto import Drafter
    from treespark.serving.engine import Accepted, RoundBatch
    from treespark.tree.packed import PackedTree

NUM_BINS = 10
# Beyond it a float32 log-probability does not tell q from 0 or 1.
_LARGEST_LOGIT = 16.0

Constants = tuple[float, float]


def run_calibration(
    target: Path,
    drafter: Path,
    prompts: Sequence[Path],
    *,
    num_prompts: int | None = None,
    budget: int = NODE_CAP,
    branching: int = BRANCH_CAP,
    batch_size: int = 8,
    max_tokens: int = 128,
    dtype: str | None = "auto",
    device: str | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> dict[str, Any]:
    """Decode prompts with the drafter's most probable trees and fit the constants; print them.

    num_prompts: the first of each file, None for all.  budget, branching: of the trees.  out: JSON
    file of the result.  Raises UsageError for input that does not fit and for prompts that are too
    few to tell.
    """
    if out is not None:
        check_file(out, "--out ")
    policy = TreePolicy(branching=branching, budget=budget)
    model = TargetModel.from_pretrained(target, dtype=dtype, device=device)
    some = load_prompts(prompts, model, num_prompts)
    if len(some) < 2:
        raise UsageError("--prompts: one prompt; need two or more, to fit on one half of them")
    own = load_drafter_for(drafter, model)
    policy = replace(policy, depth=own.config.block_size)
    logits, accepted, places = drafted_edges(model, own, policy, some, batch_size, max_tokens)
    result = {
        "target": str(model.path),
        "drafter": str(drafter),
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_prompts": len(some),
        "max_tokens": max_tokens,
        "tree": {"depth": policy.depth, "branching": branching, "budget": budget},
        **fitted(logits, accepted, places),
    }
    if out is not None:
        write_json_atomic(out, result)
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        _print(result)
    return result


# ---------------------------------------------------------------------- edges


def drafted_edges(
    target: TargetModel,
    drafter: Drafter,
    policy: TreePolicy,
    prompts: Sequence[Prompt],
    batch_size: int,
    max_tokens: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Decode the prompts; return of every edge below an accepted node what became of it.

    [E] float64 logit(q), at most 16 either way; [E] bool whether the target wanted it; [E] int64
    place of its prompt. Nothing behind a token that stops is counted.
    """
    engine = Engine(
        target,
        drafter,
        policy,
        growth=Growth(TreeBuilder(stop=BUDGET)),
        max_num_seqs=batch_size,
        max_model_len=needed_length(prompts, max_tokens, target.max_context),
    )
    found: list[tuple[float, bool, int]] = []

    def watch(batch: RoundBatch, tree: PackedTree, accepted: list[Accepted]) -> None:
        for row, (request, path) in enumerate(zip(batch.requests, accepted, strict=True)):
            place = int(request.request_id)
            found.extend((*edge, place) for edge in edges_of(tree, row, path, request.stop_ids))

    engine.on_round = watch
    for place, prompt in enumerate(prompts):
        engine.add(Request(str(place), prompt.token_ids, SamplingParams(max_tokens)))
    with tqdm(total=len(prompts), unit="prompt", desc="calibrate", mininterval=1) as bar:
        while engine.has_work:
            bar.update(sum(output.finish_reason is not None for output in engine.step()))
    log_probs = np.array([log_prob for log_prob, _, _ in found], dtype=np.float64)
    with np.errstate(divide="ignore"):
        logits = log_probs - np.log(-np.expm1(np.minimum(log_probs, 0.0)))
    return (
        logits.clip(-_LARGEST_LOGIT, _LARGEST_LOGIT),
        np.array([wanted for _, wanted, _ in found], dtype=bool),
        np.array([place for _, _, place in found], dtype=np.int64),
    )


def edges_of(
    tree: PackedTree, row: int, path: Accepted, stops: Collection[int]
) -> list[tuple[float, bool]]:
    """Return (log q, wanted) of the edges below the accepted nodes of one request's tree."""
    size = int(tree.num_nodes[row]) + 1
    tokens, parents = tree.tokens[row, :size].tolist(), tree.parents[row, :size].tolist()
    scores = tree.scores[row, :size].double().tolist()
    wanted: dict[int, int] = {}
    for node, token in zip(path.nodes, path.tokens, strict=True):
        wanted[node] = token
        if token in stops:
            break
    return [
        (scores[node] - scores[parents[node]], tokens[node] == wanted[parents[node]])
        for node in range(1, size)
        if parents[node] in wanted
    ]


# ---------------------------------------------------------------------- constants


def fitted(logits: np.ndarray, accepted: np.ndarray, places: np.ndarray) -> dict[str, Any]:
    """Return alpha and beta of all edges, and how well constants of one half fit the other.

    logits [E] float64, accepted [E] bool, places [E]: prompts, of which every second is one half.
    `errors`: expected calibration error of plain q, of the published constants and of fitted ones,
    the last each on the half that they were not fitted on. Raises UsageError where edges do not
    tell.
    """
    halves = [places % 2 == part for part in (0, 1)]
    of_halves = [fit(logits[half], accepted[half]) for half in halves]
    alpha, beta = fit(logits, accepted)
    crossed = np.empty(len(logits))
    for half, constants in zip(halves, reversed(of_halves), strict=True):
        crossed[half] = probability(logits[half], constants)
    published = (PUBLISHED_ALPHA, PUBLISHED_BETA)
    return {
        "num_edges": len(logits),
        "accepted_rate": float(accepted.mean()),
        "alpha": alpha,
        "beta": beta,
        "halves": [{"alpha": a, "beta": b} for a, b in of_halves],
        "errors": {
            "plain": calibration_error(probability(logits, (1.0, 0.0)), accepted),
            "published": calibration_error(probability(logits, published), accepted),
            "fitted": calibration_error(crossed, accepted),
        },
    }


def fit(logits: np.ndarray, accepted: np.ndarray) -> Constants:
    """Return alpha > 0 and beta of the logistic regression of `accepted` on `logits`.

    Raises UsageError if all edges or none were accepted, or the likelier were not the better ones.
    """
    if not accepted.any() or accepted.all():
        what = "every" if accepted.any() else "no"
        raise UsageError(
            f"--prompts: {what} draft of {len(accepted)} was accepted; give more prompts"
        )
    inputs, labels = torch.from_numpy(logits), torch.from_numpy(accepted).double()
    constants = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([constants], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = binary_cross_entropy_with_logits(constants[0] * inputs + constants[1], labels)
        value.backward()
        return value

    optimizer.step(loss)
    alpha, beta = constants.tolist()
    if alpha <= 0:
        raise UsageError(
            f"--drafter: alpha {alpha:.3g}: drafts that it calls likelier are accepted less often; "
            "see treespark doctor"
        )
    return alpha, beta


def probability(logits: np.ndarray, constants: Constants) -> np.ndarray:
    """Return sigmoid(alpha * logits + beta)."""
    alpha, beta = constants
    return 1 / (1 + np.exp(-(alpha * logits + beta)))


def calibration_error(chances: np.ndarray, accepted: np.ndarray) -> float:
    """Return the mean distance of chance and rate over NUM_BINS bins of equally many edges."""
    order = np.argsort(chances, kind="stable")
    bins = [part for part in np.array_split(order, NUM_BINS) if len(part)]
    gaps = [len(part) * abs(chances[part].mean() - accepted[part].mean()) for part in bins]
    return float(sum(gaps) / len(chances))


def _print(result: dict[str, Any]) -> None:
    table = Table(title="edges below accepted nodes", title_justify="left", box=box.SIMPLE)
    for column in ("edges", "accepted", "error of q", "of published constants", "of fitted ones"):
        table.add_column(column, justify="right")
    errors = [f"{value:.3f}" for value in result["errors"].values()]
    table.add_row(str(result["num_edges"]), f"{result['accepted_rate']:.1%}", *errors)
    console = wide_console()
    console.print(table)
    first, second = (f"{half['alpha']:.3f}, {half['beta']:.3f}" for half in result["halves"])
    console.print(f"of halves of the prompts: {first} and {second}. For a recipe of bench suite:")
    console.print(f"alpha: {result['alpha']:.4f}\nbeta: {result['beta']:.4f}")
