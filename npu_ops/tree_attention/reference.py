# SPDX-License-Identifier: Apache-2.0
"""tree_attention one row at a time: gather the keys a row sees, then attend to nothing else.

What a row does not see therefore has no influence at all, be it NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from npu_ops.tree_attention.contract import check, check_values, lse_dtype, scale_of
from npu_ops.words import mask_from_words

if TYPE_CHECKING:
    from torch import Tensor


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    block_table: Tensor | None = None,
    scale: float = 0.0,
    block_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return out [B, Q, Hq, D] and lse [B, Q, Hq]; see npu_ops.tree_attention."""
    check(query, key, value, seq_lens, tree_mask, block_table, scale, block_size)
    check_values(key, seq_lens, tree_mask, block_table, block_size)
    dtype, factor = lse_dtype(query), scale_of(scale, query.shape[-1])
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=dtype, device=query.device)
    nodes = mask_from_words(tree_mask, query.shape[1])
    for request, prefix in enumerate(seq_lens.tolist()):
        keys = cache_rows(key, request, block_table)
        values = cache_rows(value, request, block_table)
        for row, seen in enumerate(nodes[request]):
            if not seen.any():
                continue
            tree_rows = prefix + seen.nonzero()[:, 0]
            rows = torch.cat([torch.arange(prefix, device=query.device), tree_rows])
            found = _attend(query[request, row].to(dtype), keys[rows], values[rows], factor)
            out[request, row], lse[request, row] = found
    return out, lse


def cache_rows(cache: Tensor, request: int, block_table: Tensor | None) -> Tensor:
    """Return one request's rows [S, Hkv, D] of keys or values."""
    if block_table is None:
        return cache[request]
    # Blocks behind the request's last one are never read; their numbers may be anything.
    blocks = block_table[request].clamp(0, max(len(cache) - 1, 0))
    return cache[blocks.long()].flatten(0, 1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return out [Hq, D] and lse [Hq] of one query row [Hq, D] over keys [n, Hkv, D]."""
    num_heads, num_kv_heads = query.shape[0], keys.shape[1]
    grouped = query.unflatten(0, (num_kv_heads, num_heads // num_kv_heads))
    scores = torch.einsum("hgd,nhd->hgn", grouped, keys.to(query.dtype)) * factor
    out = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), values.to(query.dtype))
    return out.flatten(0, 1), scores.logsumexp(-1).flatten()
