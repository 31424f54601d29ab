# SPDX-License-Identifier: Apache-2.0
"""Acceptance length on held-out rows, exactly, without running the target.

A continuation is the target's own greedy output, so a node would be accepted if and only if its
path equals the next tokens of the continuation. The walk below therefore gives the acceptance
length that greedy decoding of the same prompt reaches with this drafter and policy (up to near-ties
in low precision). Shapes: A anchors of one row, B draft depths, N packed nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treespark.drafter.auto import drafted_children
from treespark.tree.policy import NodeChildren, TreePolicy, expand_children, pack
from treespark.tree.verify import accept_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from treespark.data.batches import Row
    from treespark.data.features import FeatureSource
    from treespark.drafter.auto import AnyDrafter
    from treespark.tree.packed import PackedTree

_ANCHORS_AT_ONCE = 32


def simulated_acceptance(
    drafter: AnyDrafter,
    rows: Sequence[Row],
    features: FeatureSource,
    policies: Mapping[str, TreePolicy],
    *,
    max_tokens: int = 96,
) -> dict[str, tuple[int, int]]:
    """Return committed tokens and rounds of each policy over the first `max_tokens` tokens of
    every row; their ratio is the acceptance length.

    The bonus token counts, the prefill token does not, and the last round is cut at the row's end
    (algorithms.md 3.5).
    """
    committed, rounds = dict.fromkeys(policies, 0), dict.fromkeys(policies, 0)
    with torch.no_grad():
        for row in rows:
            end = min(len(row.token_ids), row.prompt_len + max_tokens)
            accepted = _accepted_everywhere(drafter, row, end, features, policies)
            for name, lengths in accepted.items():
                row_committed, row_rounds = _walk(lengths.tolist())
                committed[name] += row_committed
                rounds[name] += row_rounds
    return {name: (committed[name], rounds[name]) for name in policies}


def _walk(accepted: list[int]) -> tuple[int, int]:
    """Committed tokens and rounds when decoding follows `accepted`, indexed by anchor."""
    position, rounds = 0, 0
    while position < len(accepted):
        position += min(accepted[position] + 1, len(accepted) - position)
        rounds += 1
    return position, rounds


def _accepted_everywhere(
    drafter: AnyDrafter,
    row: Row,
    end: int,
    features: FeatureSource,
    policies: Mapping[str, TreePolicy],
) -> dict[str, Tensor]:
    """Accepted draft tokens [A] of every policy at every anchor prompt_len .. end-2."""
    row_features, _ = features([row])
    device = row_features.device
    tokens = torch.from_numpy(row.token_ids).to(device)
    anchors = torch.arange(row.prompt_len, end - 1, device=device)
    results: dict[str, list[Tensor]] = {name: [] for name in policies}
    for chunk in anchors.split(_ANCHORS_AT_ONCE):
        keep = torch.ones_like(chunk, dtype=torch.bool)
        hidden = drafter.training_blocks(tokens[None], row_features, chunk[None], keep[None])[0]
        node_children = drafted_children(drafter, hidden, tokens[chunk])
        for name, tree in _trees(node_children, tokens[chunk], policies):
            results[name].append(
                accept_tokens(
                    tree, _wanted(tree, chunk, tokens), drafter.config.block_size
                ).num_accepted
            )
    return {name: torch.cat(parts) for name, parts in results.items()}


def _trees(
    node_children: NodeChildren, anchor_tokens: Tensor, policies: Mapping[str, TreePolicy]
) -> list[tuple[str, PackedTree]]:
    """Every policy's tree; policies that differ in budget alone share one expansion."""
    pools = {}
    trees = []
    for name, policy in policies.items():
        shape = (policy.depth, policy.branching, policy.frontier)
        if shape not in pools:
            pools[shape] = expand_children(node_children, anchor_tokens, policy)
        trees.append((name, pack(pools[shape], policy.budget)))
    return trees


def _wanted(tree: PackedTree, anchors: Tensor, tokens: Tensor) -> Tensor:
    """What the target answers at each node of a matching path [A, N+1]; -1 past the end of the
    row.
    """
    position = anchors[:, None] + tree.depths.to(torch.int64) + 1
    inside = position < len(tokens)
    return torch.where(inside, tokens[position.clamp(max=len(tokens) - 1)], -1)
