# SPDX-License-Identifier: Apache-2.0
"""The packed tree: the fixed-capacity arrays of one verification input.

Shapes: R requests, N budget (N+1 slots), D deepest depth asked for.

A slot is the anchor (slot 0), a node or padding; `valid` marks the first two. Padding comes last
and holds token 0, parent -1, depth 0, score -inf and pool index -1: harmless wherever a row has to
be computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_PARENT = -1
"""Parent of the anchor and of padding; in a candidate pool, of the nodes below the anchor."""


@dataclass
class PackedTree:
    """One tree per request; every parent precedes its children.

    tokens [R, N+1] int64.  parents [R, N+1] int32: slot of the parent, -1 for anchor and padding.
    depths [R, N+1] int32, anchor 0.  scores [R, N+1] float: joint log-probability, anchor 0.
    valid [R, N+1] bool.  pool_index [R, N+1] int64: column in the candidate pool, -1 = none.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    valid: Tensor
    pool_index: Tensor

    @classmethod
    def root_only(cls, anchors: Tensor) -> "PackedTree":
        """Return empty trees of one slot, for a round without drafts.  anchors: [R] int64."""
        tokens = anchors[:, None]
        return cls(
            tokens=tokens,
            parents=torch.full_like(tokens, NO_PARENT, dtype=torch.int32),
            depths=torch.zeros_like(tokens, dtype=torch.int32),
            scores=torch.zeros_like(tokens, dtype=torch.float32),
            valid=torch.ones_like(tokens, dtype=torch.bool),
            pool_index=torch.full_like(tokens, -1),
        )

    @classmethod
    def from_parents(
        cls, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> "PackedTree":
        """Return trees written as lists, padded to the longest; slot 0 is the anchor, parent -1.

        Scores are 0 and there is no pool.  Raises ValueError if a request has no anchor, its lists
        differ in length, or a parent does not come earlier.
        """
        if len(tokens) != len(parents):
            raise ValueError(f"tokens of {len(tokens)} requests, but parents of {len(parents)}")
        depths = [_depths(*row) for row in zip(tokens, parents, strict=True)]
        num_slots = torch.tensor([len(row) for row in tokens], dtype=torch.int64)
        capacity = max(map(len, tokens), default=1)
        valid = torch.arange(capacity) < num_slots[:, None]
        return cls(
            tokens=_padded(tokens, capacity, 0, torch.int64),
            parents=_padded(parents, capacity, NO_PARENT, torch.int32),
            depths=_padded(depths, capacity, 0, torch.int32),
            scores=torch.zeros(valid.shape).masked_fill(~valid, -torch.inf),
            valid=valid,
            pool_index=torch.full(valid.shape, -1),
        )

    @property
    def num_nodes(self) -> Tensor:
        """Nodes per request, without anchor and padding: [R] int64."""
        return self.valid.sum(1) - 1

    def spread(self, rows: Sequence[int], anchors: Tensor) -> "PackedTree":
        """Return one tree for each anchor [R]: tree i at rows[i], the anchor alone elsewhere.

        rows: as many distinct numbers below R as there are trees here.
        """
        num_rows, width = anchors.shape[0], self.tokens.shape[1]
        if list(rows) == list(range(num_rows)):
            return self
        index = torch.tensor(rows, device=anchors.device)

        def placed(own: Tensor, pad: float, root: float | Tensor) -> Tensor:
            whole = own.new_full((num_rows, width), pad)
            whole[:, 0] = root
            whole[index] = own
            return whole

        return PackedTree(
            tokens=placed(self.tokens, 0, anchors),
            parents=placed(self.parents, NO_PARENT, NO_PARENT),
            depths=placed(self.depths, 0, 0),
            scores=placed(self.scores, -torch.inf, 0),
            valid=placed(self.valid, False, True),
            pool_index=placed(self.pool_index, -1, -1),
        )

    def ancestor_mask(self) -> Tensor:
        """Return [R, N+1, N+1] bool: a row sees itself and its ancestors, padding sees slot 0."""
        jump = self._upward()
        slots = torch.arange(jump.shape[1], device=jump.device)
        mask = (slots == slots[:, None]).expand(jump.shape[0], -1, -1)
        # After pass i a row sees its 2^i nearest ancestors, itself included, and jumps past them.
        for _ in range((jump.shape[1] - 1).bit_length()):
            mask = mask | mask.gather(1, jump[..., None].expand_as(mask))
            jump = jump.gather(1, jump)
        return (mask & self.valid[..., None]) | (slots == 0)

    def position_ids(self, prefix_lens: Tensor) -> Tensor:
        """Return positions [R, N+1] int64: prefix_lens [R] int64, the anchor's, plus the depth."""
        return prefix_lens[:, None] + self.depths

    def retrieve_table(self, depth: int) -> Tensor:
        """Return [R, N+1, D+1] int64: row v lists the slots from the anchor to v, padded with -1.

        depth: D, at least that of the deepest node.  Rows of padding are -1 throughout.
        """
        up = self._upward()
        ancestors = [torch.arange(up.shape[1], device=up.device).expand_as(up)]
        for _ in range(depth):
            ancestors.append(up.gather(1, ancestors[-1]))
        # Column c of row v is the ancestor depth(v) - c edges above v.
        edges_up = self.depths[..., None] - torch.arange(depth + 1, device=up.device)
        table = torch.stack(ancestors, -1).gather(-1, edges_up.clamp_min(0))
        return table.masked_fill((edges_up < 0) | ~self.valid[..., None], -1)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken.  Waits for the device: for tests only."""
        up, pads = self._upward(), ~self.valid
        slots = torch.arange(up.shape[1], device=up.device)
        nodes = self.valid & (slots > 0)
        assert self.valid[:, 0].all(), "the anchor is valid"
        assert (self.valid[:, 1:] <= self.valid[:, :-1]).all(), "padding comes last"
        assert (self.parents[~nodes] == NO_PARENT).all(), "anchor and padding have no parent"
        assert (self.depths[~nodes] == 0).all(), "anchor and padding have depth 0"
        assert (self.pool_index[~nodes] == -1).all(), "anchor and padding are no candidates"
        assert ((self.parents >= 0) & (self.parents < slots))[nodes].all(), "parents come first"
        assert (self.depths == self.depths.gather(1, up) + 1)[nodes].all(), "one edge, one depth"
        assert (self.scores <= self.scores.gather(1, up))[nodes].all(), "scores fall along paths"
        assert (self.tokens[pads] == 0).all(), "padding has token 0"
        assert self.scores[pads].isneginf().all(), "padding scores -inf"
        same_parent = self.parents[..., None] == self.parents[:, None]
        same_token = self.tokens[..., None] == self.tokens[:, None]
        pairs = nodes[..., None] & nodes[:, None] & (slots[:, None] < slots)
        assert not (same_parent & same_token & pairs).any(), "siblings have distinct tokens"

    def _upward(self) -> Tensor:
        """Return the parents [R, N+1] int64 as indices: anchor and padding point to the anchor."""
        return self.parents.clamp_min(0).long()


def _depths(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the depth of each slot of one tree written as lists, or raise ValueError."""
    if not tokens or len(tokens) != len(parents) or parents[0] != NO_PARENT:
        raise ValueError(
            f"tokens {list(tokens)}, parents {list(parents)}: need equally many, parents[0] = -1"
        )
    depths = [0]
    for slot, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < slot:
            raise ValueError(f"parent {parent} of slot {slot}: need an earlier slot")
        depths.append(depths[parent] + 1)
    return depths


def _padded(rows: Sequence[Sequence[int]], width: int, pad: int, dtype: torch.dtype) -> Tensor:
    """Return the rows as one [R, width] tensor, filled up with `pad`."""
    filled = [[*row, *[pad] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=dtype).reshape(len(rows), width)
