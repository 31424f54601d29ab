# SPDX-License-Identifier: Apache-2.0
"""The backward pass of the vocabulary losses: closed forms, a block of rows after the other.

Nodes stand beside the row whose base logits they have: their gradients join the row's before the
product with the head, and their Markov products are part of the row's chunk.
Shapes: as in fused.py; c rows of a chunk and their nodes.  Source: the formulas of fused.py, and
d lse / dz = q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treespark.training.row_blocks import Block, NodePlan, Part, RowPlan, parts_of
from treespark.training.row_logits import RowInputs, RowValues, copy_rows, fill_teacher


@dataclass(frozen=True)
class NodeGradients:
    """Nodes in the order of `plan`: latent [R, r], tokens [R, t], lse [R].

    of_logits [R, t] and of_lse [R]: gradients of the tokens' logits and of lse.
    """

    plan: NodePlan
    latent: Tensor | None
    tokens: Tensor
    lse: Tensor
    of_logits: Tensor
    of_lse: Tensor


@dataclass(frozen=True)
class Upstream:
    """Gradients of ce and l1 [n], in teacher order, and those of nodes."""

    ce: Tensor
    l1: Tensor
    nodes: NodeGradients | None


@dataclass
class Sums:
    """Gradients of hidden [n, H], latent [n, r], w2 [V, r] and the nodes' latents [R, r].

    Full precision; None for those that nobody asks for.
    """

    hidden: Tensor | None
    latent: Tensor | None
    w2: Tensor | None
    node_latent: Tensor | None

    @classmethod
    def zeros_for(
        cls, inputs: RowInputs, node_latent: Tensor | None, needed: tuple[bool, bool, bool, bool]
    ) -> Sums:
        """Zeros for what is needed of (hidden, latent, w2, node_latent)."""
        of = (inputs.hidden, inputs.latent, inputs.w2, node_latent)
        zeros = (
            torch.zeros_like(tensor, dtype=inputs.dtype) if tensor is not None and wanted else None
            for tensor, wanted in zip(of, needed, strict=True)
        )
        return cls(*zeros)


def add_gradients(
    inputs: RowInputs, values: RowValues, upstream: Upstream, chunk_rows: int, sums: Sums
) -> None:
    """Add the gradients of all rows and nodes to `sums`."""
    for i, block in enumerate(values.plan.blocks):
        logits = values.kept[i] if values.kept else inputs.block_logits(block)
        # logits that are computed anew for this pass make room for their gradients
        grads = torch.empty_like(logits[0]) if values.kept else logits[0]
        norm = values.teacher_normalisers[i]
        _Block(inputs, values, block, logits, norm, upstream, chunk_rows, sums).fill(grads)
        if sums.hidden is not None:
            sums.hidden[block.rows] = (grads @ inputs.head).to(sums.hidden.dtype)
        # else they would live on beside the next block's
        del logits, grads


@dataclass
class _Block:
    """One block's share of `add_gradients`."""

    inputs: RowInputs
    values: RowValues
    block: Block
    logits: tuple[Tensor, Tensor | None]
    norm: Tensor | None
    upstream: Upstream
    chunk_rows: int
    sums: Sums

    @property
    def plan(self) -> RowPlan:
        return self.values.plan

    def fill(self, grads: Tensor) -> None:
        """Fill grads [rows, V], which may be the base logits; add to the Markov sums."""
        base, nodes = self.logits[0], self.upstream.nodes
        parts = parts_of(self.block, self.chunk_rows, None if nodes is None else nodes.plan)
        sizes = [part.num_rows for part in parts]
        most = max(size + part.num_nodes for size, part in zip(sizes, parts, strict=True))
        buffer = base.new_empty((most, base.shape[1]), dtype=self.inputs.dtype)
        sign_buffer = buffer.new_empty((max(sizes), base.shape[1]))
        latent = self.inputs.block_latent(self.block)
        for part in parts:
            z = buffer[: part.num_rows + part.num_nodes]
            latents = self._fill_logits(z, part, latent)
            rows, others = z[: part.num_rows], z[part.num_rows :]
            self._row_gradients(rows, sign_buffer[: part.num_rows], part.rows)
            if nodes is not None:
                _node_gradients(others, nodes, part.nodes)
            self._add_markov_gradients(z, part, latents)
            if nodes is not None:
                rows.index_add_(0, self._rows_of_nodes(part) - part.rows.start, others)
            grads[part.rows] = rows

    def _rows_of_nodes(self, part: Part) -> Tensor:
        """Places in the block of the rows of a part's nodes."""
        assert self.upstream.nodes is not None
        return self.upstream.nodes.plan.place[part.nodes] - self.block.start

    def _fill_logits(self, z: Tensor, part: Part, latent: Tensor | None) -> Tensor | None:
        """z <- logits of the part's rows and then of its nodes; return their latents."""
        base, nodes = self.logits[0], self.upstream.nodes
        z[: part.num_rows] = base[part.rows]
        latents = None if latent is None else latent[part.rows]
        if nodes is not None:
            copy_rows(z[part.num_rows :], base, self._rows_of_nodes(part))
            if latents is not None and nodes.latent is not None:
                latents = torch.cat([latents, nodes.latent[part.nodes].to(latents.dtype)])
        self.inputs.add_bias(z, latents)
        return latents

    def _row_gradients(self, q: Tensor, sign: Tensor, part: slice) -> None:
        """q [c, V]: logits of rows on entry, gradients of their losses on return."""
        whole = slice(self.block.start + part.start, self.block.start + part.stop)
        sources = (self.upstream.ce, self.upstream.l1, self.values.normalisers)
        grad_ce, grad_l1, normalisers = (source[whole].unsqueeze(-1) for source in sources)
        teacher, norm, plan = self.logits[1], self.norm, self.plan
        q.sub_(normalisers)
        if teacher is None or norm is None:
            q.exp_().mul_(grad_ce)
        else:
            fill_teacher(sign, plan, self.block, part, teacher, norm)
            torch.sub(q, sign, out=sign).sign_()
            q.exp_()
            mean_sign = torch.bmm(q.unsqueeze(1), sign.unsqueeze(2)).squeeze(-1)
            offset = grad_ce - grad_l1 * mean_sign
            q.mul_(sign.mul_(grad_l1).add_(offset))
        labels = plan.labels_of(self.block, part)
        if labels is not None:
            q.scatter_add_(-1, labels, -grad_ce)
        elif teacher is not None and norm is not None:
            fill_teacher(sign, plan, self.block, part, teacher, norm)
            q.addcmul_(sign.exp_(), grad_ce, value=-1)

    def _add_markov_gradients(self, grad: Tensor, part: Part, latents: Tensor | None) -> None:
        w2, sums = self.inputs.w2, self.sums
        if latents is None or w2 is None:
            return
        grad = grad.to(w2.dtype)
        if sums.latent is not None or sums.node_latent is not None:
            product = grad @ w2
            if sums.latent is not None:
                own = product[: part.num_rows].to(sums.latent.dtype)
                sums.latent[self.block.rows[part.rows]] = own
            if sums.node_latent is not None and self.upstream.nodes is not None:
                which = self.upstream.nodes.plan.order[part.nodes]
                sums.node_latent[which] = product[part.num_rows :].to(sums.node_latent.dtype)
        if sums.w2 is not None:
            if sums.w2.dtype == grad.dtype:
                sums.w2.addmm_(grad.T, latents)
            else:
                sums.w2.add_(grad.T @ latents)


def _node_gradients(z: Tensor, nodes: NodeGradients, part: slice) -> None:
    """z [c, V]: logits of nodes on entry, gradients of what is known of them on return."""
    z.sub_(nodes.lse[part].unsqueeze(-1)).exp_().mul_(nodes.of_lse[part].unsqueeze(-1))
    z.scatter_add_(-1, nodes.tokens[part], nodes.of_logits[part])
