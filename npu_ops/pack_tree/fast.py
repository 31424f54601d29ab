# SPDX-License-Identifier: Apache-2.0
"""pack_tree for all requests at once: in NumPy on a CPU, in torch elsewhere.

The arrays are tiny, so the time is the number of calls; one of NumPy costs a third of one of torch.

Shapes: B requests, C candidates, n budget.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from npu_ops import registry
from npu_ops.ordered import ordered_topk
from npu_ops.pack_tree.contract import check, check_values
from npu_ops.words import num_words, words_from_mask


def on_cpu(
    scores: Tensor, parents: Tensor, depths: Tensor, counts: Tensor, depth_bias: Tensor, n: int
) -> tuple[Tensor, ...]:
    """Return what the reference returns."""
    check(scores, parents, depths, counts, depth_bias, n)
    if registry.CHECK_VALUES:
        check_values(parents, depths, counts, depth_bias)
    above, num_candidates = parents.numpy(), parents.shape[1]
    values = _envelope(scores.detach().numpy(), above, depths.numpy(), depth_bias.detach().numpy())
    values[np.arange(num_candidates) >= counts.numpy()[:, None]] = -np.inf
    count = np.minimum(counts.numpy(), n)
    kept = _kept(values, count, n)

    # Candidates with one behind them that padding refers to; rows with the anchor's in front.
    requests = np.arange(len(kept))[:, None]
    slots: np.ndarray = np.arange(n + 1, dtype=np.int32)
    column_above: np.ndarray = np.full((len(kept), num_candidates + 1), -1, dtype=np.int32)
    column_above[:, :-1] = above
    depth_of = np.zeros_like(column_above)
    depth_of[:, :-1] = depths.numpy()
    row_of: np.ndarray = np.zeros((len(kept), num_candidates + 2), dtype=np.int32)
    row_of[requests, kept + 1] = slots[1:]

    parent: np.ndarray = np.full((len(kept), n + 1), -1, dtype=np.int32)
    parent[:, 1:] = row_of[requests, column_above[requests, kept] + 1]
    parent[slots > count[:, None]] = -1
    depth = np.zeros_like(parent)
    depth[:, 1:] = depth_of[requests, kept]
    mask = _ancestor_words(parent, count, int(depth.max(initial=0)))
    index = np.where(kept < num_candidates, kept, -1).astype(np.int32)
    results = (index, parent, depth, depth.copy(), mask, count)
    return tuple(torch.from_numpy(result) for result in results)


def _envelope(
    scores: np.ndarray, parents: np.ndarray, depths: np.ndarray, depth_bias: np.ndarray
) -> np.ndarray:
    """Return the smallest score + bias on each candidate's path, NaN counting as -inf."""
    # Absent candidates may hold anything.
    depths = np.minimum(np.maximum(depths, 0), len(depth_bias) - 1)
    with np.errstate(invalid="ignore"):  # inf - inf
        values: np.ndarray = scores + depth_bias[depths]
    values[np.isnan(values)] = -np.inf
    if values.shape[1] == 0:
        return values
    requests, is_below_anchor = np.arange(len(values))[:, None], parents < 0
    parents = np.minimum(np.maximum(parents, 0), values.shape[1] - 1)
    while True:
        above = values[requests, parents]
        above[is_below_anchor] = np.inf
        if (values <= above).all():
            return values
        values = np.minimum(values, above)


def _kept(values: np.ndarray, count: np.ndarray, n: int) -> np.ndarray:
    """Return the columns of the best `count` candidates [B, n], ascending, C behind them."""
    num_candidates = values.shape[1]
    # Absent candidates have the last columns, so they lose every tie.
    order = np.argsort(-values, axis=1, kind="stable")[:, :n]
    kept = np.full((len(values), n), num_candidates)
    kept[:, : order.shape[1]] = order
    kept[np.arange(n) >= count[:, None]] = num_candidates
    kept.sort(axis=1)
    return kept


def _ancestor_words(parent: np.ndarray, count: np.ndarray, depth: int) -> np.ndarray:
    """Return the mask words [B, n + 1, W] int32 of rows with these parents."""
    num_requests, num_rows = parent.shape
    mask = np.zeros((num_requests, num_rows, 32 * num_words(num_rows)), dtype=bool)
    requests, rows = np.arange(num_requests)[:, None], np.arange(num_rows)
    mask[:, rows, rows] = True
    upward = np.maximum(parent, 0)
    ancestor = upward
    for _ in range(depth):
        mask[requests, rows, ancestor] = True
        ancestor = upward[requests, ancestor]
    mask[rows > count[:, None]] = False
    words: np.ndarray = np.packbits(mask, axis=2, bitorder="little").view("<i4")
    return words


def on_cuda(
    scores: Tensor, parents: Tensor, depths: Tensor, counts: Tensor, depth_bias: Tensor, n: int
) -> tuple[Tensor, ...]:
    """Return what the reference returns, without waiting for the device."""
    check(scores, parents, depths, counts, depth_bias, n)
    if registry.CHECK_VALUES:
        check_values(parents, depths, counts, depth_bias)
    num_candidates, num_depths = scores.shape[1], len(depth_bias) - 1
    above, columns = parents.long(), torch.arange(num_candidates, device=scores.device)
    absent = columns >= counts[:, None]
    values = scores + depth_bias[depths.clamp(0, num_depths)]
    values = values.masked_fill(values.isnan() | absent, -torch.inf)
    # One step per edge of the longest path; D bounds it.
    for _ in range(min(num_depths, num_candidates) - 1):
        upper = values.gather(1, above.clamp(0, num_candidates - 1))
        values = values.minimum(upper.masked_fill(above < 0, torch.inf))

    count = counts.clamp_max(n)
    kept = ordered_topk(values, n).indices
    kept = pad(kept, (0, n - kept.shape[1]), value=num_candidates)
    is_pad = torch.arange(n, device=scores.device) >= count[:, None]
    kept = kept.masked_fill(is_pad, num_candidates).sort(dim=1).values

    rows = torch.arange(1, n + 1, device=scores.device).expand_as(kept)
    row_of = kept.new_zeros(len(kept), num_candidates + 2).scatter(1, kept + 1, rows)
    parent = row_of.gather(1, pad(above, (0, 1), value=-1).gather(1, kept) + 1)
    parent = pad(parent.masked_fill(is_pad, -1), (1, 0), value=-1)
    depth = pad(pad(depths, (0, 1)).gather(1, kept), (1, 0))
    mask = _ancestor_mask(parent.clamp_min(0)) & ~pad(is_pad, (1, 0))[..., None]
    index = kept.masked_fill(is_pad, -1)
    results = (index, parent, depth, depth.clone(), words_from_mask(mask), count)
    return tuple(result.int() for result in results)


def _ancestor_mask(upward: Tensor) -> Tensor:
    """Return [B, N, N] bool, a row sees itself and its ancestors; upward [B, N] int64: parents."""
    num_rows = upward.shape[1]
    mask = torch.eye(num_rows, dtype=torch.bool, device=upward.device).expand(len(upward), -1, -1)
    # After pass i a row sees its 2^i nearest ancestors, itself included, and jumps past them.
    for _ in range((num_rows - 1).bit_length()):
        mask = mask | mask.gather(1, upward[..., None].expand_as(mask))
        upward = upward.gather(1, upward)
    return mask
