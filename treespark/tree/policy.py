# SPDX-License-Identifier: Apache-2.0
"""The tree policy: expand a candidate pool depth by depth, then pack its best nodes.

Shapes: R requests, V vocabulary, B depths, W frontier width, k children per parent, M pool size,
N budget.

Every choice follows one total order, so equal logits give equal trees on every device and at every
batch position:

- children of a node:  larger logit, then lower token id;
- frontier of a depth: larger score, then lower creation index;
- packed tree:         larger score, then smaller depth, then lower creation index.

Candidates are numbered as they are created: by depth, then by the parent's rank in its frontier,
then by rank among the siblings. The number is the column in the pool. Depth never decreases along
the columns, so all three orders are one: larger value first, then lower index (`ordered_topk`).

A child never scores above its parent and always stands in a later column. Hence every packed set
holds the parents of its nodes, also where scores tie or are -inf.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, pad

import npu_ops
from npu_ops.ordered import ordered_topk
from npu_ops.pack_tree import fits as within_limits
from treespark.errors import UsageError
from treespark.tree.packed import NO_PARENT, PackedTree

NodeLogits = Callable[[int, Tensor], Tensor]
"""(depth d in 1..B, parent tokens [R, W] int64) -> next-token logits [R, W, V]."""


class Children(NamedTuple):
    """The best children of each parent in the total order.

    tokens [R, W, k] int64.  log_probs [R, W, k] float: of token given parent, at most 0, no NaN.
    lse [R, W] float: log-sum-exp of all logits of the parent, for who computes gradients later.
    """

    tokens: Tensor
    log_probs: Tensor
    lse: Tensor


class NodeChildren(Protocol):
    """What a drafter proposes below nodes of one depth."""

    def __call__(
        self, depth: int, parent_tokens: Tensor, branching: int, needed: Tensor | None = None
    ) -> Children:
        """Return the min(branching, V) children of each parent at depth - 1.

        depth: 1..B.  parent_tokens: [R, W] int64.  needed: [R, W] bool, None for all; the children
        of other parents are never packed, and may be any with scores -inf.
        """
        ...


# Largest trees: as the recipe's `policy` section has them. What is larger exhausts memory, and no
# target gains from it.
MAX_DEPTH, MAX_BRANCHING, MAX_BUDGET = 64, 64, 1024


@dataclass(frozen=True)
class TreePolicy:
    """Shape of the draft tree.

    depth: B, drafted depths below the anchor.  branching: k, children proposed per expanded node.
    budget: N, non-root nodes kept; 0 keeps the anchor alone.  frontier: nodes expanded per depth,
    None = branching.  Raises UsageError for a value that is not an integer in range.
    """

    depth: int = 7
    branching: int = 4
    budget: int = 32
    frontier: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        _require_int("depth", self.depth, 1, MAX_DEPTH)
        _require_int("branching", self.branching, 1, MAX_BRANCHING)
        _require_int("budget", self.budget, 0, MAX_BUDGET)
        if self.frontier is not None:
            _require_int("frontier", self.frontier, 1, MAX_BRANCHING)

    @property
    def frontier_width(self) -> int:
        """Nodes expanded per depth, from depth 2 on."""
        return self.branching if self.frontier is None else self.frontier


@dataclass
class CandidatePool:
    """All nodes that one expansion proposed; the column is the creation index.

    tokens [R, M] int64.  parents [R, M] int64: pool column, -1 = anchor.
    depths [R, M] int32 in 1..B.  scores [R, M] float: joint log-probability of the path.
    anchors [R] int64.  frontiers: B tensors; frontiers[d-1] [R, W] int64 holds the pool columns of
    the parents expanded at depth d, best first; frontiers[0] is the anchor, -1.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    anchors: Tensor
    frontiers: list[Tensor]

    @property
    def num_children(self) -> int:
        """Children of each expanded parent: min(branching, V)."""
        return self.tokens.shape[1] // sum(frontier.shape[1] for frontier in self.frontiers)

    def children_of(self, depth: int) -> slice:
        """Return the columns created at `depth` (1..B), k for each parent in frontiers[depth-1]."""
        widths = [frontier.shape[1] * self.num_children for frontier in self.frontiers]
        first = sum(widths[: depth - 1])
        return slice(first, first + widths[depth - 1])


