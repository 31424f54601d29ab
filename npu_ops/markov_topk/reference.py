# SPDX-License-Identifier: Apache-2.0
"""markov_topk in plain PyTorch: the whole [R, V] and a stable sort of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import inf

from npu_ops.markov_topk.contract import check, check_values, compute_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def logits(
    base_logits: Tensor,
    base_row: Tensor,
    latent: Tensor,
    w2: Tensor,
    inv_temperature: float,
    num_tokens: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return z [R, num_tokens] in `dtype`; NaN is -inf."""
    w2 = w2.to_dense() if w2.is_mkldnn else w2
    bias = latent.to(dtype) @ w2[:num_tokens].to(dtype).T
    base = base_logits[:, :num_tokens].index_select(0, base_row).to(dtype)
    z = (base + bias) * inv_temperature
    return z.masked_fill(z.isnan(), -inf)


def reference(
    base_logits: Tensor,
    base_row: Tensor,
    latent: Tensor,
    w2: Tensor,
    k: int,
    inv_temperature: float = 1.0,
    vocab_size: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return values [R, k], indices [R, k] int32 and lse [R]; see npu_ops.markov_topk."""
    num_tokens = check(base_logits, base_row, latent, w2, k, inv_temperature, vocab_size)
    check_values(base_logits, base_row)
    dtype = compute_dtype(base_logits, latent)
    z = logits(base_logits, base_row, latent, w2, inv_temperature, num_tokens, dtype)
    values, indices = z.sort(dim=-1, descending=True, stable=True)
    return values[:, :k].contiguous(), indices[:, :k].int(), z.logsumexp(-1)
