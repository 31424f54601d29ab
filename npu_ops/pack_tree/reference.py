# SPDX-License-Identifier: Apache-2.0
"""pack_tree one request at a time, in lists, as the rule is written.

A candidate's value is the smallest score + bias on its path, so no child stands above its parent
and, with the lower column first on ties, every kept set holds the parents of its nodes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from npu_ops.pack_tree.contract import check, check_values
from npu_ops.words import words_from_mask

if TYPE_CHECKING:
    from torch import Tensor


def reference(
    scores: Tensor, parents: Tensor, depths: Tensor, counts: Tensor, depth_bias: Tensor, n: int
) -> tuple[Tensor, ...]:
    """Return (index, parent, depth, position, mask, count); see npu_ops.pack_tree."""
    check(scores, parents, depths, counts, depth_bias, n)
    check_values(parents, depths, counts, depth_bias)
    device, num_requests = scores.device, scores.shape[0]
    index = torch.full((num_requests, n), -1, dtype=torch.int32)
    parent = torch.full((num_requests, n + 1), -1, dtype=torch.int32)
    depth = torch.zeros(num_requests, n + 1, dtype=torch.int32)
    mask = torch.zeros(num_requests, n + 1, n + 1, dtype=torch.bool)
    num_kept = []
    for request, count in enumerate(counts.tolist()):
        above = parents[request, :count].tolist()
        depth_of = depths[request, :count]
        biased = scores[request, :count] + depth_bias[depth_of.long()]
        kept = _kept(biased.tolist(), above, n)
        row_of = {-1: 0} | {column: row for row, column in enumerate(kept, start=1)}
        mask[request, 0, 0] = True
        for column in kept:
            row, up = row_of[column], row_of[above[column]]
            index[request, row - 1] = column
            parent[request, row] = up
            depth[request, row] = depth_of[column]
            mask[request, row] = mask[request, up]
            mask[request, row, row] = True
        num_kept.append(len(kept))
    kept_counts = torch.tensor(num_kept, dtype=torch.int32)
    results = (index, parent, depth, depth.clone(), words_from_mask(mask), kept_counts)
    return tuple(result.to(device) for result in results)


def _kept(biased: list[float], parents: list[int], n: int) -> list[int]:
    """Return the columns of the n best candidates, ascending."""
    values: list[float] = []
    for score, parent in zip(biased, parents, strict=True):
        value = -math.inf if math.isnan(score) else score
        values.append(value if parent < 0 else min(value, values[parent]))
    best = sorted(range(len(values)), key=lambda column: (-values[column], column))
    return sorted(best[:n])
