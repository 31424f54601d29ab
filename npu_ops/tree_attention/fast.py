# SPDX-License-Identifier: Apache-2.0
"""tree_attention in torch: request by request on a CPU, all requests at once on CUDA.

Heads of a group are folded into rows ([Hkv, G * T, D]), so keys and values are never repeated, and
one additive bias [G * T, S] hides what a tree row may not see. Measured on a CPU (2 threads; 9
heads over 3, D 64; T 9 to 33, S 256 and 1024; bfloat16) against this: a prefix part without a mask
merged with a tree part by log-sum-exp took 1.1 to 1.8 times as long, unfolded heads 1.1 to 1.5
times.

Shapes: B requests, Q tree rows, T rows up to the last that is no padding, Hq query heads, Hkv
key/value heads, G = Hq / Hkv, D head size, S visible rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from npu_ops import registry
from npu_ops.tree_attention.contract import (
    check,
    check_values,
    lse_dtype,
    num_valid_rows,
    scale_of,
)
from npu_ops.tree_attention.reference import cache_rows
from npu_ops.words import mask_from_words

if TYPE_CHECKING:
    from torch import Tensor


def on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    block_table: Tensor | None = None,
    scale: float = 0.0,
    block_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return what the reference returns."""
    check(query, key, value, seq_lens, tree_mask, block_table, scale, block_size)
    check_values(key, seq_lens, tree_mask, block_table, block_size)
    nodes = mask_from_words(tree_mask, query.shape[1])
    is_pad = ~nodes.any(-1)
    num_heads, num_kv_heads, factor = query.shape[2], key.shape[2], scale_of(scale, query.shape[3])
    out = torch.zeros(query.shape, dtype=query.dtype)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=lse_dtype(query))
    lengths = zip(seq_lens.tolist(), num_valid_rows(tree_mask).tolist(), strict=True)
    for request, (prefix, num_rows) in enumerate(lengths):
        if num_rows == 0:
            continue
        keys = cache_rows(key, request, block_table)[: prefix + num_rows].transpose(0, 1)[None]
        values = cache_rows(value, request, block_table)[: prefix + num_rows].transpose(0, 1)[None]
        rows = query[request, :num_rows].transpose(0, 1)
        folded = rows.reshape(1, num_kv_heads, num_heads // num_kv_heads * num_rows, -1)
        mask = nodes[request, :num_rows, :num_rows]
        bias = tree_bias(mask, prefix, num_heads // num_kv_heads, query.dtype)
        found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            folded, keys, values, attn_mask=bias, scale=factor
        )
        out[request, :num_rows] = found.reshape(num_heads, num_rows, -1).transpose(0, 1)
        lse[request, :num_rows] = sums.reshape(num_heads, num_rows).T
    return out.masked_fill_(is_pad[..., None, None], 0), lse.masked_fill_(
        is_pad[..., None], -torch.inf
    )


def tree_bias(mask: Tensor, prefix: int, groups: int, dtype: torch.dtype) -> Tensor:
    """Return [groups * T, prefix + T]: 0 where a row sees a column, else -inf.

    mask: [T, T] bool, row sees column, among the tree rows. All rows see the prefix.
    """
    num_rows = len(mask)
    bias = torch.zeros(num_rows, prefix + num_rows, dtype=dtype, device=mask.device)
    bias[:, prefix:].masked_fill_(mask.logical_not(), -torch.inf)
    return bias.repeat(groups, 1)


def on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    block_table: Tensor | None = None,
    scale: float = 0.0,
    block_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return what the reference returns, without waiting for the device.

    All S cache rows are computed and the scores are kept, [B, Hq, Q, S] in float32.
    """
    check(query, key, value, seq_lens, tree_mask, block_table, scale, block_size)
    if registry.CHECK_VALUES:
        check_values(key, seq_lens, tree_mask, block_table, block_size)
    if block_table is not None:
        blocks = block_table.clamp(0, len(key) - 1).long()
        key, value = key[blocks].flatten(1, 2), value[blocks].flatten(1, 2)
    _, num_rows, num_heads, head_dim = query.shape
    seen = _visible(seq_lens, tree_mask, num_rows, key.shape[1])
    # Rows that nobody sees may be uninitialised, and 0 * NaN is NaN.
    value = value.masked_fill(~seen.any(1)[..., None, None], 0)
    dtype, kv_heads = lse_dtype(query), key.shape[2]
    grouped = query.to(dtype).unflatten(2, (kv_heads, num_heads // kv_heads))
    scores = torch.einsum("bqhgd,bshd->bhgqs", grouped, key.to(dtype))
    scores = scores * scale_of(scale, head_dim)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    is_pad = ~seen.any(-1)
    probs = (scores - lse.masked_fill(is_pad[:, None, None], 0.0)[..., None]).exp()
    out = torch.einsum("bhgqs,bshd->bqhgd", probs, value.to(dtype))
    return out.flatten(2, 3).to(query.dtype), lse.permute(0, 3, 1, 2).flatten(2)


def _visible(seq_lens: Tensor, tree_mask: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Return [B, Q, S] bool: the cache rows that a tree row sees."""
    nodes = mask_from_words(tree_mask, num_rows)
    columns = torch.arange(num_columns, device=seq_lens.device) - seq_lens[:, None]
    in_tree = (columns >= 0) & (columns < num_rows)
    index = columns.clamp(0, num_rows - 1).long()[:, None].expand(-1, num_rows, -1)
    of_tree = nodes.gather(2, index) & in_tree[:, None]
    return of_tree | ((columns < 0)[:, None] & nodes.any(-1, keepdim=True))
