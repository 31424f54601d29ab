# SPDX-License-Identifier: Apache-2.0
"""A round of trees as one rectangle: few shapes, masks made on the device, no loop over requests.

Shapes: R requests, T = N + 1 rows of each, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D
head size, S columns of keys and values that attention reads.

Every tree is as wide as the widest and its padding is computed, so nothing has to be fetched from
the device to know a shape. S is the longest request rounded up, so it takes few values too; what a
row may not see is hidden by one additive bias, as in `treespark.target.attention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from treespark.target.kv_cache import KVCache

# Columns come in multiples of this: 16 lengths up to a context of 4096.
_COLUMNS = 256


@dataclass
class PaddedPlan:
    """What attention needs to know about one round.

    slots, starts: [R] int64, the cache row of each request and its committed tokens.
    bias: [R, 1, G * T, S], 0 where a row sees a column, else -inf.
    """

    state: KVCache
    slots: Tensor
    starts: Tensor
    bias: Tensor


def padded_plan(
    mask: Tensor,
    state: KVCache,
    slots: Sequence[int],
    lengths: Sequence[int],
    groups: int,
    dtype: torch.dtype,
) -> PaddedPlan:
    """Return the plan of a round whose trees have the ancestor masks `mask` [R, T, T] bool."""
    num_rows = mask.shape[1]
    needed = max(lengths) + num_rows
    assert needed <= state.max_len, (lengths, num_rows, state.max_len)
    num_columns = min(-(-needed // _COLUMNS) * _COLUMNS, state.max_len)
    starts = torch.tensor(lengths, device=mask.device)
    columns = torch.arange(num_columns, device=mask.device)
    # Column c of request r holds a committed token, or row c - starts[r] of its tree, or nothing.
    row = columns - starts[:, None]
    in_tree = ((row >= 0) & (row < num_rows))[:, None]
    node = row.clamp(0, num_rows - 1)[:, None].expand(-1, num_rows, -1)
    visible = (row < 0)[:, None] | (in_tree & mask.gather(2, node))
    bias = torch.zeros(visible.shape, dtype=dtype, device=mask.device)
    bias = bias.masked_fill_(~visible, -math.inf).repeat(1, groups, 1)[:, None]
    return PaddedPlan(state, torch.tensor(slots, device=mask.device), starts, bias)


def padded_attention(
    layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, plan: PaddedPlan
) -> Tensor:
    """Return [1, R * T, Hq, D] for query [1, Hq, R * T, D], key and value [1, Hkv, R * T, D].

    Writes the rows' keys and values into the plan's state.
    """
    num_requests = plan.slots.shape[0]
    _, num_heads, num_packed, head_dim = query.shape
    num_kv_heads, num_rows = key.shape[1], num_packed // num_requests
    shape = (num_kv_heads, num_requests, num_rows, head_dim)
    keys, values = plan.state.write_rows(
        layer,
        plan.slots,
        plan.starts,
        key[0].reshape(shape).transpose(0, 1),
        value[0].reshape(shape).transpose(0, 1),
        plan.bias.shape[-1],
    )
    # Heads of a group become rows, so that keys and values are not repeated.
    heads = query[0].reshape(num_kv_heads, -1, num_requests, num_rows, head_dim)
    folded = heads.permute(2, 0, 1, 3, 4).reshape(num_requests, num_kv_heads, -1, head_dim)
    out = scaled_dot_product_attention(folded, keys, values, attn_mask=plan.bias, scale=scaling)
    out = out.reshape(num_requests, num_heads, num_rows, head_dim).transpose(1, 2)
    return out.reshape(1, num_packed, num_heads, head_dim)
