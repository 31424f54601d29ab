# SPDX-License-Identifier: Apache-2.0
"""The operators of TreeSpark, for an NPU by own kernels, for every other device in torch.

    markov_topk      best tokens and log-sum-exp of base logits plus a low-rank bias
    tree_attention   attention of tree rows over a prefix and their ancestors
    pack_tree        the best nodes of a candidate pool, their parents and ancestor words

They are registered as torch.ops.treespark.*; the functions here are the same calls with names for
the results. This package imports nothing of treespark. registry.py says what is active and why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from npu_ops.markov_topk import MarkovTopk
from npu_ops.pack_tree import PackedRows
from npu_ops.registry import has_kernel, load_library, missing_kernels, status
from npu_ops.tree_attention import TreeAttention
from npu_ops.words import mask_from_words, num_words, words_from_mask

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "has_kernel",
    "load_library",
    "markov_topk",
    "mask_from_words",
    "missing_kernels",
    "num_words",
    "pack_tree",
    "status",
    "tree_attention",
    "words_from_mask",
]


def markov_topk(
    base_logits: Tensor,
    base_row: Tensor,
    latent: Tensor,
    w2: Tensor,
    k: int,
    inv_temperature: float = 1.0,
    vocab_size: int = -1,
) -> MarkovTopk:
    """Return the k best of z = (base_logits[base_row] + latent @ w2.T) * inv_temperature.

    base_logits [R0, V] bfloat16, float16 or float32; base_row [R] int32; latent [R, r] and w2
    [V, r] of one dtype, w2 contiguous. vocab_size: columns from there on do not exist, -1 = V.
    Returns values [R, k] float32 and indices [R, k] int32, larger value first, then lower index,
    and lse [R] float32, the log-sum-exp of the row: log-probabilities are values - lse. NaN counts
    as -inf. Gradients reach base_logits, latent and w2. Limits and errors: markov_topk/README.md.
    """
    return MarkovTopk(
        *torch.ops.treespark.markov_topk.default(
            base_logits, base_row, latent, w2, k, inv_temperature, vocab_size
        )
    )


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    block_table: Tensor | None = None,
    scale: float = 0.0,
    block_size: int = 0,
) -> TreeAttention:
    """Return the attention of Q tree rows over their prefix and the tree nodes they see.

    query [B, Q, Hq, D]; key and value [B, S, Hkv, D], or [num_blocks, block_size, Hkv, D] with
    block_table [B, max_blocks] int32; the tree's own rows stand at seq_lens [B] int32 and behind.
    tree_mask [B, Q, W] int32 words, see words.py; a row of zero words is padding. scale 0 means
    D ** -0.5.
    Returns out [B, Q, Hq, D] in the query's dtype, 0 for padding, and lse [B, Q, Hq] float32, the
    log-sum-exp of the scaled scores, -inf for padding. Errors: tree_attention/README.md.
    """
    return TreeAttention(
        *torch.ops.treespark.tree_attention.default(
            query, key, value, seq_lens, tree_mask, block_table, scale, block_size
        )
    )


def pack_tree(
    scores: Tensor, parents: Tensor, depths: Tensor, counts: Tensor, depth_bias: Tensor, n: int
) -> PackedRows:
    """Return the n best of C candidates per request as n + 1 rows, the anchor being row 0.

    scores [B, C] float32; parents [B, C] int32, an earlier column or -1; depths [B, C] int32,
    non-decreasing; counts [B] int32, candidates present; depth_bias [D + 1] float32, added by
    depth. Order: larger min over the path of score + bias first, then lower column; NaN is -inf.
    Returns index [B, n] int32, the kept columns ascending, -1 = none; parent, depth and position
    [B, n + 1] int32; mask [B, n + 1, W] int32 words; count [B] int32, nodes kept.
    Errors: pack_tree/README.md.
    """
    return PackedRows(
        *torch.ops.treespark.pack_tree.default(scores, parents, depths, counts, depth_bias, n)
    )
