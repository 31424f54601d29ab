# SPDX-License-Identifier: Apache-2.0
"""Which rows of the vocabulary losses go into one matrix product with the head.

Rows of one teacher position stand together, so that a block needs few rows of the teacher. Tree
nodes go with the row whose base logits they have.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

# Two [512, V] tensors in the weights' dtype are alive at most. Fewer rows would read the whole head
# for little work.
BLOCK_ROWS = 512


def block_rows(num_rows: int, keep_logits: bool) -> int:
    """Return how many of n rows one product takes: BLOCK_ROWS at most.

    Where logits are not kept it is an eighth, but at least 64, so that few rows need little memory,
    too. On a CPU 64 rows at a time make the whole step a sixth longer than 448.
    """
    return BLOCK_ROWS if keep_logits else min(BLOCK_ROWS, max(64, -(-num_rows // 8)))


@dataclass
class Block:
    """Rows start..stop in teacher order, and the teacher rows first..last they use.

    shared: places in the block of the shared rows.  slots: their places among all shared rows.
    """

    rows: Tensor
    start: int
    stop: int
    first: int
    last: int
    shared: Tensor
    slots: Tensor


@dataclass
class RowPlan:
    """Everything about the rows that both passes share; row order is by teacher row.

    order [n]: rows in that order; labels [n] and teacher_row [n] are in it, too.
    """

    order: Tensor
    labels: Tensor | None
    teacher_row: Tensor | None
    blocks: list[Block]

    def labels_of(self, block: Block, part: slice) -> Tensor | None:
        """Labels [c, 1] of a chunk of a block; None where the teacher stands for them."""
        if self.labels is None:
            return None
        return self.labels[block.start + part.start : block.start + part.stop].unsqueeze(-1)


def plan_rows(
    hidden: Tensor,
    labels: Tensor | None,
    teacher_row: Tensor | None,
    shared: Tensor | None,
    keep_logits: bool,
) -> RowPlan:
    """Return the blocks of n rows, in teacher order where there is a teacher.

    hidden [n, H], labels [n], teacher_row [n], shared [m]: as fused.vocab_pass has them.
    """
    num_rows, device = hidden.shape[0], hidden.device
    if teacher_row is None:
        order = torch.arange(num_rows, device=device)
        sorted_rows = None
    else:
        order = teacher_row.argsort(stable=True)
        sorted_rows = teacher_row[order]
    size = block_rows(num_rows, keep_logits)
    starts = range(0, num_rows, size)
    stops = [min(start + size, num_rows) for start in starts]
    borders = [0] * (2 * len(stops))
    if sorted_rows is not None and stops:
        # transferred to the host: two integers per block
        index = [i for start, stop in zip(starts, stops, strict=True) for i in (start, stop - 1)]
        borders = sorted_rows[index].tolist()
    parts = _shared_parts(order, shared, [*starts, num_rows])
    blocks = [
        Block(order[start:stop], start, stop, borders[2 * i], borders[2 * i + 1], *parts[i])
        for i, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]
    return RowPlan(order, None if labels is None else labels[order], sorted_rows, blocks)


def _places(order: Tensor) -> Tensor:
    """Where each of n rows stands in `order` [n]."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place


def _shared_parts(
    order: Tensor, shared: Tensor | None, borders: list[int]
) -> list[tuple[Tensor, Tensor]]:
    """Places in the block and slots of the shared rows, for every block between two borders."""
    if shared is None:
        nothing = order[:0]
        return [(nothing, nothing)] * (len(borders) - 1)
    places, slots = _places(order)[shared].sort()
    # transferred to the host: one integer per block
    cuts = torch.searchsorted(places, torch.tensor(borders, device=order.device)).tolist()
    return [
        (places[i:j] - start, slots[i:j])
        for i, j, start in zip(cuts[:-1], cuts[1:], borders[:-1], strict=True)
    ]


@dataclass
class NodePlan:
    """R nodes in the order of their rows.

    order [R]: nodes in that order; place [R]: of their rows among all, in teacher order, ascending.
    before: for each of the n + 1 borders of places, how many nodes stand before it.
    """

    order: Tensor
    place: Tensor
    before: list[int]


def plan_nodes(plan: RowPlan, rows: Tensor) -> NodePlan:
    """Return the order of nodes whose rows are rows [R] int64."""
    sorted_places, order = _places(plan.order)[rows].sort(stable=True)
    # transferred to the host: one integer per row
    counts = torch.bincount(sorted_places, minlength=len(plan.order)).tolist()
    return NodePlan(order, sorted_places, list(accumulate(counts, initial=0)))


@dataclass
class Part:
    """Rows of a block that are worked on together (relative to it), and their nodes (in order)."""

    rows: slice
    nodes: slice

    @property
    def num_rows(self) -> int:
        """Rows of the part."""
        return self.rows.stop - self.rows.start

    @property
    def num_nodes(self) -> int:
        """Nodes of the part."""
        return self.nodes.stop - self.nodes.start


def parts_of(block: Block, chunk_rows: int, nodes: NodePlan | None = None) -> list[Part]:
    """Return the parts of a block: chunk_rows rows, or fewer where they have many nodes.

    A part of several rows has at most twice as many nodes as chunk_rows.
    """
    before = [0] * (block.stop + 1) if nodes is None else nodes.before
    parts, first = [], block.start
    while first < block.stop:
        last = min(first + chunk_rows, block.stop)
        while last > first + 1 and before[last] - before[first] > 2 * chunk_rows:
            last -= 1
        rows = slice(first - block.start, last - block.start)
        parts.append(Part(rows, slice(before[first], before[last])))
        first = last
    return parts
