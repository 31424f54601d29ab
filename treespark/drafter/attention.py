# SPDX-License-Identifier: Apache-2.0
"""Attention of draft blocks over target context plus their own block, as pure functions.

Shapes: S sequences, A anchors, W slots of a block, L context rows, R requests, Hq query heads,
Hkv key/value heads, G = Hq / Hkv, D head size. K and V are never repeated over the group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Largest number of scores held at once in training: 32M fp32 values are 128 MiB.
MAX_SCORES = 1 << 25


def context_bias(limits: Tensor, length: int, num_slots: int) -> Tensor:
    """Return the additive mask [S, A, L + W] float32: 0 where a block may look, else -inf.

    limits [S, A] int64: a block sees the context rows before its limit (its anchor's position, 0
    for a dummy block) and all of its own slots.
    """
    columns = torch.arange(length + num_slots, device=limits.device)
    hidden = (columns >= limits.unsqueeze(-1)) & (columns < length)
    return torch.zeros(hidden.shape, device=limits.device).masked_fill_(hidden, float("-inf"))


def training_attention(
    query: Tensor, block_kv: tuple[Tensor, Tensor], context_kv: tuple[Tensor, Tensor], bias: Tensor
) -> Tensor:
    """Return [S, A, W, Hq, D]: every block attends its visible context and its own slots.

    query [S, A, W, Hq, D]; block_kv two [S, A, W, Hkv, D]; context_kv two [S, L, Hkv, D]; bias from
    `context_bias`. Blocks are handled in chunks of at most `MAX_SCORES` scores; with more than one
    chunk the scores are recomputed in the backward pass, so that memory stays bounded.
    """
    num_sequences, num_anchors, num_slots, num_heads, _ = query.shape
    per_anchor = num_sequences * num_slots * num_heads * bias.shape[-1]
    chunk = max(1, MAX_SCORES // per_anchor)
    if chunk >= num_anchors:
        return _attend_blocks(query, *block_kv, *context_kv, bias)
    outputs = []
    for start in range(0, num_anchors, chunk):
        part = slice(start, start + chunk)
        outputs.append(
            checkpoint(
                _attend_blocks,
                query[:, part],
                block_kv[0][:, part],
                block_kv[1][:, part],
                *context_kv,
                bias[:, part],
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return torch.cat(outputs, 1)


def _attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, context_k: Tensor, context_v: Tensor, bias: Tensor
) -> Tensor:
    S, A, W, num_heads, D = query.shape
    L, Hkv = context_k.shape[1:3]
    G = num_heads // Hkv
    query = (query * D**-0.5).view(S, A, W, Hkv, G, D).permute(0, 3, 1, 4, 2, 5)
    query = query.reshape(S, Hkv, A, G * W, D)
    key, value = key.permute(0, 3, 1, 4, 2), value.permute(0, 3, 1, 2, 4)
    on_context = query.reshape(S, Hkv, A * G * W, D) @ context_k.permute(0, 2, 3, 1)
    scores = torch.cat((on_context.view(S, Hkv, A, G * W, L), query @ key), -1)
    scores = scores.add_(bias[:, None, :, None].to(scores.dtype))
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    out = weights[..., :L].reshape(S, Hkv, A * G * W, L) @ context_v.transpose(1, 2)
    out = out.view(S, Hkv, A, G * W, D) + weights[..., L:] @ value
    return out.view(S, Hkv, A, G, W, D).permute(0, 2, 4, 1, 3, 5).reshape(S, A, W, num_heads, D)


def packed_attention(
    query: Tensor, block_kv: tuple[Tensor, Tensor], views: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return [R, W, Hq, D]: each request's block attends its own context rows and its own slots.

    query [R, W, Hq, D]; block_kv two [R, W, Hkv, D]; views[i] = (K, V) of request i, each
    [Hkv, n_i, D] with exactly the committed rows. The views are read, never written.
    """
    R, W, num_heads, D = query.shape
    Hkv = block_kv[0].shape[2]
    grouped = query.view(R, W, Hkv, -1, D).permute(0, 2, 3, 1, 4).reshape(R, Hkv, -1, D)
    key, value = block_kv[0].transpose(1, 2), block_kv[1].transpose(1, 2)
    outputs = []
    for i, (context_k, context_v) in enumerate(views):
        outputs.append(
            nn.functional.scaled_dot_product_attention(
                grouped[i : i + 1],
                torch.cat((context_k, key[i]), 1).unsqueeze(0),
                torch.cat((context_v, value[i]), 1).unsqueeze(0),
            )
        )
    out = outputs[0] if R == 1 else torch.cat(outputs)
    return out.view(R, Hkv, -1, W, D).permute(0, 3, 1, 2, 4).reshape(R, W, num_heads, D)
