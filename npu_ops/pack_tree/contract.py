# SPDX-License-Identifier: Apache-2.0
"""Limits, errors and results' shapes of pack_tree.

Shapes: B requests, C candidates, n budget (n + 1 rows), W mask words, D deepest depth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from npu_ops.checks import check_device, check_dtype, check_range, check_shape, refuse
from npu_ops.words import num_words

if TYPE_CHECKING:
    from torch import Tensor

OP = "pack_tree"
# n + 1 rows are at most the 128 rows tree_attention takes.
MAX_NODES = 127
# Two levels of four-way merges over lists of 32 sort 512 candidates, a third all of these.
MAX_CANDIDATES = 1024
# One round of the envelope per depth.
MAX_DEPTH = 64
_INTEGERS = (torch.int32,)


def fits(num_candidates: int, n: int) -> bool:
    """Whether a call with these sizes is within the operator's limits."""
    return 1 <= n <= MAX_NODES and num_candidates <= MAX_CANDIDATES


def check(
    scores: Tensor, parents: Tensor, depths: Tensor, counts: Tensor, depth_bias: Tensor, n: int
) -> None:
    """Raise RuntimeError for arguments against the contract, as far as shapes and dtypes say."""
    check_shape(OP, "scores", scores, "B C", {})
    sizes = {"B": scores.shape[0], "C": scores.shape[1]}
    check_shape(OP, "parents", parents, "B C", sizes)
    check_shape(OP, "depths", depths, "B C", sizes)
    check_shape(OP, "counts", counts, "B", sizes)
    check_shape(OP, "depth_bias", depth_bias, "D+1", {})
    check_dtype(OP, "scores", scores, (torch.float32, torch.float64))
    check_dtype(OP, "parents", parents, _INTEGERS)
    check_dtype(OP, "depths", depths, _INTEGERS)
    check_dtype(OP, "counts", counts, _INTEGERS)
    check_dtype(OP, "depth_bias", depth_bias, (scores.dtype,))
    check_device(
        OP,
        "scores",
        scores.device,
        parents=parents,
        depths=depths,
        counts=counts,
        depth_bias=depth_bias,
    )
    if not 1 <= n <= MAX_NODES:
        refuse(OP, f"n must be in 1..{MAX_NODES}", n)
    if scores.shape[1] > MAX_CANDIDATES:
        refuse(OP, f"C must be in 0..{MAX_CANDIDATES}", scores.shape[1])
    if not 1 <= len(depth_bias) - 1 <= MAX_DEPTH:
        refuse(OP, f"the deepest depth must be in 1..{MAX_DEPTH}", len(depth_bias) - 1)


def check_values(parents: Tensor, depths: Tensor, counts: Tensor, depth_bias: Tensor) -> None:
    """Raise RuntimeError unless the candidates are a tree in order; waits for the device."""
    num_candidates = parents.shape[1]
    check_range(OP, "counts", counts, 0, num_candidates)
    columns = torch.arange(num_candidates, device=parents.device)
    absent = columns >= counts[:, None]
    wrong = parents[((parents < -1) | (parents >= columns)) & ~absent]
    if len(wrong):
        refuse(OP, "parents must hold -1 or an earlier column", int(wrong[0]))
    check_range(OP, "depths", depths.masked_fill(absent, 1), 1, len(depth_bias) - 1)
    fallen = depths[:, 1:][(depths[:, 1:] < depths[:, :-1]) & ~absent[:, 1:]]
    if len(fallen):
        refuse(OP, "depths must not decrease along the columns", int(fallen[0]))


def fake(
    scores: Tensor, parents: Tensor, depths: Tensor, counts: Tensor, depth_bias: Tensor, n: int
) -> tuple[Tensor, ...]:
    """Return empty results of the right shapes and dtypes."""
    check(scores, parents, depths, counts, depth_bias, n)
    num_requests = scores.shape[0]
    shapes = [(n,), (n + 1,), (n + 1,), (n + 1,), (n + 1, num_words(n + 1)), ()]
    return tuple(scores.new_empty((num_requests, *shape), dtype=torch.int32) for shape in shapes)
