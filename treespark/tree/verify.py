# SPDX-License-Identifier: Apache-2.0
"""Greedy verification: the path that the target would have written itself, and one more token.

Shapes: R requests, N budget (N+1 slots), V vocabulary, D deepest depth asked for.

A node is accepted if it and all its ancestors carry the token that the target puts after their
parent. Siblings have distinct tokens, hence at most one node per depth is accepted, and the
accepted nodes are one path down from the anchor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treespark.tree.packed import PackedTree


@dataclass
class AcceptedPath:
    """Outcome of one round.

    num_accepted [R] int64: accepted draft tokens, the bonus token excluded.
    retrieve_indices [R, D+1] int64: slots of the path from the anchor on, padded with -1.
    tokens [R, D+1] int64: the path's num_accepted tokens, the bonus token, then -1.
    """

    num_accepted: Tensor
    retrieve_indices: Tensor
    tokens: Tensor


def accept_tokens(tree: PackedTree, target_tokens: Tensor, depth: int) -> AcceptedPath:
    """Return the longest path that agrees with the target's own tokens.

    target_tokens: [R, N+1] int64, what the target puts after each slot; padding is ignored.
    depth: D, at least that of the deepest node.  The result is that of walking down from the anchor
    for as long as some child carries the target's token.
    Source: TreeSpark A.1 (verification).
    """
    expected = target_tokens.gather(1, tree.parents.clamp_min(0).long())
    matches = (tree.tokens == expected) | (tree.parents < 0)
    table = tree.retrieve_table(depth)
    path_matches = matches[:, None].expand(-1, table.shape[1], -1).gather(2, table.clamp_min(0))
    accepted = path_matches.all(2) & tree.valid
    num_accepted, last = tree.depths.masked_fill(~accepted, -1).max(1)
    retrieve_indices = table.gather(1, last[:, None, None].expand(-1, 1, depth + 1)).squeeze(1)
    # After each slot of the path the target puts the path's next token, after the last the bonus.
    tokens = target_tokens.gather(1, retrieve_indices.clamp_min(0))
    return AcceptedPath(
        num_accepted=num_accepted.long(),
        retrieve_indices=retrieve_indices,
        tokens=tokens.masked_fill(retrieve_indices < 0, -1),
    )


def path_ranks(tree: PackedTree, path: AcceptedPath) -> Tensor:
    """Return the place of each slot of the path among all nodes of its tree, [R, D+1] int64.

    1 is the best node by the order that packs; anchor and padding have 0. The nodes up to place n
    are the tree of budget n, so the path in that tree ends before the first place above n.
    """
    slots = path.retrieve_indices.clamp_min(0)
    own = tree.scores.gather(1, slots)[..., None]
    scores, is_node = tree.scores[:, None], tree.valid & (tree.parents >= 0)
    columns = torch.arange(tree.scores.shape[1], device=slots.device)
    ahead = (scores > own) | ((scores == own) & (columns <= slots[..., None]))
    return (ahead & is_node[:, None]).sum(2).masked_fill(path.retrieve_indices < 1, 0)


def accept_greedy(tree: PackedTree, target_logits: Tensor, depth: int) -> AcceptedPath:
    """Return the accepted path for the target's most likely tokens, the lowest id on ties.

    target_logits: [R, N+1, V]; NaN counts as the largest logit, as in plain greedy decoding.
    depth: as in `accept_tokens`.
    """
    return accept_tokens(tree, target_logits.argmax(-1), depth)
