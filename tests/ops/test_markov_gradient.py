# SPDX-License-Identifier: Apache-2.0
"""Gradients of markov_topk: against numerical ones, and against those of the plain formula."""

import math

import pytest
import torch

from npu_ops import markov_topk

BASE_ROW = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32)


def leaves(dtype, seed=4):
    torch.manual_seed(seed)
    shapes = (2, 23), (5, 16), (23, 16)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def plain(base, latent, w2, k, inv_temperature, vocab_size):
    """Values and lse of the operator by autograd through whole rows."""
    z = (base[BASE_ROW.long()] + latent @ w2.T) * inv_temperature
    z = z[:, :vocab_size]
    return z.topk(k).values, z.logsumexp(-1)


@pytest.mark.parametrize("vocab_size", [23, 19])
def test_gradients_are_the_numerical_ones(vocab_size):
    base, latent, w2 = leaves(torch.float64)

    def values_and_lse(base, latent, w2):
        found = markov_topk(base, BASE_ROW, latent, w2, 3, 0.7, vocab_size)
        return found.values, found.lse

    # Random scores lie far apart, so that a small step changes no index.
    assert torch.autograd.gradcheck(values_and_lse, (base, latent, w2))


@pytest.mark.parametrize("which", ["values", "lse"])
def test_each_result_alone_has_the_gradients_of_the_formula(which):
    base, latent, w2 = leaves(torch.float64)
    found = getattr(markov_topk(base, BASE_ROW, latent, w2, 3, 0.7, 19), which)
    expected = plain(base, latent, w2, 3, 0.7, 19)[which == "lse"]
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad(found, (base, latent, w2), weights)
    wanted = torch.autograd.grad(expected, (base, latent, w2), weights)
    for found_one, wanted_one in zip(gradients, wanted, strict=True):
        # 1e-12: float64 sums in another order.
        torch.testing.assert_close(found_one, wanted_one, rtol=1e-12, atol=1e-12)


def test_gradients_have_the_dtypes_of_their_inputs():
    base, latent, w2 = leaves(torch.float64)
    base, latent, w2 = (
        base.detach().float().requires_grad_(),
        latent.detach().bfloat16().requires_grad_(),
        w2.detach().bfloat16().requires_grad_(),
    )
    found = markov_topk(base, BASE_ROW, latent, w2, 3)
    (found.values.sum() - found.lse.sum()).backward()
    assert base.grad.dtype == torch.float32
    assert latent.grad.dtype == w2.grad.dtype == torch.bfloat16
    wanted = plain(base, latent.float(), w2.float(), 3, 1.0, 23)
    (expected,) = torch.autograd.grad(wanted[0].sum() - wanted[1].sum(), w2)
    # Both round once to bfloat16, from float32 values a few units apart.
    torch.testing.assert_close(w2.grad, expected, rtol=2**-7, atol=1e-4)


def test_row_without_any_probability_has_finite_gradients():
    base, latent, w2 = leaves(torch.float64)
    with torch.no_grad():
        base[1] = -math.inf
    found = markov_topk(base, BASE_ROW, latent, w2, 3)
    found.lse.sum().backward()
    assert latent.grad.isfinite().all()
    assert (latent.grad[BASE_ROW == 1] == 0).all()
    assert (latent.grad[BASE_ROW == 0] != 0).any()


def test_nothing_of_the_size_of_the_vocabulary_times_rows_is_kept_for_backward():
    base, latent, w2 = leaves(torch.float64)
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        markov_topk(base, BASE_ROW, latent, w2, 3)
    assert kept
    assert (5, 23) not in [tuple(tensor.shape) for tensor in kept]
