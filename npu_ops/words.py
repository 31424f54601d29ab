# SPDX-License-Identifier: Apache-2.0
"""Tree masks as words: what tree_attention reads and pack_tree writes.

A row of Q columns is W = 2 * ceil(Q / 64) words of int32, so that two neighbouring words are one
little-endian word of 64 bits. Bit j % 32 of word j // 32 says that the row sees tree node j; bits
from Q on are 0. A row without any bit is padding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_BITS = 32


def num_words(num_columns: int) -> int:
    """Return W, the words of a row of `num_columns` columns."""
    return 2 * ((num_columns + 63) // 64)


def words_from_mask(mask: Tensor) -> Tensor:
    """Return words [..., W] int32 of a bool mask [..., Q]."""
    width = num_words(mask.shape[-1])
    bits = pad(mask, (0, width * _BITS - mask.shape[-1])).unflatten(-1, (width, _BITS)).long()
    values = (bits << torch.arange(_BITS, device=mask.device)).sum(-1)
    # The highest bit is the sign of an int32.
    return (values - ((values >> 31) << 32)).int()


def mask_from_words(words: Tensor, num_columns: int) -> Tensor:
    """Return the bool mask [..., num_columns] of words [..., W] int32."""
    shifts = torch.arange(_BITS, device=words.device, dtype=torch.int32)
    bits = (words[..., None] >> shifts) & 1
    return bits.flatten(-2)[..., :num_columns].bool()
