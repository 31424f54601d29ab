# SPDX-License-Identifier: Apache-2.0
"""Committed tokens and rounds of every prompt, by drafter: really decoded, or replayed.

A replay costs one answer per prompt, whatever the number of drafters: the target writes it alone,
and the drafters run along it (`training/evaluate.py`). In float32 the counts are those of decoding;
in lower precision every drafter then meets the same text, which decoding does not promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from treespark.bench.methods import AUTOREGRESSIVE, CHAIN, own_method
from treespark.bench.views import ViewedFeatures, taps_of, view
from treespark.bench.workload import batches, changed_policy, needed_length
from treespark.data.batches import Row
from treespark.training.evaluate import simulated_acceptance
from treespark.tree.policy import TreePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from treespark.bench.workload import Prompt
    from treespark.drafter.auto import Drafter
    from treespark.serving.records import RequestRecord
    from treespark.target.model import TargetModel

TREE = "tree"


@dataclass(frozen=True)
class Counts:
    """Committed tokens and rounds of one prompt."""

    committed: int
    rounds: int


# Counts per prompt, by method (chain, tree) and drafter folder.
CountsByMethod = dict[str, dict[str, list[Counts]]]


def policies_of(drafter: Drafter, budget: int | None) -> dict[str, TreePolicy]:
    """Return the drafter's chain and, where it has trees, its tree."""
    tree = changed_policy(drafter, depth=None, branching=None, budget=budget)
    found = {CHAIN: TreePolicy(tree.depth, 1, tree.depth)}
    return found if drafter.config.chain_only else {**found, TREE: tree}


def decoded_counts(
    model: TargetModel,
    drafters: Mapping[Path, Drafter],
    prompts: Sequence[Prompt],
    budget: int | None,
    batch_size: int,
    max_tokens: int,
) -> CountsByMethod:
    """Decode all prompts with every drafter, as chain and tree."""
    length = needed_length(prompts, max_tokens, model.max_context)
    counts: CountsByMethod = {CHAIN: {}, TREE: {}}
    todo = [
        (method, folder, drafter, policy)
        for folder, drafter in drafters.items()
        for method, policy in policies_of(drafter, budget).items()
    ]
    with _bar("acceptance", len(todo) * len(prompts)) as bar:
        for method, folder, drafter, policy in todo:
            decode = own_method(
                method, model, drafter, policy, batch_size=batch_size, max_model_len=length
            ).run
            found = counts[method][str(folder)] = []
            for group in batches(prompts, batch_size):
                records = decode([prompt.token_ids for prompt in group], max_tokens).records or []
                found += map(_counts, records)
                bar.update(len(group))
    return counts


def replayed_counts(
    model: TargetModel,
    drafters: Mapping[Path, Drafter],
    prompts: Sequence[Prompt],
    budget: int | None,
    batch_size: int,
    max_tokens: int,
) -> CountsByMethod:
    """Let the target answer all prompts once, and replay every drafter along the answers."""
    rows = _answered(model, prompts, batch_size, max_tokens)
    policies = {folder: policies_of(drafter, budget) for folder, drafter in drafters.items()}
    counts: CountsByMethod = {CHAIN: {}, TREE: {}}
    for folder in drafters:
        for method in policies[folder]:
            counts[method][str(folder)] = []
    layers = sorted({tap for drafter in drafters.values() for tap in taps_of(drafter)})
    with _bar("replayed", len(rows) * len(drafters)) as bar:
        for row in rows:
            views = view(model, [row], layers)
            for folder, drafter in drafters.items():
                found = simulated_acceptance(
                    drafter,
                    [row],
                    ViewedFeatures(views, taps_of(drafter)),
                    policies[folder],
                    max_tokens=max_tokens,
                    stop_ids=model.eos_token_ids,
                )
                for method, counted in found.items():
                    counts[method][str(folder)].append(Counts(*counted))
                bar.update()
    return counts


def _answered(
    model: TargetModel, prompts: Sequence[Prompt], batch_size: int, max_tokens: int
) -> list[Row]:
    """The target's greedy answers as rows, named by their places."""
    length = needed_length(prompts, max_tokens, model.max_context)
    decode = own_method(
        AUTOREGRESSIVE, model, None, TreePolicy(), batch_size=batch_size, max_model_len=length
    ).run
    rows: list[Row] = []
    with _bar("answers", len(prompts)) as bar:
        for group in batches(prompts, batch_size):
            asked = [prompt.token_ids for prompt in group]
            for ids, answer in zip(asked, decode(asked, max_tokens).token_ids, strict=True):
                rows.append(Row(str(len(rows)), np.asarray(ids + answer, dtype=np.int64), len(ids)))
            bar.update(len(group))
    return rows


def _counts(record: RequestRecord) -> Counts:
    return Counts(sum(round_.num_committed for round_ in record.rounds), len(record.rounds))


def _bar(what: str, total: int) -> tqdm:
    return tqdm(total=total, unit="prompt", desc=what, mininterval=1)