def expand(node_logits: NodeLogits, anchors: Tensor, policy: TreePolicy) -> CandidatePool:
    """Propose candidates depth by depth from the logits of each parent; see `expand_children`.

    A NaN or +inf logit, or a row that is -inf throughout, gives all children of that parent the
    score -inf: they rank last, and the tree stays well formed.
    """
    return expand_children(children_of_logits(node_logits), anchors, policy)


@torch.no_grad()
def expand_children(
    node_children: NodeChildren,
    anchors: Tensor,
    policy: TreePolicy,
    packed_depths: Tensor | None = None,
    min_score: float | None = None,
) -> CandidatePool:
    """Propose candidates depth by depth: the best children of the frontier, which moves on to them.

    node_children: called once per depth, in order, with the frontier's tokens, [R, 1] and then
    [R, W].  anchors: [R] int64.  Returns k * (1 + W_2 + ... + W_B) candidates per request, where
    k = min(branching, V) and W_d = min(frontier width, candidates at depth d-1).  Scores have the
    dtype of the children's, float32 or float64.

    packed_depths: [R] int, the `max_depths` with which the pool will be packed to the policy's
    budget and to `min_score`. Parents that cannot have a child in that tree are then not asked, and
    columns or depths without any needed parent are left out: the same trees for less work. It waits
    for the device at every depth, so it is for devices where that is free.

    No gradient is recorded, the result is a discrete choice.  Nothing raises, as that would wait
    for the device.
    Source: TreeSpark A.1 (policy), eq. 5 (score).
    """
    tokens: list[Tensor] = []
    parents: list[Tensor] = []
    depths: list[Tensor] = []
    scores: list[Tensor] = []
    frontiers: list[Tensor] = []
    frontier_tokens = anchors[:, None]
    frontier_scores = torch.zeros_like(frontier_tokens, dtype=torch.float32)
    frontier = torch.full_like(frontier_tokens, NO_PARENT)
    needed: Tensor | None = None
    for depth in range(1, policy.depth + 1):
        child_tokens, log_probs, _ = node_children(depth, frontier_tokens, policy.branching, needed)
        frontiers.append(frontier)
        tokens.append(child_tokens.flatten(1))
        parents.append(frontier[..., None].expand_as(child_tokens).flatten(1))
        depths.append(torch.full_like(tokens[-1], depth, dtype=torch.int32))
        scores.append((frontier_scores[..., None] + log_probs).flatten(1))
        if depth < policy.depth:
            frontier_scores, rank = ordered_topk(scores[-1], policy.frontier_width)
            if packed_depths is not None:
                grows = packed_depths > depth
                needed = _needed(frontier_scores, scores, policy.budget, grows, min_score)
                # The best come first, so of each request the needed ones do.
                width = int(needed.any(0).sum())
                if width == 0:
                    break
                frontier_scores, rank = frontier_scores[:, :width], rank[:, :width]
                needed = needed[:, :width]
            frontier_tokens = tokens[-1].gather(1, rank)
            frontier = rank + sum(part.shape[1] for part in tokens[:-1])
    return CandidatePool(
        tokens=torch.cat(tokens, 1),
        parents=torch.cat(parents, 1),
        depths=torch.cat(depths, 1),
        scores=torch.cat(scores, 1),
        anchors=anchors,
        frontiers=frontiers,
    )


def _needed(
    frontier_scores: Tensor,
    scores: list[Tensor],
    budget: int,
    grows: Tensor,
    min_score: float | None,
) -> Tensor:
    """Which nodes may still have a child among the `budget` best of all, [R, W] bool.

    scores: of all nodes so far.  grows: [R] bool, whether a request's tree may be deeper.
    A child is worth no more than its parent, and loses ties against what was created before it:
    with `budget` nodes worth as much as the parent there is no room, nor below `min_score`.
    """
    pool = torch.cat(scores, 1)
    grown = grows[:, None].expand_as(frontier_scores)
    if min_score is not None:
        grown = grown & (frontier_scores >= min_score)
    if pool.shape[1] < budget:
        return grown
    if budget == 0:
        return torch.zeros_like(grown)
    return grown & (frontier_scores > pool.topk(budget, dim=1).values[:, -1:])


