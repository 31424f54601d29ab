# SPDX-License-Identifier: Apache-2.0
"""The tree rules once more, slowly: one request, plain Python lists, the written total order."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from treespark.tree import CandidatePool, NodeLogits, PackedTree, TreePolicy

ALL = slice(None)


@dataclass
class Node:
    """One candidate; its index in the list is its creation index."""

    parent: int
    token: int
    depth: int
    score: float


def first_entries(values: list[float], k: int) -> list[int]:
    """Return the first k indices by (-value, index)."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def table_logits(base: Tensor, bias: Tensor) -> NodeLogits:
    """Return logits base[r, d-1] + bias[parent token].  base [R, B, V], bias [V, V]."""
    return lambda depth, tokens: base[:, depth - 1, None] + bias[tokens]


def expand_slowly(
    base: Tensor, bias: Tensor, anchor: int, policy: TreePolicy
) -> tuple[list[Node], list[list[int]]]:
    """Return the pool and the frontiers of one request.  base [B, V], bias [V, V]."""
    pool: list[Node] = []
    frontiers = [[-1]]
    for depth in range(1, policy.depth + 1):
        created = []
        for parent in frontiers[-1]:
            logits = base[depth - 1] + bias[anchor if parent < 0 else pool[parent].token]
            log_probs = logits.log_softmax(0)
            above = torch.zeros((), dtype=logits.dtype)
            if parent >= 0:
                above = torch.tensor(pool[parent].score, dtype=logits.dtype)
            for token in first_entries(logits.tolist(), policy.branching):
                created.append(len(pool))
                score = (above + log_probs[token]).item()
                pool.append(Node(parent, token, depth, score))
        best = sorted(created, key=lambda i: (-pool[i].score, i))
        frontiers.append(best[: policy.frontier_width])
    return pool, frontiers[:-1]


def pack_slowly(pool: list[Node], budget: int, max_depth: int | None = None) -> list[int]:
    """Return the kept creation indices in physical order."""
    allowed = [i for i, node in enumerate(pool) if max_depth is None or node.depth <= max_depth]
    kept = sorted(allowed, key=lambda i: (-pool[i].score, pool[i].depth, i))[:budget]
    return sorted(kept, key=lambda i: (pool[i].depth, i))


def pool_rows(pool: CandidatePool) -> list[list[Node]]:
    """Return a tensor pool as lists of nodes, one per request."""
    columns = (pool.parents, pool.tokens, pool.depths, pool.scores)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [[Node(*fields) for fields in zip(*row, strict=True)] for row in rows]


def path_to(parents: list[int], slot: int) -> list[int]:
    """Return the slots from the anchor to `slot`."""
    path = []
    while slot >= 0:
        path.append(slot)
        slot = parents[slot]
    return path[::-1]


def walk_slowly(
    tokens: list[int], parents: list[int], target_tokens: list[int]
) -> tuple[list[int], list[int]]:
    """Return the accepted slots from the anchor on, and the tokens to commit, bonus last."""
    path, current = [0], 0
    while True:
        children = [s for s in range(1, len(tokens)) if parents[s] == current]
        match = [s for s in children if tokens[s] == target_tokens[current]]
        if not match:
            return path, [tokens[s] for s in path[1:]] + [target_tokens[current]]
        current = match[0]
        path.append(current)


def random_tree(
    generator: torch.Generator, num_nodes: int, max_depth: int, num_tokens: int
) -> tuple[list[int], list[int]]:
    """Return tokens and parents of a random tree in which siblings have distinct tokens."""
    tokens, parents, depths = [0], [-1], [0]
    used: set[tuple[int, int]] = set()
    for _ in range(20 * num_nodes):
        if len(tokens) > num_nodes:
            break
        parent = int(torch.randint(len(tokens), (), generator=generator))
        token = int(torch.randint(num_tokens, (), generator=generator))
        if depths[parent] < max_depth and (parent, token) not in used:
            used.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return tokens, parents


def random_tables(
    seed: int,
    num_requests: int,
    depth: int,
    vocab: int,
    *,
    num_values: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return base [R, B, V], bias [V, V] and anchors [R]; num_values > 0 gives few, tied values."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if num_values:
            return torch.randint(num_values, shape, generator=generator).to(dtype)
        return torch.randn(*shape, generator=generator, dtype=dtype)

    anchors = torch.randint(vocab, (num_requests,), generator=generator)
    return draw(num_requests, depth, vocab), draw(vocab, vocab), anchors


def assert_same_tree(left: PackedTree, right: PackedTree, rows: slice | Tensor = ALL) -> None:
    """Compare the given rows of `left` with all of `right`, bit for bit."""
    for field in dataclasses.fields(left):
        whole, part = getattr(left, field.name)[rows], getattr(right, field.name)
        assert torch.equal(whole, part), field.name


def assert_closed(tree: PackedTree, pool: CandidatePool) -> None:
    """Check the tree's invariants, and that the parent of each packed candidate is packed."""
    tree.check()
    for kept, parents in zip(tree.pool_index.tolist(), pool.parents.tolist(), strict=True):
        nodes = {index for index in kept if index >= 0}
        assert {parents[index] for index in nodes} <= nodes | {-1}
