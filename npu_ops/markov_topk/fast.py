# SPDX-License-Identifier: Apache-2.0
"""markov_topk in torch without a sort of the vocabulary.

One pass over z finds the chunks that can hold the best entries, see ordered.py.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import inf

from npu_ops import registry
from npu_ops.checks import HALVES
from npu_ops.markov_topk.contract import check, check_values, compute_dtype
from npu_ops.ordered import ordered_topk

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Results = tuple[Tensor, Tensor, Tensor]

# Vocabulary rows of w2 converted at a time where a half-precision product would round its result:
# 8 MB in float32 at rank 256.
_CHUNK = 8192


def on_cpu(
    base_logits: Tensor,
    base_row: Tensor,
    latent: Tensor,
    w2: Tensor,
    k: int,
    inv_temperature: float = 1.0,
    vocab_size: int = -1,
) -> Results:
    """Return what the reference returns."""
    num_tokens = check(base_logits, base_row, latent, w2, k, inv_temperature, vocab_size)
    dtype = compute_dtype(base_logits, latent)

    def biased() -> Tensor:
        bias = _product(latent, w2[:num_tokens], dtype)
        return _scaled(_add_rows(bias, base_logits, base_row), inv_temperature)

    return _checked_best(biased, k)


def with_prepacked_w2(
    base_logits: Tensor,
    base_row: Tensor,
    latent: Tensor,
    w2: Tensor,
    k: int,
    inv_temperature: float = 1.0,
    vocab_size: int = -1,
) -> Results:
    """Return the same for w2 in oneDNN's blocked order. A bfloat16 product is rounded to bfloat16.

    Inference only.
    """
    num_tokens = check(base_logits, base_row, latent, w2, k, inv_temperature, vocab_size)
    dtype = compute_dtype(base_logits, latent)

    def biased() -> Tensor:
        bias = torch.ops.mkldnn._linear_pointwise.default(latent, w2, None, "none", [], "")
        z = _add_rows(bias.to(dtype)[:, :num_tokens], base_logits, base_row)
        return _scaled(z, inv_temperature)

    return _checked_best(biased, k)


def on_cuda(
    base_logits: Tensor,
    base_row: Tensor,
    latent: Tensor,
    w2: Tensor,
    k: int,
    inv_temperature: float = 1.0,
    vocab_size: int = -1,
) -> Results:
    """Return what the reference returns, without waiting for the device."""
    num_tokens = check(base_logits, base_row, latent, w2, k, inv_temperature, vocab_size)
    if registry.CHECK_VALUES:
        check_values(base_logits, base_row)
    dtype = compute_dtype(base_logits, latent)
    z = _product(latent, w2[:num_tokens], dtype)
    z.add_(base_logits[:, :num_tokens].index_select(0, base_row))
    z = _scaled(z, inv_temperature)
    return _best(z.masked_fill_(z.isnan(), -inf), k)


def _checked_best(logits: Callable[[], Tensor], k: int) -> Results:
    """Return the results for logits() -> z [R, n], a new tensor at each call.

    Looking for NaN costs a pass over all entries, but NaN makes lse NaN: only [R] is looked at.
    """
    results = _best_of_finite(logits(), k)
    if not results[2].isnan().any():
        return results
    z = logits()
    return _best(z.masked_fill_(z.isnan(), -inf), k)


def _product(latent: Tensor, w2: Tensor, dtype: torch.dtype) -> Tensor:
    """Return latent @ w2.T [R, n] in `dtype`, summed in it."""
    if latent.dtype == dtype:
        return latent @ w2.T
    if latent.device.type == "cuda" and latent.dtype in HALVES and dtype == torch.float32:
        return torch.mm(latent, w2.T, out_dtype=dtype)
    bias = torch.empty(len(latent), len(w2), dtype=dtype, device=latent.device)
    latent = latent.to(dtype)
    for start in range(0, len(w2), _CHUNK):
        rows = w2[start : start + _CHUNK].to(dtype)
        bias[:, start : start + len(rows)] = latent @ rows.T
    return bias


def _add_rows(bias: Tensor, base_logits: Tensor, base_row: Tensor) -> Tensor:
    """Add base_logits[base_row] to bias [R, n] in place; neighbours that share a row at once."""
    rows, first = base_row.tolist(), 0
    if rows and not 0 <= min(rows) <= max(rows) < len(base_logits):
        check_values(base_logits, base_row)
    for row, group in groupby(rows):
        last = first + len(list(group))
        bias[first:last].add_(base_logits[row, : bias.shape[1]])
        first = last
    return bias


def _scaled(z: Tensor, inv_temperature: float) -> Tensor:
    """Multiply z in place, unless that would change nothing."""
    return z if inv_temperature == 1.0 else z.mul_(inv_temperature)


def _best(z: Tensor, k: int) -> Results:
    """Return values, indices and lse of z [R, n] on any device."""
    values, indices = ordered_topk(z, k)
    return values, indices.int(), z.logsumexp(-1)


def _best_of_finite(z: Tensor, k: int) -> Results:
    """Return the same on a CPU; lse is NaN in rows with NaN, with +inf or with -inf throughout.

    log_softmax takes half the time of logsumexp there, and of its result one entry says it all.
    """
    values, indices = ordered_topk(z, k)
    least = z.log_softmax(-1).gather(-1, indices[:, :1])
    return values, indices.int(), (values[:, :1] - least).squeeze(1)
