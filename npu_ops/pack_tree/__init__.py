# SPDX-License-Identifier: Apache-2.0
"""pack_tree: the best nodes of a candidate pool, their parents, depths and ancestor words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npu_ops.pack_tree import fast
from npu_ops.pack_tree.contract import MAX_CANDIDATES, MAX_NODES, fake, fits
from npu_ops.pack_tree.reference import reference
from npu_ops.registry import OpSpec, register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_CANDIDATES", "MAX_NODES", "SPEC", "PackedRows", "fits"]


@dataclass(frozen=True)
class PackedRows:
    """index [B, n]; parent, depth, position [B, n + 1]; mask [B, n + 1, W]; count [B]: all int32.

    Row 0 is the anchor: parent -1, depth 0. Rows behind the kept nodes are padding: parent -1,
    depth and position 0, no mask bit.
    """

    index: Tensor
    parent: Tensor
    depth: Tensor
    position: Tensor
    mask: Tensor
    count: Tensor


SPEC = register(
    OpSpec(
        name="pack_tree",
        schema="(Tensor scores, Tensor parents, Tensor depths, Tensor counts, Tensor depth_bias, "
        "int n) -> (Tensor index, Tensor parent, Tensor depth, Tensor position, Tensor mask, "
        "Tensor count)",
        reference=reference,
        fake=fake,
        fast={"CPU": fast.on_cpu, "CUDA": fast.on_cuda},
    )
)
