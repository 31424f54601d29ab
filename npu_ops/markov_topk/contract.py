# SPDX-License-Identifier: Apache-2.0
"""Limits, errors and results' shapes of markov_topk.

Shapes: R rows (nodes to expand), R0 rows of base logits, r rank, V vocabulary, k best tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from npu_ops.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_range,
    check_shape,
    refuse,
)

if TYPE_CHECKING:
    from torch import Tensor

OP = "markov_topk"
# One list of the kernel's running top-k is a vector register's worth of pairs.
MAX_K = 32
# The latents of a tile of 128 rows fill L0A at this rank; 16 is the cube unit's granule.
MAX_RANK, RANK_STEP = 512, 16
MAX_ROWS = 4096


def fits(rank: int, k: int, num_rows: int) -> bool:
    """Whether a call with these sizes is within the operator's limits; num_rows: R and R0."""
    is_rank = 0 < rank <= MAX_RANK and rank % RANK_STEP == 0
    return is_rank and 1 <= k <= MAX_K and num_rows <= MAX_ROWS


def check(
    base_logits: Tensor,
    base_row: Tensor,
    latent: Tensor,
    w2: Tensor,
    k: int,
    inv_temperature: float,
    vocab_size: int,
) -> int:
    """Raise RuntimeError for arguments against the contract; return the size of the vocabulary."""
    check_shape(OP, "base_logits", base_logits, "R0 V", {})
    check_shape(OP, "base_row", base_row, "R", {})
    check_shape(OP, "latent", latent, "R r", {"R": base_row.shape[0]})
    (num_rows, rank), vocab = latent.shape, base_logits.shape[1]
    check_shape(OP, "w2", w2, "V r", {"V": vocab, "r": rank})
    check_dtype(OP, "base_logits", base_logits, FLOATS)
    check_dtype(OP, "base_row", base_row, (torch.int32,))
    check_dtype(OP, "latent", latent, FLOATS)
    check_dtype(OP, "w2", w2, (latent.dtype,))
    device = base_logits.device
    check_device(OP, "base_logits", device, base_row=base_row, latent=latent, w2=w2)
    check_contiguous(OP, "w2", w2)
    num_tokens = vocab if vocab_size == -1 else vocab_size
    for name, size, lowest, highest in (
        ("R", num_rows, 0, MAX_ROWS),
        ("R0", base_logits.shape[0], 1, MAX_ROWS),
        ("vocab_size", num_tokens, 1, vocab),
        ("r", rank, RANK_STEP, MAX_RANK),
        ("k", k, 1, min(MAX_K, num_tokens)),
    ):
        if not lowest <= size <= highest:
            refuse(OP, f"{name} must be in {lowest}..{highest}", size)
    if rank % RANK_STEP:
        refuse(OP, f"r must be a multiple of {RANK_STEP}", rank)
    if not inv_temperature > 0:
        refuse(OP, "inv_temperature must be positive", inv_temperature)
    return num_tokens


def check_parents(base_logits: Tensor, base_row: Tensor, w1: Tensor, parent_ids: Tensor) -> None:
    """Raise RuntimeError for w1 or parent_ids of the overload `parent` against the contract."""
    check_shape(OP, "w1", w1, "V r", {"V": base_logits.shape[1]})
    check_shape(OP, "parent_ids", parent_ids, "R", {"R": base_row.shape[0]})
    check_dtype(OP, "parent_ids", parent_ids, (torch.int32,))
    check_device(OP, "base_logits", base_logits.device, w1=w1, parent_ids=parent_ids)


def check_values(base_logits: Tensor, base_row: Tensor) -> None:
    """Raise RuntimeError for a row number out of range; waits for the device."""
    check_range(OP, "base_row", base_row, 0, base_logits.shape[0] - 1)


def compute_dtype(base_logits: Tensor, latent: Tensor) -> torch.dtype:
    """Return float32, in which scores are summed and returned; float64 where an input is."""
    is_double = torch.float64 in (base_logits.dtype, latent.dtype)
    return torch.float64 if is_double else torch.float32


def fake(
    base_logits: Tensor,
    base_row: Tensor,
    latent: Tensor,
    w2: Tensor,
    k: int,
    inv_temperature: float = 1.0,
    vocab_size: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty results of the right shapes and dtypes."""
    check(base_logits, base_row, latent, w2, k, inv_temperature, vocab_size)
    num_rows, dtype = latent.shape[0], compute_dtype(base_logits, latent)
    return (
        latent.new_empty((num_rows, k), dtype=dtype),
        latent.new_empty((num_rows, k), dtype=torch.int32),
        latent.new_empty((num_rows,), dtype=dtype),
    )
