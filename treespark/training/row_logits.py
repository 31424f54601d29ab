# SPDX-License-Identifier: Apache-2.0
"""What both passes of the vocabulary losses share: inputs, the logits from them, what the forward
pass leaves for the backward pass.

Shapes: n rows, R nodes, u unique teacher positions, H hidden size, r Markov rank, V vocabulary, c
rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from treespark.training.row_blocks import Block, RowPlan


class RowInputs(NamedTuple):
    """The tensors of fused.vocab_losses that logits are made of."""

    hidden: Tensor
    latent: Tensor | None
    head: Tensor
    w2: Tensor | None
    teacher_hidden: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of losses and sums."""
        return torch.float64 if self.head.dtype == torch.float64 else torch.float32

    def block_logits(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """Base logits [rows, V] and teacher logits [last - first + 1, V], weights' dtype."""
        base = self.hidden[block.rows].to(self.head.dtype) @ self.head.T
        if self.teacher_hidden is None:
            return base, None
        states = self.teacher_hidden[block.first : block.last + 1]
        return base, states.to(self.head.dtype) @ self.head.T

    def block_latent(self, block: Block) -> Tensor | None:
        """Latents [rows, r] of a block in the dtype of w2."""
        if self.latent is None or self.w2 is None:
            return None
        return self.latent[block.rows].to(self.w2.dtype)

    def add_bias(self, out: Tensor, latent: Tensor | None) -> None:
        """out [c, V] += latent [c, r] @ w2.T, added in out's dtype."""
        if latent is None or self.w2 is None:
            return
        if self.w2.dtype == out.dtype:
            out.addmm_(latent, self.w2.T)
        else:
            out.add_(latent @ self.w2.T)


@dataclass
class RowValues:
    """Results of the forward pass in teacher order, and per block what the backward pass reuses.

    ce, l1, normalisers [n].  kept: the logits of `RowInputs.block_logits`, or nothing.
    """

    plan: RowPlan
    ce: Tensor
    l1: Tensor
    normalisers: Tensor
    teacher_normalisers: list[Tensor | None]
    kept: list[tuple[Tensor, Tensor | None]]

    def in_order(self, values: Tensor) -> Tensor:
        """Values [n] in the order in which the rows were given."""
        unsorted = torch.empty_like(values)
        unsorted[self.plan.order] = values
        return unsorted


def fill_teacher(
    out: Tensor, plan: RowPlan, block: Block, part: slice, teacher: Tensor, norm: Tensor
) -> None:
    """out [c, V] <- log p of the chunk's rows."""
    assert plan.teacher_row is not None
    rows = plan.teacher_row[block.start + part.start : block.start + part.stop] - block.first
    copy_rows(out, teacher, rows)
    out.sub_(norm[rows].unsqueeze(-1))


def copy_rows(out: Tensor, table: Tensor, rows: Tensor) -> None:
    """out [c, V] <- table[rows], without a copy in between where the dtypes are equal."""
    if table.dtype == out.dtype:
        torch.index_select(table, 0, rows, out=out)
    else:
        out.copy_(table[rows])
