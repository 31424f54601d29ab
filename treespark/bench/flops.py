# SPDX-License-Identifier: Apache-2.0
"""Counts the FLOPs of matrix products, which no other load on a machine changes."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import npu_ops  # noqa: F401  (defines the operators)


def markov_topk_flops(_base: Any, _rows: Any, latent: Any, w2: Any, *_: Any, **__: Any) -> int:
    """FLOPs of the operator's product [R, r] @ [r, V]."""
    return 2 * latent[0] * latent[1] * w2[0]


def addmm_flops(_sum: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
    """FLOPs of a product that is added in place."""
    return 2 * left[0] * left[1] * right[1]


def flop_counter() -> FlopCounterMode:
    """Return a context that counts the FLOPs of matrix products, also those it does not know."""
    ours, in_place = torch.ops.treespark.markov_topk, torch.ops.aten.addmm_
    mapping = {ours: markov_topk_flops, in_place: addmm_flops}
    return FlopCounterMode(display=False, custom_mapping=mapping)
