# SPDX-License-Identifier: Apache-2.0
"""From the target's logits to each request's accepted path: choose, walk, fetch in one transfer.

Shapes: R requests, N tree nodes, V vocabulary, D deepest depth asked for, K alternatives reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from treespark.device import to_host
from treespark.serving.commit import Proposal
from treespark.serving.records import TokenLogprobs
from treespark.serving.sampling import sample_token, uniform
from treespark.tree.policy import ordered_topk
from treespark.tree.verify import AcceptedPath, accept_tokens, path_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from treespark.serving.scheduler import Request
    from treespark.tree.packed import PackedTree


class Accepted(NamedTuple):
    """One request's verified path: node indices with the root first, tokens with the bonus last.

    logprobs: of every token, None unless the request asks for them.  ranks: of every accepted node
    its place among all nodes of its tree, 1 for the best; empty unless asked for.
    """

    nodes: list[int]
    tokens: list[int]
    proposal: Proposal
    logprobs: list[TokenLogprobs] | None = None
    ranks: Sequence[int] = ()


def accept(
    requests: Sequence[Request],
    tree: PackedTree,
    logits: Tensor,
    depth: int,
    *,
    ranked: bool = False,
) -> list[Accepted]:
    """Walk the target's choices down each tree; the round's one transfer to the host.

    logits: [R, N+1, V] float32.  depth: D, at least that of the deepest node.  ranked: tell ranks.
    """
    path = accept_tokens(tree, target_tokens(requests, tree, logits), depth)
    counts = torch.stack([path.num_accepted, tree.num_nodes, tree.depths.amax(1).long()], 1)
    asking = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
    parts = [counts, path.retrieve_indices, path.tokens]
    if ranked:
        parts.append(path_ranks(tree, path))
    if asking:
        num_top = max(requests[i].params.logprobs or 0 for i in asking)
        parts += path_logprobs(logits, path, asking, num_top)
    counts_rows, nodes_rows, tokens_rows, *others = to_host(parts)
    ranks_rows = others.pop(0) if ranked else [[]] * len(requests)
    tables = dict(zip(asking, zip(*others, strict=True), strict=True))
    accepted = []
    rows = zip(counts_rows, nodes_rows, tokens_rows, ranks_rows, strict=True)
    for i, (row, nodes, tokens, ranks) in enumerate(rows):
        num_rows = row[0] + 1
        logprobs = None
        if i in tables:
            num_top = requests[i].params.logprobs or 0
            logprobs = _token_logprobs(tokens[:num_rows], *tables[i], num_top)
        proposal, ranks = Proposal(*row), ranks[1:num_rows]
        accepted.append(Accepted(nodes[:num_rows], tokens[:num_rows], proposal, logprobs, ranks))
    return accepted


def target_tokens(requests: Sequence[Request], tree: PackedTree, logits: Tensor) -> Tensor:
    """Return [R, N+1] int64, the token that each request puts after each slot of its tree.

    The most likely one, the lowest id on ties. After the root of a sampled request, whose tree is
    nothing else, the one it draws. Where an output would be shorter than `min_tokens`, stop ids
    are left out.
    """
    chosen = logits.argmax(-1)
    for i, request in enumerate(requests):
        params, num_output, rows = request.params, len(request.output_token_ids), logits[i]
        # The token after a node at depth d is output token number num_output + d + 1.
        num_early = params.min_tokens - num_output
        if num_early > 0:
            stops = [token for token in request.stop_ids if token < logits.shape[-1]]
            index = torch.tensor(stops, dtype=torch.int64, device=logits.device)
            rows = rows.index_fill(-1, index, -torch.inf)
            chosen[i] = torch.where(tree.depths[i] < num_early, rows.argmax(-1), chosen[i])
        if not params.is_greedy:
            chosen[i, 0] = sample_token(rows[0], params, uniform(request.seed, num_output))
    return chosen


def path_logprobs(
    logits: Tensor, path: AcceptedPath, rows: Sequence[int], num_top: int
) -> tuple[Tensor, Tensor]:
    """Return ids [., D+1, 1+K] int64 and log-probabilities [., D+1, 1+K] float32 of some requests.

    rows: which of the R.  Column 0 is the path's own token, its rank standing in place of the id;
    the others are the K = min(num_top, V) most likely tokens.
    """
    index = torch.tensor(rows, device=logits.device)
    nodes, tokens = path.retrieve_indices[index], path.tokens[index]
    log_probs = logits[index[:, None], nodes.clamp_min(0)].log_softmax(-1)
    own = log_probs.gather(-1, tokens.clamp_min(0)[..., None])
    rank = (log_probs > own).sum(-1, keepdim=True) + 1
    best = ordered_topk(log_probs, num_top)
    return torch.cat([rank, best.indices], -1), torch.cat([own, best.values], -1)


def _token_logprobs(
    tokens: list[int], ids: list[list[int]], values: list[list[float]], num_top: int
) -> list[TokenLogprobs]:
    """One entry per token from its rows of `path_logprobs`, cut to the request's own number."""
    entries: list[TokenLogprobs] = []
    for token, (rank, *best), (own, *others) in zip(tokens, ids, values, strict=False):
        top: list[Any] = list(zip(best[:num_top], others[:num_top], strict=True))
        entries.append(TokenLogprobs(token, own, rank, top))
    return entries
