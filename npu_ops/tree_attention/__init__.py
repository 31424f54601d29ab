# SPDX-License-Identifier: Apache-2.0
"""tree_attention: attention of tree rows over a prefix and the tree nodes they see."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from npu_ops.registry import OpSpec, register
from npu_ops.tree_attention import fast
from npu_ops.tree_attention.contract import HEAD_DIMS, MAX_BLOCK_SIZE, MAX_ROWS, fake, fits
from npu_ops.tree_attention.reference import reference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HEAD_DIMS", "MAX_BLOCK_SIZE", "MAX_ROWS", "SPEC", "TreeAttention", "fits"]


class TreeAttention(NamedTuple):
    """out [B, Q, Hq, D] in the query's dtype, lse [B, Q, Hq] float32."""

    out: Tensor
    lse: Tensor


SPEC = register(
    OpSpec(
        name="tree_attention",
        schema="(Tensor query, Tensor key, Tensor value, Tensor seq_lens, Tensor tree_mask, "
        "Tensor? block_table=None, float scale=0.0, int block_size=0) -> (Tensor out, Tensor lse)",
        reference=reference,
        fake=fake,
        fast={"CPU": fast.on_cpu, "CUDA": fast.on_cuda},
    )
)
