# SPDX-License-Identifier: Apache-2.0
"""Gradients of markov_topk: of values and lse with respect to base_logits, latent and w2.

With z = (base_logits[base_row] + latent @ w2.T) * t the values are entries of z and the gradient of
lse is softmax(z) = exp(z - lse). z is computed again, so nothing of size [R, V] is kept in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import inf
from torch.nn.functional import pad

from npu_ops.markov_topk.reference import logits

if TYPE_CHECKING:
    from torch import Tensor


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep the inputs, the indices and lse."""
    base_logits, base_row, latent, w2, _, inv_temperature, vocab_size = inputs
    values, indices, lse = output
    ctx.save_for_backward(base_logits, base_row, latent, w2, indices, lse)
    ctx.inv_temperature = inv_temperature
    ctx.num_tokens = base_logits.shape[1] if vocab_size == -1 else vocab_size
    ctx.dtype = values.dtype


def backward(
    ctx: Any, grad_values: Tensor, _: Tensor | None, grad_lse: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of (base_logits, base_row, latent, w2, k, inv_temperature, vocab_size).

    They have their inputs' dtypes and are 0 in the columns from vocab_size on.
    """
    with torch.autocast(grad_values.device.type, enabled=False):
        return _gradients(ctx, grad_values, grad_lse)


def _gradients(ctx: Any, grad_values: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    base_logits, base_row, latent, w2, indices, lse = ctx.saved_tensors
    z = logits(base_logits, base_row, latent, w2, ctx.inv_temperature, ctx.num_tokens, ctx.dtype)
    # A row that is -inf throughout has lse -inf and no gradient.
    probs = (z - lse.masked_fill(lse == -inf, 0.0)[:, None]).exp()
    grad = (probs * grad_lse[:, None]).scatter_add(1, indices.long(), grad_values)
    grad = grad * ctx.inv_temperature
    padding = base_logits.shape[1] - ctx.num_tokens
    grad_base = grad_latent = grad_w2 = None
    if ctx.needs_input_grad[0]:
        whole = grad.new_zeros(base_logits.shape[0], ctx.num_tokens)
        grad_base = pad(whole.index_add(0, base_row, grad), (0, padding)).to(base_logits.dtype)
    if ctx.needs_input_grad[2]:
        grad_latent = (grad @ w2[: ctx.num_tokens].to(ctx.dtype)).to(latent.dtype)
    if ctx.needs_input_grad[3]:
        product = grad.T @ latent.to(ctx.dtype)
        grad_w2 = pad(product, (0, 0, 0, padding)).to(w2.dtype)
    return grad_base, None, grad_latent, grad_w2, None, None, None
