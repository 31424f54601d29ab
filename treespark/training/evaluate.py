# SPDX-License-Identifier: Apache-2.0
"""Acceptance length on held-out rows, exactly, without running the target.

A continuation is the target's own greedy output, so a node would be accepted if and only if its
path equals the next tokens of the continuation. The walk below therefore gives the acceptance
length that greedy decoding of the same prompt reaches with this drafter and policy (up to near-ties
in low precision). Shapes: A anchors of one row, B draft depths, N packed nodes.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespark.drafter.auto import drafted_children
from treespark.tree.policy import NodeChildren, TreePolicy, expand_children, pack
from treespark.tree.verify import accept_tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

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
    stop_ids: Collection[int] = (),
    rank: int = 0,
    world_size: int = 1,
) -> dict[str, tuple[int, int]]:
    """Return committed tokens and rounds of each policy over the first `max_tokens` tokens of
    every row; their ratio is the acceptance length.

    The bonus token counts, the prefill token does not, and the last round is cut at the row's end
    (algorithms.md 3.5). This is what decoding the row's prompt counts with a limit of `max_tokens`;
    where the row ends sooner, and not with one of stop_ids, with a limit of its length. As in
    serving, no tree is deeper than the limit allows.
    rows: of all ranks, of which the counts are those of every world_size-th from `rank` on. All
    ranks make equally many drafter passes of equal shape, the surplus of which counts nothing: with
    ZeRO 3 a module call is a collective one.
    """
    committed, rounds = dict.fromkeys(policies, 0), dict.fromkeys(policies, 0)

    def passes(row: Row) -> Iterator[dict[str, Tensor]]:
        return _passes(drafter, row, features, policies, max_tokens, stop_ids)

    with torch.no_grad():
        for row in rows[rank::world_size]:
            parts = list(passes(row))
            for name in policies:
                accepted = [int(count) for part in parts for count in part[name]]
                row_committed, row_rounds = _walk(accepted)
                committed[name] += row_committed
                rounds[name] += row_rounds
        surplus = itertools.chain.from_iterable(map(passes, itertools.cycle(rows)))
        for _ in range(_num_missing_passes(rows, max_tokens, rank, world_size)):
            next(surplus)
    return {name: (committed[name], rounds[name]) for name in policies}


def _walk(accepted: list[int]) -> tuple[int, int]:
    """Committed tokens and rounds when decoding follows `accepted`, indexed by anchor."""
    position, rounds = 0, 0
    while position < len(accepted):
        position += min(accepted[position] + 1, len(accepted) - position)
        rounds += 1
    return position, rounds


def _anchors(row: Row, max_tokens: int) -> range:
    """Positions of the tokens that a round follows: all simulated ones but the last."""
    return range(row.prompt_len, min(len(row.token_ids), row.prompt_len + max_tokens) - 1)


def _num_missing_passes(rows: Sequence[Row], max_tokens: int, rank: int, world_size: int) -> int:
    """Passes that this rank makes less than the rank with most."""
    counts = [-(-len(_anchors(row, max_tokens)) // _ANCHORS_AT_ONCE) for row in rows]
    by_rank = [sum(counts[other::world_size]) for other in range(world_size)]
    return max(by_rank) - by_rank[rank]


def _passes(
    drafter: AnyDrafter,
    row: Row,
    features: FeatureSource,
    policies: Mapping[str, TreePolicy],
    max_tokens: int,
    stop_ids: Collection[int],
) -> Iterator[dict[str, Tensor]]:
    """Accepted draft tokens of every policy at the row's anchors, for as many as are in a pass."""
    row_features, _ = features([row])
    tokens = torch.from_numpy(row.token_ids).to(row_features.device)
    longest = row.prompt_len + max_tokens
    if len(tokens) < longest and int(tokens[-1]) not in stop_ids:
        longest = len(tokens)
    positions = _anchors(row, max_tokens)
    anchors = torch.arange(positions.start, positions.stop, device=tokens.device)
    for chunk in anchors.split(_ANCHORS_AT_ONCE):
        whole = pad(chunk, (0, _ANCHORS_AT_ONCE - len(chunk)), value=positions.start)
        keep = torch.ones_like(whole, dtype=torch.bool)
        hidden = drafter.training_blocks(tokens[None], row_features, whole[None], keep[None])[0]
        node_children = drafted_children(drafter, hidden, tokens[whole])
        accepted = {}
        # A bonus follows the deepest node.
        for name, tree in _trees(node_children, tokens[whole], policies, longest - 2 - whole):
            wanted = _wanted(tree, whole, tokens)
            path = accept_tokens(tree, wanted, drafter.config.block_size)
            accepted[name] = path.num_accepted[: len(chunk)]
        yield accepted


def _trees(
    node_children: NodeChildren,
    anchor_tokens: Tensor,
    policies: Mapping[str, TreePolicy],
    max_depths: Tensor,
) -> list[tuple[str, PackedTree]]:
    """Every policy's tree; policies that differ in budget alone share one expansion."""
    pools = {}
    trees = []
    for name, policy in policies.items():
        shape = (policy.depth, policy.branching, policy.frontier)
        if shape not in pools:
            pools[shape] = expand_children(node_children, anchor_tokens, policy)
        trees.append((name, pack(pools[shape], policy.budget, max_depths)))
    return trees


def _wanted(tree: PackedTree, anchors: Tensor, tokens: Tensor) -> Tensor:
    """What the target answers at each node of a matching path [A, N+1]; -1 past the end of the
    row.
    """
    position = anchors[:, None] + tree.depths.to(torch.int64) + 1
    inside = position < len(tokens)
    return torch.where(inside, tokens[position.clamp(max=len(tokens) - 1)], -1)
