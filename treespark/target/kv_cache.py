# SPDX-License-Identifier: Apache-2.0
"""Slot KV cache of the target: committed rows first, right behind them those of the round.

Shapes: L layers, H key/value heads, D head size, T rows of one segment. Rows of slot s lie at [s,
:, 0:length]. The caller keeps the lengths. A round writes its tree rows at [length, length + T);
commit moves the accepted ones down to [length, length + num_accepted + 1) and everything behind is
overwritten by the next round. A row may be moved because its key was rotated by its depth-based
position, which is the position it is moved to.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class TargetState(Protocol):
    """What a round needs from a target's memory; other kinds than plain keys and values fit here.

    A round writes tentative rows, which nobody else may see, and ends with one commit.
    """

    num_slots: int
    max_len: int

    def write(
        self, layer: int, slot: int, start: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store tentative rows [1, H, T, D] behind `start` others; return [1, H, start + T, D]."""
        ...

    def commit(self, slots: list[int], lengths: list[int], paths: list[list[int]]) -> None:
        """Keep each slot's tentative rows on its path, in path order, and drop the others."""
        ...


class KVCache:
    """Per layer one key and one value tensor [num_slots, H, max_len, D].

    zeroed: False leaves them uninitialised. Needed for `write_rows`, which returns rows that nobody
    has written: attention hides them, but what is hidden has to be a number.

    block_size > 0: the heads of a row lie side by side and a slot is whole blocks of so many rows,
    as the operator tree_attention reads them (`blocks`).
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_heads: int,
        max_len: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        zeroed: bool = False,
        block_size: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.max_len = max_len
        self.block_size = block_size
        make = torch.zeros if zeroed else torch.empty

        def rows() -> Tensor:
            if not block_size:
                shape = (num_slots, num_heads, max_len, head_dim)
                return make(shape, dtype=dtype, device=device)
            num_rows = -(-max_len // block_size) * block_size
            rows_first = (num_slots, num_rows, num_heads, head_dim)
            return make(rows_first, dtype=dtype, device=device).transpose(1, 2)

        self.keys = [rows() for _ in range(num_layers)]
        self.values = [rows() for _ in range(num_layers)]

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views [num_slots * M, block_size, H, D] of keys and values: M blocks per slot."""
        assert self.block_size, "a cache without blocks"
        keys, values = (
            rows[layer].transpose(1, 2).unflatten(1, (-1, self.block_size)).flatten(0, 1)
            for rows in (self.keys, self.values)
        )
        return keys, values

    def block_table(self, slots: list[int]) -> Tensor:
        """Return the blocks of each slot, [len(slots), M] int32."""
        num_blocks = self.keys[0].shape[2] // self.block_size
        first = torch.tensor(slots, dtype=torch.int32, device=self.keys[0].device) * num_blocks
        return first[:, None] + torch.arange(num_blocks, dtype=torch.int32, device=first.device)

    def write(
        self, layer: int, slot: int, start: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store rows [1, H, T, D] at [start, start + T); return views [1, H, start + T, D]."""
        num_rows = keys.shape[2]
        all_keys = self.keys[layer].narrow(0, slot, 1).narrow(2, 0, start + num_rows)
        all_values = self.values[layer].narrow(0, slot, 1).narrow(2, 0, start + num_rows)
        all_keys.narrow(2, start, num_rows).copy_(keys)
        all_values.narrow(2, start, num_rows).copy_(values)
        return all_keys, all_values

    def write_rows(
        self,
        layer: int,
        slots: Tensor,
        starts: Tensor,
        keys: Tensor,
        values: Tensor,
        num_columns: int,
    ) -> tuple[Tensor, Tensor]:
        """Store tentative rows [R, H, T, D] of several slots; return [R, H, num_columns, D].

        slots, starts: [R] int64.  Row t of request i goes to starts[i] + t of slots[i]. The result
        holds each slot's first num_columns rows, whoever wrote them.
        """
        rows = starts[:, None] + torch.arange(keys.shape[2], device=starts.device)
        stored = []
        for cache, new in ((self.keys[layer], keys), (self.values[layer], values)):
            cache[slots[:, None], :, rows] = new.transpose(1, 2)
            stored.append(cache.narrow(2, 0, num_columns).index_select(0, slots))
        return stored[0], stored[1]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` rows of one slot to another, in all layers."""
        for rows in (*self.keys, *self.values):
            rows[target, :, :length] = rows[source, :, :length]

    def commit(self, slots: list[int], lengths: list[int], paths: list[list[int]]) -> None:
        """Move row lengths[i] + paths[i][j] of slots[i] to lengths[i] + j, in all layers.

        paths: increasing node indices of the packed tree, node 0 being the anchor; an empty path
        moves nothing. Each path is gathered before it is written, and a source never lies before
        its destination, so no row that is still needed is overwritten.  Source: TreeSpark D.3
        (commit by retrieve indices).
        """
        for slot, length, path in zip(slots, lengths, paths, strict=True):
            assert all(node >= j for j, node in enumerate(path)), path
            assert path == sorted(set(path)), path
            # Nodes that already lie at their destination (the anchor, and a path that follows the
            # packing order).
            first = next((j for j, node in enumerate(path) if node != j), len(path))
            if first == len(path):
                continue
            assert length + path[-1] < self.max_len
            source = torch.tensor(
                [length + node for node in path[first:]], device=self.keys[0].device
            )
            start, num_rows = length + first, len(path) - first
            for rows in (*self.keys, *self.values):
                slot_rows = rows[slot]
                slot_rows.narrow(1, start, num_rows).copy_(slot_rows.index_select(1, source))
