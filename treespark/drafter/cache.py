# SPDX-License-Identifier: Apache-2.0
"""Context keys and values of the drafter, one row per committed target token and layer."""

import torch
from torch import Tensor

from treespark.drafter.config import DrafterConfig


class DraftCache:
    """Slots of context K/V; how many rows of a slot count is the caller's knowledge.

    Each layer holds keys and values [num_slots, Hkv, max_len, D]. Row j of a slot belongs to the
    token at position j. Blocks are never stored here.
    """

    def __init__(
        self,
        config: DrafterConfig,
        num_slots: int,
        max_len: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        self.num_slots = num_slots
        self.max_len = max_len
        shape = (num_slots, config.num_key_value_heads, max_len, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]

    def write(self, layer: int, slot: int, start: int, key: Tensor, value: Tensor) -> None:
        """Store key and value, each [n, Hkv, D], as rows start..start+n-1 of a slot."""
        stop = start + key.shape[0]
        assert 0 <= start <= stop <= self.max_len, f"rows {start}..{stop} of {self.max_len}"
        self.keys[layer][slot, :, start:stop] = key.transpose(0, 1)
        self.values[layer][slot, :, start:stop] = value.transpose(0, 1)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` rows of one slot to another, in all layers."""
        for rows in (*self.keys, *self.values):
            rows[target, :, :length] = rows[source, :, :length]

    def view(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the first `length` rows of a slot: keys and values [Hkv, length, D], no copy."""
        assert length <= self.max_len, f"{length} rows of {self.max_len}"
        return self.keys[layer][slot, :, :length], self.values[layer][slot, :, :length]

    def num_bytes(self) -> int:
        """Bytes of memory held by keys and values."""
        return sum(t.numel() * t.element_size() for t in self.keys + self.values)
