# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy and L1 over the vocabulary, chunk by chunk, with closed-form gradients.

The plain forms are losses.cross_entropy_rows, losses.soft_cross_entropy_rows and losses.l1_rows on
[n, V] tensors; here no float32 tensor is larger than [chunk_rows, V]. Matrix products run over
blocks of rows (row_blocks.py) in the weights' dtype, everything else over chunk_rows rows, which
stay in the processor's cache.

Shapes: n rows, m shared rows, u unique teacher positions, H hidden size, r Markov rank, V
vocabulary.
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
from treespark.training.row_blocks import Block, RowPlan, plan_rows


class VocabLosses(NamedTuple):
    """ce [n], l1 [n]; of shared rows, if any, the base logits [m, V] and, where there is a teacher,
    its logits [m, V], both in the weights' dtype.  The teacher's have no gradient.
    """

    ce: Tensor
    l1: Tensor
    base: Tensor | None
    teacher: Tensor | None


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
    ce, l1, *_ = _apply(rows, chunk_rows, keep_logits, None)
    return ce, l1


def vocab_losses_sharing(*rows: Tensor | None, shared: Tensor, chunk_rows: int = 32) -> VocabLosses:
    """Return the losses of `vocab_losses` with keep_logits=True, and logits of the rows `shared`.

    rows: its first seven arguments.  shared [m] int64, each row at most once. Who computes more
    from their base logits saves two products with the head: a gradient that comes back joins the
    row's own.
    """
    return VocabLosses(*_apply(rows, chunk_rows, True, shared))


def _apply(
    rows: tuple[Tensor | None, ...], chunk_rows: int, keep_logits: bool, shared: Tensor | None
) -> Any:
    hidden, latent, _, w2, teacher_hidden, teacher_row, labels = rows
    if chunk_rows < 1:
        raise UsageError(f"chunk_rows {chunk_rows}: need at least 1 row")
    if (latent is None) != (w2 is None):
        raise UsageError("latent and w2: give both or neither (markov_rank 0)")
    if (teacher_hidden is None) != (teacher_row is None):
        raise UsageError("teacher_hidden and teacher_row: give both or neither")
    if labels is None and teacher_row is None:
        raise UsageError("labels: give them, or the teacher instead")
    assert hidden is not None
    # dtypes are those of the arguments, also inside an autocast region
    with torch.autocast(hidden.device.type, enabled=False):
        return _VocabLosses.apply(*rows, chunk_rows, keep_logits, shared)


