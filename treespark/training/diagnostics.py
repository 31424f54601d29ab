# SPDX-License-Identifier: Apache-2.0
"""Per-depth diagnostics of drafter and trees, as numerator / denominator pairs of shape [B].

Pairs are kept apart so that ranks, micro-batches and steps can be summed before dividing; each
depth divides by the number of anchors valid at that depth. None of them counts the bonus token:
never compare their sums with a committed length.

Shapes: A anchors, B draft depths, M pool size.  Source: TreeSpark C.4 (algorithms 2.5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from treespark.training.losses import LossTerm

if TYPE_CHECKING:
    from torch import Tensor

    from treespark.tree.policy import CandidatePool


def tree_diagnostics(
    pool: CandidatePool,
    packed_nodes: Tensor,
    mass: Tensor,
    greedy: Tensor,
    valid: Tensor,
    labels: Tensor | None = None,
) -> dict[str, LossTerm]:
    """Return pairs of [B] over anchors valid at each depth.

    "survival_mass": reference mass of the packed nodes of depth d, the probability that a
    reference draw survives to depth d. "greedy_hit": 1 where the teacher's argmax tokens 1..d are
    a path of the packed tree. "reference_hit" (with labels): the same for the reference tokens.
    Summed over depths: expected and proxy accepted drafts.
    pool: trees of A anchors.  packed_nodes [A, M] bool.  mass [A, M].  greedy, labels [A, B]
    int64.  valid [A, B] bool.
    """
    packed_mass = _depth_sums(pool, torch.where(packed_nodes, mass, 0.0))
    pairs = {
        "survival_mass": _per_depth(packed_mass, valid),
        "greedy_hit": _per_depth(path_hits(pool, packed_nodes, greedy), valid),
    }
    if labels is not None:
        pairs["reference_hit"] = _per_depth(path_hits(pool, packed_nodes, labels), valid)
    return pairs


def overlap_per_depth(overlap: Tensor, valid: Tensor) -> LossTerm:
    """Return the pair of [B] for the overlap of drafter and teacher.  overlap, valid [..., B]."""
    depth = valid.shape[-1]
    return _per_depth(overlap.detach().reshape(-1, depth), valid.reshape(-1, depth))


def path_hits(pool: CandidatePool, packed_nodes: Tensor, path: Tensor) -> Tensor:
    """Return [A, B] bool: tokens 1..d of path [A, B] are a path of the packed tree."""
    on_path = torch.zeros_like(packed_nodes)
    hits = []
    for d in range(1, path.shape[1] + 1):
        columns = pool.children_of(d)
        match = (pool.tokens[:, columns] == path[:, d - 1 : d]) & packed_nodes[:, columns]
        if d > 1:
            match &= on_path.gather(1, pool.parents[:, columns])
        on_path[:, columns] = match
        hits.append(match.any(1))
    return torch.stack(hits, 1)


def expected_accepted(pair: LossTerm) -> Tensor:
    """Return the sum over depths of a [B] pair: drafts accepted per round, bonus excluded."""
    return pair.value.sum()


def _depth_sums(pool: CandidatePool, values: Tensor) -> Tensor:
    """[A, M] -> [A, B]: sum over the candidates of each depth."""
    depth = len(pool.frontiers)
    return torch.stack([values[:, pool.children_of(d)].sum(1) for d in range(1, depth + 1)], 1)


def _per_depth(values: Tensor, valid: Tensor) -> LossTerm:
    dtype = values.dtype if values.is_floating_point() else torch.float32
    counted = torch.where(valid, values.to(dtype), 0.0)
    return LossTerm(counted.sum(0), valid.to(dtype).sum(0))