def pack(
    pool: CandidatePool,
    budget: int,
    max_depths: Tensor | None = None,
    min_score: float | None = None,
) -> PackedTree:
    """Keep the `budget` best candidates of each request, the shallower on ties.

    max_depths: [R] int, the deepest node allowed per request (0 = anchor alone), None = no limit.
    min_score: finite, the lowest score allowed, None = no limit.
    Returns budget + 1 slots per request: the anchor, the kept nodes in creation order (so parents
    come first), then padding where pool or limits leave fewer nodes.  Raises UsageError for
    a budget out of 0..MAX_BUDGET.
    Source: TreeSpark A.1 (global selection), D.4 (ties).
    """
    _require_int("budget", budget, 0, MAX_BUDGET)
    num_candidates = pool.tokens.shape[1]
    counts = _num_allowed(pool, max_depths)
    if min_score is None and within_limits(num_candidates, budget):
        bias = pool.scores.new_zeros(len(pool.frontiers) + 1)
        rows = npu_ops.pack_tree(pool.scores, pool.parents.int(), pool.depths, counts, bias, budget)
        index, parents, depths = rows.index.long(), rows.parent, rows.depth
    else:
        index, parents, depths = _packed_rows(pool, counts, budget, min_score)
    pool_index = pad(index, (1, 0), value=-1)
    no_node, source = pool_index < 0, pool_index.clamp_min(0)
    tokens = pool.tokens.gather(1, source).masked_fill_(no_node, 0)
    scores = pool.scores.gather(1, source).masked_fill_(no_node, -torch.inf)
    valid = ~no_node
    tokens[:, 0], scores[:, 0], valid[:, 0] = pool.anchors, 0.0, True
    return PackedTree(tokens, parents, depths, scores, valid, pool_index)


def _num_allowed(pool: CandidatePool, max_depths: Tensor | None) -> Tensor:
    """Return how many candidates each request may keep, [R] int32; they have the first columns."""
    if max_depths is None:
        return torch.full_like(pool.anchors, pool.depths.shape[1], dtype=torch.int32)
    return (pool.depths <= max_depths[:, None]).sum(1, dtype=torch.int32)


def _packed_rows(
    pool: CandidatePool, counts: Tensor, budget: int, min_score: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What npu_ops.pack_tree returns as index, parent and depth, where it cannot serve.

    index: int64.
    """
    num_candidates = pool.tokens.shape[1]
    # A refused node loses every tie against an allowed one: it stands behind all of them, or there
    # is a lowest score and the allowed ones have more than -inf.
    refused = torch.arange(num_candidates, device=counts.device) >= counts[:, None]
    if min_score is not None:
        refused = refused | (pool.scores < min_score)
    kept = ordered_topk(pool.scores.masked_fill(refused, -torch.inf), budget).indices
    kept = kept.masked_fill(refused.gather(1, kept), num_candidates)
    kept = pad(kept.sort(dim=1).values, (0, budget - kept.shape[1]), value=num_candidates)

    # Source of each slot in the pool with the anchor put before it (0) and a pad after it (M+1).
    source = pad(kept + 1, (1, 0))
    slots = torch.arange(budget + 1, device=source.device).expand_as(source)
    slot_of = source.new_zeros(source.shape[0], num_candidates + 2).scatter(1, source, slots)
    parents = slot_of.gather(1, pad(pool.parents + 1, (1, 1)).gather(1, source))
    no_node = (source > num_candidates) | (slots == 0)
    return (
        kept.masked_fill(kept == num_candidates, -1),
        parents.masked_fill(no_node, NO_PARENT).int(),
        pad(pool.depths, (1, 1)).gather(1, source),
    )


def children_of_logits(node_logits: NodeLogits) -> NodeChildren:
    """Return the function that picks each parent's best children from its logits."""

    def node_children(
        depth: int, parent_tokens: Tensor, branching: int, needed: Tensor | None = None
    ) -> Children:
        logits = node_logits(depth, parent_tokens)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        values, tokens = ordered_topk(logits, branching)
        log_probs = log_softmax(logits, -1).gather(-1, tokens)
        # on a CPU log_softmax and one entry of it take half the time of logsumexp
        return Children(tokens, edge_scores(log_probs), values[..., 0] - log_probs[..., 0])

    return node_children


def edge_scores(log_probs: Tensor) -> Tensor:
    """Return log-probabilities as prefix closure needs them: at most 0 on every device, no NaN."""
    return log_probs.clamp_max(0.0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def _require_int(name: str, value: object, lowest: int, highest: int) -> None:
    """Raise UsageError unless `value` is an integer in lowest..highest."""
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise UsageError(
            f"--{name} {value!r}: need an integer of at least {lowest} and at most {highest} "
            f"(recipe key policy.{name})"
        )
