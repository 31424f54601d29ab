# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy and L1 over the vocabulary, chunk by chunk, with closed-form gradients.

The plain forms are losses.cross_entropy_rows, losses.soft_cross_entropy_rows and losses.l1_rows on
[n, V] tensors; here no float32 tensor is larger than [chunk_rows, V]. Matrix products run over
blocks of rows (row_blocks.py) in the weights' dtype, everything else over chunk_rows rows, which
stay in the processor's cache. Logits of chosen tokens at tree nodes, which share the base logits of
a row, come with them: see `VocabPass`.

Shapes: n rows, m shared rows, R nodes, t tokens of a node, u unique teacher positions, H hidden
size, r Markov rank, V vocabulary.
Source: algorithms 2.2 and 7.17 (one pass for both losses); the gradients follow from softmax:
d CE / dz = q - onehot(label), or q - p for a soft one;  d L1 / dz = q * (s - sum(q * s)) with s =
sign(q - p).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treespark.errors import UsageError
from treespark.training.fused_gradients import NodeGradients, Sums, Upstream, add_gradients
from treespark.training.row_blocks import (
    BLOCK_ROWS,
    Block,
    RowPlan,
    parts_of,
    plan_nodes,
    plan_rows,
)
from treespark.training.row_logits import RowInputs, RowValues, fill_teacher


@dataclass(frozen=True)
class Nodes:
    """R tree nodes, each with the base logits of one of the n rows and a Markov latent of its own.

    rows [R] int64: which row.  latent [R, r], None without a Markov head.  tokens [R, t] int64:
    whose logits are wanted.  lse [R]: log-sum-exp of the node's logits, known from the choice of
    its children.
    """

    rows: Tensor
    latent: Tensor | None
    tokens: Tensor
    lse: Tensor


class VocabLosses(NamedTuple):
    """ce [n], l1 [n], and of nodes the logits [R, t] of their tokens and lse [R]; None without."""

    ce: Tensor
    l1: Tensor
    node_logits: Tensor | None
    node_lse: Tensor | None


@dataclass(frozen=True)
class VocabPass:
    """The losses of n rows, computed; `losses` puts them into the graph.

    base and teacher [m, V]: logits of the shared rows in the weights' dtype, constants; None where
    nothing is shared, teacher also where logits are not kept.

    Between the two steps trees are planned on them. So the nodes come in time for the backward pass
    of the rows, which has their base logits anyway and multiplies by the head once for both. In the
    forward pass of nodes nothing has the size of the vocabulary. That is why trees are chosen by
    npu_ops.markov_topk without a graph: its README compares this with the operator's own backward.
    """

    inputs: RowInputs
    values: RowValues
    chunk_rows: int
    base: Tensor | None
    teacher: Tensor | None

    def losses(self, nodes: Nodes | None = None) -> VocabLosses:
        """Return the losses and what is wanted of nodes."""
        latent = None if nodes is None else nodes.latent
        # dtypes are those of the arguments, also inside an autocast region
        with torch.autocast(self.inputs.hidden.device.type, enabled=False):
            found = _VocabLosses.apply(*self.inputs, latent, self.values, nodes, self.chunk_rows)
        return VocabLosses(*found)


