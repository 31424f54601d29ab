# SPDX-License-Identifier: Apache-2.0
"""The best children of tree nodes by the operator markov_topk, without logits per node.

Shapes: R requests, B depths, H hidden size, W parents, V vocabulary, k children.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import npu_ops
from npu_ops.markov_topk import MAX_ROWS, MarkovTopk
from npu_ops.markov_topk import fits as within_limits
from treespark.tree.policy import Children, edge_scores

if TYPE_CHECKING:
    from torch import Tensor

    from treespark.drafter.heads import MarkovHead
    from treespark.tree.policy import NodeChildren


def pays(w2: Tensor) -> bool:
    """Whether the operator with this weight is no slower than logits of every parent.

    Serving and replay in training ask alike. Without a kernel it sums products of half precision in
    float32, by converting w2: measured on a CPU, replay in training then takes 1.2 times as long.
    """
    is_half = w2.dtype in (torch.bfloat16, torch.float16)
    return w2.is_mkldnn or not is_half or npu_ops.has_kernel("markov_topk", w2.device)


def markov_children(
    head: MarkovHead, hidden: Tensor, base: Tensor, from_logits: NodeChildren
) -> NodeChildren:
    """Return the function of a head without a state along paths.

    hidden [R, B, H]; base [R, B, V], the logits without the head's bias. from_logits: the same
    function, for sizes beyond the operator's limits and where it does not pay. More requests than
    one call of the operator takes are several calls.
    """
    if not pays(head.projection):
        return from_logits
    num_requests, num_depths, vocab = base.shape
    rank, table = head.markov_w1.embedding_dim, base.flatten(0, 1)
    first_rows = torch.arange(num_requests, device=base.device, dtype=torch.int32) * num_depths

    def node_children(
        depth: int, parent_tokens: Tensor, branching: int, needed: Tensor | None = None
    ) -> Children:
        width, k = parent_tokens.shape[1], min(branching, vocab)
        if not within_limits(rank, k, max(width, num_depths)):
            return from_logits(depth, parent_tokens, branching)
        latent = head.latent(parent_tokens, hidden[:, depth - 1 : depth]).flatten(0, 1)
        if num_requests == 0:
            # after the head's call, which is a collective one where weights are spread over ranks
            nothing = base.new_empty(0, width, k, dtype=torch.float32)
            return Children(nothing.long(), nothing, nothing[..., 0])
        base_row = (first_rows + (depth - 1)).repeat_interleave(width)
        most = MAX_ROWS // max(width, num_depths)
        if needed is not None and num_requests <= most:
            rows = needed.flatten().nonzero().squeeze(1)
            some = npu_ops.markov_topk(table, base_row[rows], latent[rows], head.projection, k)
            best = _spread(some, rows, len(base_row))
        else:
            found = [
                npu_ops.markov_topk(
                    table[first * num_depths : (first + most) * num_depths],
                    base_row[: min(most, num_requests - first) * width],
                    latent[first * width : (first + most) * width],
                    head.projection,
                    k,
                )
                for first in range(0, num_requests, most)
            ]
            best = MarkovTopk(*map(torch.cat, zip(*found, strict=True)))
        shape = (num_requests, width, k)
        log_probs = edge_scores(best.values - best.lse[:, None])
        tokens, lse = best.indices.long().view(shape), best.lse.view(shape[:2])
        return Children(tokens, log_probs.view(shape), lse)

    return node_children


def _spread(best: MarkovTopk, rows: Tensor, num_rows: int) -> MarkovTopk:
    """Put the results of `rows` at their places among num_rows; elsewhere values of -inf."""
    values = best.values.new_full((num_rows, best.values.shape[1]), -torch.inf)
    indices, lse = torch.zeros_like(values, dtype=torch.int32), values.new_zeros(num_rows)
    values[rows], indices[rows], lse[rows] = best
    return MarkovTopk(values, indices, lse)
