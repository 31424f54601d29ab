# SPDX-License-Identifier: Apache-2.0
"""markov_topk: best tokens and log-sum-exp of base logits plus a low-rank bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from npu_ops.markov_topk import fast
from npu_ops.markov_topk.contract import MAX_K, MAX_RANK, MAX_ROWS, check_parents, fake, fits
from npu_ops.markov_topk.gradient import backward, setup_context
from npu_ops.markov_topk.reference import reference
from npu_ops.registry import OpSpec, register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_K", "MAX_RANK", "MAX_ROWS", "PARENT", "SPEC", "MarkovTopk", "fits"]


class MarkovTopk(NamedTuple):
    """values [R, k] float32 best first, indices [R, k] int32, lse [R] float32."""

    values: Tensor
    indices: Tensor
    lse: Tensor


SPEC = register(
    OpSpec(
        name="markov_topk",
        schema="(Tensor base_logits, Tensor base_row, Tensor latent, Tensor w2, int k, "
        "float inv_temperature=1.0, int vocab_size=-1) -> (Tensor values, Tensor indices, "
        "Tensor lse)",
        reference=reference,
        fake=fake,
        # MkldnnCPU: w2 in the blocked order of oneDNN, which only its own product can read.
        fast={"CPU": fast.on_cpu, "CUDA": fast.on_cuda, "MkldnnCPU": fast.with_prepacked_w2},
        backward=backward,
        setup_context=setup_context,
    )
)


def _parent(
    base_logits: Tensor,
    base_row: Tensor,
    w1: Tensor,
    parent_ids: Tensor,
    w2: Tensor,
    k: int,
    inv_temperature: float = 1.0,
    vocab_size: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """markov_topk of the vanilla head, whose latent is the parent token's row of w1 [V, r].

    Made of two operators on every device, so it runs the kernel of markov_topk where that is.
    """
    from npu_ops import markov_topk

    check_parents(base_logits, base_row, w1, parent_ids)
    if parent_ids.device.type != "cpu":
        # as kernels do: no wait for the device to look at values, and nothing read out of bounds
        parent_ids = parent_ids.clamp(0, w1.shape[0] - 1)
    latent = w1.index_select(0, parent_ids)
    return markov_topk(base_logits, base_row, latent, w2, k, inv_temperature, vocab_size)


PARENT = register(
    OpSpec(
        name="markov_topk.parent",
        schema="(Tensor base_logits, Tensor base_row, Tensor w1, Tensor parent_ids, Tensor w2, "
        "int k, float inv_temperature=1.0, int vocab_size=-1) -> (Tensor values, Tensor indices, "
        "Tensor lse)",
        reference=_parent,
    )
)