def vocab_losses(
    hidden: Tensor,
    latent: Tensor | None,
    head_weight: Tensor,
    w2: Tensor | None,
    teacher_hidden: Tensor | None,
    teacher_row: Tensor | None,
    labels: Tensor | None,
    chunk_rows: int = 32,
    keep_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (ce [n], l1 [n]): -log q(label) and ||q - p||_1 with q = softmax(z), p the teacher.

    z = hidden @ head_weight.T (in the weights' dtype, then float32) + latent @ w2.T (in the dtype
    of w2, added in float32). hidden [n, H]; latent [n, r] and w2 [V, r], both None without a Markov
    head; head_weight [V, H] frozen; teacher_hidden [u, H] post-norm; teacher_row [n] int64, the
    row of teacher_hidden of each row, best all used; both None: l1 is 0. labels [n] int64, or None:
    ce is the cross-entropy with the teacher, -sum(p * log q).
    Outputs are float32 (float64 if head_weight is). Gradients reach hidden, latent and w2, never
    the head or the teacher; l1 carries the only gradient of the teacher comparison, so the overlap
    1 - l1 / 2 is to be detached (losses.overlap_rows).
    The backward pass computes the logits again; keep_logits=True stores them instead, in the
    weights' dtype ([n, V] + [u, V]), with results that differ by rounding.
    Raises UsageError on chunk_rows < 1 or on half of a pair of options.
    """
    rows = (hidden, latent, head_weight, w2, teacher_hidden, teacher_row, labels)
    found = vocab_pass(*rows, chunk_rows=chunk_rows, keep_logits=keep_logits).losses()
    return found.ce, found.l1


@torch.no_grad()
def vocab_pass(
    *rows: Tensor | None,
    chunk_rows: int = 32,
    keep_logits: bool = False,
    shared: Tensor | None = None,
) -> VocabPass:
    """Return the losses of `vocab_losses`, whose first seven arguments `rows` are, without a graph.

    shared [m] int64, each row at most once: rows whose base logits are given out, and with
    keep_logits those of their teacher. Raises what `vocab_losses` raises.
    """
    hidden, latent, head, w2, teacher_hidden, teacher_row, labels = rows
    if chunk_rows < 1:
        raise UsageError(f"chunk_rows {chunk_rows}: need at least 1 row")
    if (latent is None) != (w2 is None):
        raise UsageError("latent and w2: give both or neither (markov_rank 0)")
    if (teacher_hidden is None) != (teacher_row is None):
        raise UsageError("teacher_hidden and teacher_row: give both or neither")
    if labels is None and teacher_row is None:
        raise UsageError("labels: give them, or the teacher instead")
    assert hidden is not None
    assert head is not None
    inputs = RowInputs(hidden, latent, head, w2, teacher_hidden)
    plan = plan_rows(hidden, labels, teacher_row, shared, keep_logits)
    with torch.autocast(hidden.device.type, enabled=False):
        return _forward(inputs, plan, chunk_rows, keep_logits, shared)


def _forward(
    inputs: RowInputs, plan: RowPlan, chunk_rows: int, keep_logits: bool, shared: Tensor | None
) -> VocabPass:
    base_out, teacher_out = _shared_outputs(inputs, shared, keep_logits)
    ce = inputs.hidden.new_zeros(inputs.hidden.shape[0], dtype=inputs.dtype)
    values = RowValues(plan, ce, torch.zeros_like(ce), torch.zeros_like(ce), [], [])
    for block in plan.blocks:
        logits = inputs.block_logits(block)
        norm = None
        if logits[1] is not None:
            parts = logits[1].split(chunk_rows)
            norm = torch.cat([part.to(inputs.dtype).logsumexp(-1) for part in parts])
        _forward_block(inputs, values, block, logits, norm, chunk_rows)
        values.teacher_normalisers.append(norm)
        _share(plan, block, logits, base_out, teacher_out)
        if keep_logits:
            values.kept.append(logits)
        # else they would live on beside the next block's
        del logits
    return VocabPass(inputs, values, chunk_rows, base_out, teacher_out)


def _shared_outputs(
    inputs: RowInputs, shared: Tensor | None, with_teacher: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Room for the logits of the shared rows: the drafter's base and the teacher's."""
    if shared is None:
        return None, None
    base = inputs.head.new_empty(shared.shape[0], inputs.head.shape[0])
    has_teacher = with_teacher and inputs.teacher_hidden is not None
    return base, torch.empty_like(base) if has_teacher else None


def _share(
    plan: RowPlan,
    block: Block,
    logits: tuple[Tensor, Tensor | None],
    base_out: Tensor | None,
    teacher_out: Tensor | None,
) -> None:
    """Copy the logits of a block's shared rows to their slots."""
    base, teacher = logits
    if base_out is not None:
        base_out[block.slots] = base[block.shared]
    if teacher_out is not None and teacher is not None:
        assert plan.teacher_row is not None
        rows = plan.teacher_row[block.start + block.shared] - block.first
        teacher_out[block.slots] = teacher[rows]


def _forward_block(
    inputs: RowInputs,
    values: RowValues,
    block: Block,
    logits: tuple[Tensor, Tensor | None],
    norm: Tensor | None,
    chunk_rows: int,
) -> None:
    """Fill a block's share of ce, l1 and normalisers."""
    whole = slice(block.start, block.stop)
    ce, l1, normalisers = values.ce[whole], values.l1[whole], values.normalisers[whole]
    base, teacher = logits
    latent = inputs.block_latent(block)
    size = (min(chunk_rows, base.shape[0]), base.shape[1])
    logits_buffer = base.new_empty(size, dtype=inputs.dtype)
    teacher_buffer = torch.empty_like(logits_buffer)
    for chunk in parts_of(block, chunk_rows):
        part, width = chunk.rows, chunk.num_rows
        z, other = logits_buffer[:width], teacher_buffer[:width]
        z.copy_(base[part])
        inputs.add_bias(z, None if latent is None else latent[part])
        labels = values.plan.labels_of(block, part)
        log_q = z.log_softmax(-1)
        if labels is not None:
            picked = z.gather(-1, labels).squeeze(-1)
            ce[part] = -log_q.gather(-1, labels).squeeze(-1)
            normalisers[part] = picked + ce[part]
        if teacher is None or norm is None:
            continue
        fill_teacher(other, values.plan, block, part, teacher, norm)
        if labels is None:
            normalisers[part] = z[:, 0] - log_q[:, 0]
            # In place of the logits, which are not needed any more.
            ce[part] = -torch.mul(torch.exp(other, out=z), log_q, out=z).sum(-1)
        # sum of min(q, p) with one exponential: exp is monotone
        torch.minimum(log_q, other, out=other)
        l1[part] = (2 - 2 * other.exp_().sum(-1)).clamp(0, 2)


def _node_logits(inputs: RowInputs, nodes: Nodes, latent: Tensor | None) -> Tensor:
    """Return the logits of the nodes' tokens [R, t], from the products of these tokens alone."""
    found = []
    for part in torch.arange(len(nodes.rows), device=nodes.rows.device).split(BLOCK_ROWS):
        tokens = nodes.tokens[part]
        states = inputs.hidden[nodes.rows[part]].to(inputs.head.dtype)
        z = (inputs.head[tokens] @ states.unsqueeze(-1)).squeeze(-1).to(inputs.dtype)
        if latent is not None and inputs.w2 is not None:
            codes = latent[part].to(inputs.w2.dtype)
            z += (inputs.w2[tokens] @ codes.unsqueeze(-1)).squeeze(-1)
        found.append(z)
    return torch.cat(found)


class _VocabLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latent: Tensor | None,
        head: Tensor,
        w2: Tensor | None,
        teacher_hidden: Tensor | None,
        node_latent: Tensor | None,
        values: RowValues,
        nodes: Nodes | None,
        chunk_rows: int,
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(hidden, latent, head, w2, teacher_hidden, node_latent)
        ctx.values, ctx.nodes, ctx.chunk_rows = values, nodes, chunk_rows
        ce, l1 = values.in_order(values.ce), values.in_order(values.l1)
        if nodes is None:
            return ce, l1, None, None
        inputs = RowInputs(hidden, latent, head, w2, teacher_hidden)
        return ce, l1, _node_logits(inputs, nodes, node_latent), nodes.lse.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_ce: Tensor,
        grad_l1: Tensor,
        grad_logits: Tensor | None,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        *rows, node_latent = ctx.saved_tensors
        inputs, values, nodes = RowInputs(*rows), ctx.values, ctx.nodes
        node_gradients = None
        if nodes is not None and grad_logits is not None and grad_lse is not None:
            plan = plan_nodes(values.plan, nodes.rows)
            node_gradients = NodeGradients(
                plan,
                None if node_latent is None else node_latent[plan.order],
                nodes.tokens[plan.order],
                nodes.lse[plan.order],
                grad_logits[plan.order],
                grad_lse[plan.order],
            )
        order, needed = values.plan.order, ctx.needs_input_grad
        upstream = Upstream(grad_ce[order], grad_l1[order], node_gradients)
        asked = (needed[0], needed[1], needed[3], needed[5])
        sums = Sums.zeros_for(inputs, node_latent, asked)
        with torch.autocast(grad_ce.device.type, enabled=False):
            add_gradients(inputs, values, upstream, ctx.chunk_rows, sums)
        found = (sums.hidden, sums.latent, None, sums.w2, None, sums.node_latent)
        likes = (*rows, node_latent)
        grads = [
            None if grad is None or like is None else grad.to(like.dtype)
            for grad, like in zip(found, likes, strict=True)
        ]
        return (*grads, None, None, None)
