# SPDX-License-Identifier: Apache-2.0
"""The chunked vocabulary losses against the plain ones under ordinary autograd.

Tolerances: float64 1e-10 (other summation order); float32 1e-4 (L1 as 2 minus a sum near 2);
bfloat16 weights 2e-2 on gradients of order 1 (the gradient of the logits is rounded to bfloat16
before the product with the head), outputs 1e-4 because the reference rounds its logits alike.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from treespark.errors import UsageError
from treespark.training import row_blocks
from treespark.training.fused import vocab_losses
from treespark.training.losses import cross_entropy_rows, l1_rows, soft_cross_entropy_rows

H, R, V = 8, 3, 29


class Inputs:
    """Random inputs; rows use the teacher positions out of order and repeatedly."""

    def __init__(self, num_rows=23, num_positions=9, dtype=torch.float64, w2_dtype=None):
        torch.manual_seed(5)
        w2_dtype = w2_dtype or dtype
        self.hidden = torch.randn(num_rows, H, dtype=dtype, requires_grad=True)
        self.latent = torch.randn(num_rows, R, dtype=w2_dtype, requires_grad=True)
        self.head = torch.randn(V, H, dtype=dtype)
        self.w2 = torch.randn(V, R, dtype=w2_dtype, requires_grad=True)
        self.teacher = torch.randn(num_positions, H, dtype=dtype)
        self.row = torch.randint(0, num_positions, (num_rows,))
        self.labels = torch.randint(0, V, (num_rows,))
        out = torch.float64 if dtype == torch.float64 else torch.float32
        self.upstream = torch.rand(2, num_rows, dtype=out)
        self.leaves = (self.hidden, self.latent, self.w2)

    def fused(self, **options):
        return vocab_losses(
            self.hidden, self.latent, self.head, self.w2, self.teacher, self.row, self.labels,
            **options,
        )  # fmt: skip

    def plain(self):
        out = self.upstream.dtype
        z = (self.hidden @ self.head.T).to(out) + (self.latent @ self.w2.T).to(out)
        probs = (self.teacher @ self.head.T).to(out).softmax(-1)[self.row]
        return cross_entropy_rows(z, self.labels), l1_rows(z, probs)

    def gradients(self, outputs):
        total = sum((u * o).sum() for u, o in zip(self.upstream, outputs, strict=True))
        return torch.autograd.grad(total, self.leaves)


def assert_same(inputs, atol, grad_atol, **options):
    outputs, wanted = inputs.fused(**options), inputs.plain()
    for actual, expected in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    grads = zip(inputs.gradients(outputs), inputs.gradients(wanted), strict=True)
    for actual, expected in grads:
        torch.testing.assert_close(actual, expected, rtol=0, atol=grad_atol)


@pytest.mark.parametrize("chunk_rows", [1, 5, 23, 64])
@pytest.mark.parametrize("keep_logits", [False, True])
def test_values_and_gradients_equal_plain_autograd_in_float64(chunk_rows, keep_logits):
    assert_same(Inputs(), 1e-10, 1e-10, chunk_rows=chunk_rows, keep_logits=keep_logits)


def test_values_and_gradients_equal_plain_autograd_in_float32():
    assert_same(Inputs(dtype=torch.float32), 1e-4, 1e-4)


@pytest.mark.parametrize("w2_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_weights_are_summed_in_float32(w2_dtype):
    inputs = Inputs(dtype=torch.bfloat16, w2_dtype=w2_dtype)
    assert_same(inputs, 1e-4, 2e-1 if w2_dtype == torch.bfloat16 else 1e-1)
    outputs, wanted = inputs.gradients(inputs.fused()), inputs.gradients(inputs.plain())
    for actual, expected in zip(outputs, wanted, strict=True):
        assert actual.dtype == expected.dtype
        scale = expected.float().norm()
        assert ((actual - expected).float().norm() / scale).item() < 2e-2


@pytest.mark.parametrize("block_rows", [1, 7, 23])
def test_blocks_of_rows_do_not_change_the_result(monkeypatch, block_rows):
    monkeypatch.setattr(row_blocks, "BLOCK_ROWS", block_rows)
    assert_same(Inputs(), 1e-10, 1e-10, chunk_rows=4)
    assert_same(Inputs(), 1e-10, 1e-10, chunk_rows=4, keep_logits=True)


def test_gradcheck():
    inputs = Inputs(num_rows=4, num_positions=3)

    def losses(hidden, latent, w2):
        return vocab_losses(
            hidden, latent, inputs.head, w2, inputs.teacher, inputs.row, inputs.labels, 3
        )

    assert torch.autograd.gradcheck(losses, inputs.leaves)


@pytest.mark.parametrize(
    ("keep_logits", "dtype", "atol"),
    [(False, torch.float64, 1e-10), (True, torch.float64, 1e-10), (False, torch.float32, 1e-4)],
)
def test_without_labels_it_is_the_cross_entropy_with_the_teacher(keep_logits, dtype, atol):
    inputs = Inputs(dtype=dtype)
    inputs.labels = None
    z = inputs.hidden @ inputs.head.T + inputs.latent @ inputs.w2.T
    probs = (inputs.teacher @ inputs.head.T).softmax(-1)[inputs.row]
    wanted = soft_cross_entropy_rows(z, probs), l1_rows(z, probs)
    # Written out: the mean of the label losses over the teacher.
    labels = [cross_entropy_rows(z, torch.full_like(inputs.row, v)) for v in range(V)]
    by_label = (torch.stack(labels, 1) * probs).sum(1)
    torch.testing.assert_close(wanted[0], by_label, rtol=0, atol=atol)
    outputs = inputs.fused(chunk_rows=5, keep_logits=keep_logits)
    for actual, expected in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    grads = zip(inputs.gradients(outputs), inputs.gradients(wanted), strict=True)
    for actual, expected in grads:
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def test_neither_labels_nor_a_teacher_is_refused():
    inputs = Inputs()
    args = (inputs.hidden, inputs.latent, inputs.head, inputs.w2, None, None, None)
    with pytest.raises(UsageError, match="labels: give them, or the teacher"):
        vocab_losses(*args)


def test_kept_logits_give_identical_bits():
    inputs = Inputs(dtype=torch.bfloat16)
    results = [inputs.fused(keep_logits=keep) for keep in (False, True)]
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
    for actual, expected in zip(*map(inputs.gradients, results), strict=True):
        assert torch.equal(actual, expected)


def test_backward_can_run_twice_with_kept_logits():
    inputs = Inputs()
    outputs = inputs.fused(keep_logits=True)
    total = outputs[0].sum()
    first = torch.autograd.grad(total, inputs.hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(total, inputs.hidden)[0])


def test_without_a_markov_head_only_the_hidden_states_matter():
    inputs = Inputs()
    outputs = vocab_losses(
        inputs.hidden, None, inputs.head, None, inputs.teacher, inputs.row, inputs.labels
    )
    z = inputs.hidden @ inputs.head.T
    probs = (inputs.teacher @ inputs.head.T).softmax(-1)[inputs.row]
    wanted = cross_entropy_rows(z, inputs.labels), l1_rows(z, probs)
    for actual, expected in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    grads = [
        torch.autograd.grad(sum(o.sum() for o in t), inputs.hidden)[0] for t in (outputs, wanted)
    ]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


def test_without_a_teacher_l1_is_zero_and_cross_entropy_is_kept():
    inputs = Inputs()
    args = (inputs.hidden, inputs.latent, inputs.head, inputs.w2, None, None, inputs.labels)
    ce, l1 = vocab_losses(*args)
    wanted = inputs.plain()[0]
    torch.testing.assert_close(ce, wanted, rtol=0, atol=1e-10)
    assert not l1.any()
    grads = [torch.autograd.grad(c.sum(), inputs.leaves) for c in (ce, wanted)]
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_the_frozen_head_and_the_teacher_get_no_gradient():
    inputs = Inputs()
    inputs.head.requires_grad_()
    inputs.teacher.requires_grad_()
    total = sum(o.sum() for o in inputs.fused())
    grads = torch.autograd.grad(total, (inputs.head, inputs.teacher), allow_unused=True)
    assert grads == (None, None)


def test_frozen_markov_weights_get_no_gradient_and_change_no_other():
    inputs = Inputs()
    wanted = inputs.gradients(inputs.fused())
    inputs.w2.requires_grad_(False)
    total = sum((u * o).sum() for u, o in zip(inputs.upstream, inputs.fused(), strict=True))
    total.backward()
    assert inputs.w2.grad is None
    assert torch.equal(inputs.hidden.grad, wanted[0])


def test_no_rows_give_empty_losses_and_zero_gradients():
    inputs = Inputs(num_rows=0)
    outputs = inputs.fused()
    assert [o.shape[0] for o in outputs] == [0, 0]
    assert not inputs.gradients(outputs)[2].any()


def test_an_extreme_gap_between_logits_stays_finite():
    inputs = Inputs(dtype=torch.float32)
    with torch.no_grad():
        inputs.hidden.mul_(300)
    ce, l1 = inputs.fused()
    grads = inputs.gradients((ce, l1))
    assert bool(ce.isfinite().all() and (l1 >= 0).all() and (l1 <= 2).all())
    assert all(bool(g.isfinite().all()) for g in grads)


def test_a_drafter_equal_to_the_teacher_has_l1_zero():
    inputs = Inputs(dtype=torch.float32)
    hidden = inputs.teacher[inputs.row]
    _, l1 = vocab_losses(hidden, None, inputs.head, None, inputs.teacher, inputs.row, inputs.labels)
    torch.testing.assert_close(l1, torch.zeros_like(l1), rtol=0, atol=1e-5)


def test_an_autocast_region_changes_nothing():
    inputs = Inputs(dtype=torch.float32)
    wanted = inputs.fused()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = inputs.fused()
        grads = inputs.gradients(outputs)
    assert all(map(torch.equal, outputs, wanted))
    assert all(map(torch.equal, grads, inputs.gradients(wanted)))


class LargestFloat32(TorchDispatchMode):
    """Remembers the largest float32 result whose last or first dimension is the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.dtype == torch.float32 and V in t.shape:
                self.rows = max(self.rows, t.numel() // V)
        return out


def test_no_float32_tensor_over_the_vocabulary_exceeds_one_chunk():
    inputs = Inputs(num_rows=200, num_positions=80, dtype=torch.bfloat16)
    with LargestFloat32() as largest:
        outputs = inputs.fused(chunk_rows=16)
    assert largest.rows == 16
    total = sum(o.sum() for o in outputs)
    with LargestFloat32() as largest:
        # the accumulated gradient of w2 is [V, r], smaller than a chunk
        torch.autograd.grad(total, inputs.leaves)
    assert largest.rows == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_rows": 0}, "chunk_rows 0"),
        ({"latent": None}, "latent and w2"),
        ({"teacher_row": None}, "teacher_row"),
    ],
)
def test_incomplete_arguments_are_refused(change, message):
    i = Inputs()
    arguments = {
        "hidden": i.hidden, "latent": i.latent, "head_weight": i.head, "w2": i.w2,
        "teacher_hidden": i.teacher, "teacher_row": i.row, "labels": i.labels,
    }  # fmt: skip
    with pytest.raises(UsageError, match=message):
        vocab_losses(**{**arguments, **change})