@dataclass
class _Inputs:
    hidden: Tensor
    latent: Tensor | None
    head: Tensor
    w2: Tensor | None
    teacher_hidden: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.head.dtype == torch.float64 else torch.float32

    def block_logits(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """Base logits [rows, V] and teacher logits [last - first + 1, V], weights' dtype."""
        base = self.hidden[block.rows].to(self.head.dtype) @ self.head.T
        if self.teacher_hidden is None:
            return base, None
        states = self.teacher_hidden[block.first : block.last + 1]
        return base, states.to(self.head.dtype) @ self.head.T

    def block_latent(self, block: Block) -> Tensor | None:
        if self.latent is None or self.w2 is None:
            return None
        return self.latent[block.rows].to(self.w2.dtype)

    def fill_logits(self, out: Tensor, base: Tensor, latent: Tensor | None) -> None:
        """out [c, V] <- base [c, V] + latent [c, r] @ w2.T, added in out's dtype."""
        out.copy_(base)
        if latent is None or self.w2 is None:
            return
        if self.w2.dtype == out.dtype:
            out.addmm_(latent, self.w2.T)
        else:
            out.add_(latent @ self.w2.T)


def _teacher_normalisers(logits: Tensor, dtype: torch.dtype, chunk_rows: int) -> Tensor:
    return torch.cat([c.to(dtype).logsumexp(-1) for c in logits.split(chunk_rows)])


class _VocabLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latent: Tensor | None,
        head_weight: Tensor,
        w2: Tensor | None,
        teacher_hidden: Tensor | None,
        teacher_row: Tensor | None,
        labels: Tensor | None,
        chunk_rows: int,
        keep_logits: bool,
        shared: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        inputs = _Inputs(hidden, latent, head_weight, w2, teacher_hidden)
        plan = plan_rows(hidden, labels, teacher_row, shared, keep_logits)
        base_out, teacher_out = _shared_outputs(inputs, shared)
        num_rows = hidden.shape[0]
        # in teacher order until the end
        ce = hidden.new_zeros(num_rows, dtype=inputs.dtype)
        l1, normalisers = torch.zeros_like(ce), torch.zeros_like(ce)
        teacher_normalisers: list[Tensor | None] = []
        kept: list[tuple[Tensor, Tensor | None]] = []
        for block in plan.blocks:
            logits = inputs.block_logits(block)
            teacher = logits[1]
            norm = None
            if teacher is not None:
                norm = _teacher_normalisers(teacher, inputs.dtype, chunk_rows)
            part = slice(block.start, block.stop)
            outputs = (ce[part], l1[part], normalisers[part])
            _forward_block(inputs, plan, block, logits, norm, chunk_rows, outputs)
            teacher_normalisers.append(norm)
            _share(plan, block, logits, base_out, teacher_out)
            if keep_logits:
                kept.append(logits)
            # else they would live on beside the next block's
            del logits, teacher
        ctx.save_for_backward(hidden, latent, head_weight, w2, teacher_hidden)
        ctx.plan, ctx.chunk_rows, ctx.kept = plan, chunk_rows, kept
        ctx.normalisers, ctx.teacher_normalisers = normalisers, teacher_normalisers
        unsorted = (torch.empty_like(ce), torch.empty_like(ce))
        unsorted[0][plan.order], unsorted[1][plan.order] = ce, l1
        if teacher_out is not None:
            ctx.mark_non_differentiable(teacher_out)
        return (*unsorted, base_out, teacher_out)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_ce: Tensor, grad_l1: Tensor, grad_base: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        inputs = _Inputs(*ctx.saved_tensors)
        plan: RowPlan = ctx.plan
        sums = _GradientSums.zeros_for(inputs, ctx.needs_input_grad)
        upstream = (grad_ce[plan.order], grad_l1[plan.order])
        with torch.autocast(grad_ce.device.type, enabled=False):
            for i, block in enumerate(plan.blocks):
                logits = ctx.kept[i] if ctx.kept else inputs.block_logits(block)
                part = slice(block.start, block.stop)
                scalars = (upstream[0][part], upstream[1][part], ctx.normalisers[part])
                norm = ctx.teacher_normalisers[i]
                # logits that are computed anew for this pass make room for their gradients
                grads = torch.empty_like(logits[0]) if ctx.kept else logits[0]
                _backward_block(
                    inputs, plan, block, logits, norm, ctx.chunk_rows, scalars, sums, grads
                )
                if sums.hidden is not None:
                    if grad_base is not None:
                        grads.index_add_(0, block.shared, grad_base[block.slots])
                    sums.hidden[block.rows] = (grads @ inputs.head).to(sums.hidden.dtype)
                # else they would live on beside the next block's
                del logits, grads
        return (*sums.as_inputs(inputs), None, None, None, None, None, None)


def _shared_outputs(inputs: _Inputs, shared: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Room for the logits of the shared rows: the drafter's base and, if there is one, the
    teacher's.
    """
    if shared is None:
        return None, None
    base = inputs.head.new_empty(shared.shape[0], inputs.head.shape[0])
    return base, None if inputs.teacher_hidden is None else torch.empty_like(base)


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


def _chunks(block: Block, chunk_rows: int) -> list[slice]:
    """Slices relative to the block."""
    size = block.stop - block.start
    return [slice(i, min(i + chunk_rows, size)) for i in range(0, size, chunk_rows)]


def _fill_teacher(
    out: Tensor, plan: RowPlan, block: Block, part: slice, teacher: Tensor, norm: Tensor
) -> None:
    """out [c, V] <- log p of the chunk's rows."""
    assert plan.teacher_row is not None
    rows = plan.teacher_row[block.start + part.start : block.start + part.stop] - block.first
    if teacher.dtype == out.dtype:
        torch.index_select(teacher, 0, rows, out=out)
    else:
        out.copy_(teacher[rows])
    out.sub_(norm[rows].unsqueeze(-1))


def _forward_block(
    inputs: _Inputs,
    plan: RowPlan,
    block: Block,
    logits: tuple[Tensor, Tensor | None],
    norm: Tensor | None,
    chunk_rows: int,
    outputs: tuple[Tensor, Tensor, Tensor],
) -> None:
    ce, l1, normalisers = outputs
    base, teacher = logits
    latent = inputs.block_latent(block)
    size = (min(chunk_rows, base.shape[0]), base.shape[1])
    logits_buffer = base.new_empty(size, dtype=inputs.dtype)
    teacher_buffer = torch.empty_like(logits_buffer)
    for part in _chunks(block, chunk_rows):
        width = part.stop - part.start
        z, other = logits_buffer[:width], teacher_buffer[:width]
        inputs.fill_logits(z, base[part], None if latent is None else latent[part])
        labels = plan.labels_of(block, part)
        log_q = z.log_softmax(-1)
        if labels is not None:
            picked = z.gather(-1, labels).squeeze(-1)
            ce[part] = -log_q.gather(-1, labels).squeeze(-1)
            normalisers[part] = picked + ce[part]
        if teacher is None or norm is None:
            continue
        _fill_teacher(other, plan, block, part, teacher, norm)
        if labels is None:
            normalisers[part] = z[:, 0] - log_q[:, 0]
            # In place of the logits, which are not needed any more.
            ce[part] = -torch.mul(torch.exp(other, out=z), log_q, out=z).sum(-1)
        # sum of min(q, p) with one exponential: exp is monotone
        torch.minimum(log_q, other, out=other)
        l1[part] = (2 - 2 * other.exp_().sum(-1)).clamp(0, 2)


@dataclass
class _GradientSums:
    hidden: Tensor | None
    latent: Tensor | None
    w2: Tensor | None

    @classmethod
    def zeros_for(cls, inputs: _Inputs, needed: tuple[bool, ...]) -> _GradientSums:
        """Full-precision accumulators for the gradients that are asked for."""

        def zeros(tensor: Tensor | None, wanted: bool) -> Tensor | None:
            if tensor is None or not wanted:
                return None
            return torch.zeros_like(tensor, dtype=inputs.dtype)

        return cls(
            zeros(inputs.hidden, needed[0]),
            zeros(inputs.latent, needed[1]),
            zeros(inputs.w2, needed[3]),
        )

    def as_inputs(self, inputs: _Inputs) -> tuple[Tensor | None, ...]:
        """Gradients of (hidden, latent, head, w2) in the dtypes of the inputs."""

        def cast(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
            return None if grad is None or like is None else grad.to(like.dtype)

        return (
            cast(self.hidden, inputs.hidden),
            cast(self.latent, inputs.latent),
            None,
            cast(self.w2, inputs.w2),
        )


def _backward_block(
    inputs: _Inputs,
    plan: RowPlan,
    block: Block,
    logits: tuple[Tensor, Tensor | None],
    norm: Tensor | None,
    chunk_rows: int,
    scalars: tuple[Tensor, Tensor, Tensor],
    sums: _GradientSums,
    grads: Tensor,
) -> None:
    """Fill grads [rows, V], which may be the base logits themselves; add to the Markov sums."""
    grad_ce, grad_l1, normalisers = (s.unsqueeze(-1) for s in scalars)
    base, teacher = logits
    latent = inputs.block_latent(block)
    size = (min(chunk_rows, base.shape[0]), base.shape[1])
    logits_buffer = base.new_empty(size, dtype=inputs.dtype)
    sign_buffer = torch.empty_like(logits_buffer)
    for part in _chunks(block, chunk_rows):
        width = part.stop - part.start
        q, sign = logits_buffer[:width], sign_buffer[:width]
        inputs.fill_logits(q, base[part], None if latent is None else latent[part])
        q.sub_(normalisers[part])
        if teacher is None or norm is None:
            q.exp_().mul_(grad_ce[part])
        else:
            _fill_teacher(sign, plan, block, part, teacher, norm)
            torch.sub(q, sign, out=sign).sign_()
            q.exp_()
            mean_sign = torch.bmm(q.unsqueeze(1), sign.unsqueeze(2)).squeeze(-1)
            offset = grad_ce[part] - grad_l1[part] * mean_sign
            q.mul_(sign.mul_(grad_l1[part]).add_(offset))
        labels = plan.labels_of(block, part)
        if labels is not None:
            q.scatter_add_(-1, labels, -grad_ce[part])
        elif teacher is not None and norm is not None:
            _fill_teacher(sign, plan, block, part, teacher, norm)
            q.addcmul_(sign.exp_(), grad_ce[part], value=-1)
        grads[part] = q
        _add_markov_gradients(inputs, block, part, q, latent, sums)


def _add_markov_gradients(
    inputs: _Inputs,
    block: Block,
    part: slice,
    grad: Tensor,
    latent: Tensor | None,
    sums: _GradientSums,
) -> None:
    if latent is None or inputs.w2 is None:
        return
    grad = grad.to(inputs.w2.dtype)
    if sums.latent is not None:
        sums.latent[block.rows[part]] = (grad @ inputs.w2).to(sums.latent.dtype)
    if sums.w2 is not None:
        if sums.w2.dtype == grad.dtype:
            sums.w2.addmm_(grad.T, latent[part])
        else:
            sums.w2.add_(grad.T @ latent[part])
