# SPDX-License-Identifier: Apache-2.0
"""Limits, errors and results' shapes of tree_attention.

Shapes: B requests, Q tree rows, Hq query heads, Hkv key/value heads, D head size, S cache rows,
W mask words; paged: P blocks of block_size rows, M blocks of a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from npu_ops.checks import FLOATS, check_device, check_dtype, check_range, check_shape, refuse
from npu_ops.words import num_words

if TYPE_CHECKING:
    from torch import Tensor

OP = "tree_attention"
HEAD_DIMS = (64, 128)
# Four mask words a row, and 128 rows of a group of 4 heads in the kernel's two sub-tiles.
MAX_ROWS = 128
MAX_BLOCK_SIZE, BLOCK_STEP = 256, 16
_INTEGERS = (torch.int32,)


def fits(head_dim: int, num_rows: int) -> bool:
    """Whether a call with these sizes is within the operator's limits."""
    return head_dim in HEAD_DIMS and 1 <= num_rows <= MAX_ROWS


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    block_table: Tensor | None,
    scale: float,
    block_size: int,
) -> None:
    """Raise RuntimeError for arguments against the contract, as far as shapes and dtypes say."""
    _check_shapes(query, key, value, seq_lens, tree_mask, block_table, block_size)
    _check_dtypes(query, key, value, seq_lens, tree_mask, block_table)
    _, num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    if head_dim not in HEAD_DIMS:
        refuse(OP, f"D must be {' or '.join(map(str, HEAD_DIMS))}", head_dim)
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        refuse(OP, f"Hq must be a multiple of Hkv={num_kv_heads}", num_heads)
    if not 1 <= num_rows <= MAX_ROWS:
        refuse(OP, f"Q must be in 1..{MAX_ROWS}", num_rows)
    if scale < 0:
        refuse(OP, "scale must not be negative", scale)


def _check_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    block_table: Tensor | None,
    block_size: int,
) -> None:
    check_shape(OP, "query", query, "B Q Hq D", {})
    num_requests, num_rows, _, head_dim = query.shape
    sizes = {"B": num_requests, "Q": num_rows, "D": head_dim}
    if block_size:
        check_shape(OP, "key", key, "P block_size Hkv D", sizes | {"block_size": block_size})
    else:
        check_shape(OP, "key", key, "B S Hkv D", sizes)
    if value.shape != key.shape:
        refuse(OP, f"value must have the shape of key, {list(key.shape)}", list(value.shape))
    check_shape(OP, "seq_lens", seq_lens, "B", sizes)
    check_shape(OP, "tree_mask", tree_mask, "B Q W", sizes | {"W": num_words(num_rows)})
    if (block_table is None) != (block_size == 0):
        given = "none" if block_table is None else "one"
        refuse(OP, f"block_table must be given if and only if block_size {block_size} > 0", given)
    if block_table is not None:
        check_shape(OP, "block_table", block_table, "B M", sizes)
        if block_size % BLOCK_STEP or not 0 < block_size <= MAX_BLOCK_SIZE:
            limits = f"{BLOCK_STEP}..{MAX_BLOCK_SIZE}"
            refuse(OP, f"block_size must be a multiple of {BLOCK_STEP} in {limits}", block_size)


def _check_dtypes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    block_table: Tensor | None,
) -> None:
    integers = {"seq_lens": seq_lens, "tree_mask": tree_mask}
    if block_table is not None:
        integers["block_table"] = block_table
    check_dtype(OP, "query", query, FLOATS)
    check_dtype(OP, "key", key, (query.dtype,))
    check_dtype(OP, "value", value, (query.dtype,))
    for name, tensor in integers.items():
        check_dtype(OP, name, tensor, _INTEGERS)
    check_device(OP, "query", query.device, key=key, value=value, **integers)


def check_values(
    key: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    block_table: Tensor | None,
    block_size: int,
) -> None:
    """Raise RuntimeError where rows or blocks do not exist; waits for the device."""
    room = key.shape[1] if block_table is None else block_table.shape[1] * block_size
    num_rows = num_valid_rows(tree_mask)
    check_range(OP, "seq_lens + tree rows", seq_lens + num_rows, 0, room)
    check_range(OP, "seq_lens", seq_lens, 0, room)
    if block_table is not None:
        used = (seq_lens + num_rows + block_size - 1) // block_size
        columns = torch.arange(block_table.shape[1], device=key.device)
        blocks = block_table.masked_fill(columns >= used[:, None], 0)
        check_range(OP, "block_table", blocks, 0, max(len(key) - 1, 0))


def num_valid_rows(tree_mask: Tensor) -> Tensor:
    """Return [B] int32: rows up to the last one that has a bit."""
    rows = torch.arange(1, tree_mask.shape[1] + 1, device=tree_mask.device)
    return ((tree_mask != 0).any(-1) * rows).amax(1).int()


def scale_of(scale: float, head_dim: int) -> float:
    """Return the factor of the scores; 0 stands for head_dim ** -0.5."""
    return scale if scale else head_dim**-0.5


def lse_dtype(query: Tensor) -> torch.dtype:
    """Return float32, in which scores are summed; float64 for a query in it."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    block_table: Tensor | None = None,
    scale: float = 0.0,
    block_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return empty results of the right shapes and dtypes."""
    check(query, key, value, seq_lens, tree_mask, block_table, scale, block_size)
    out = query.new_empty(query.shape)
    return out, query.new_empty(query.shape[:3], dtype=lse_dtype(query))
