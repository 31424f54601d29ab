# SPDX-License-Identifier: Apache-2.0
"""Loss terms: validity, weights, bounds, gradients and global normalisation.

Tolerances: float64 throughout, 1e-12 where two orders of summation are compared; the 1e-6 added to
each denominator is stated where it matters.
"""

import math

import pytest
import torch

from treespark.errors import UsageError
from treespark.training.losses import (
    LossTerm,
    base_terms,
    combine,
    confidence_rows,
    coverage_penalty,
    coverage_term,
    cross_entropy_rows,
    depth_weights,
    l1_rows,
    overlap_rows,
    survival_term,
    validity,
    weighted_term,
)

F64 = torch.float64


def close(actual, wanted, atol=1e-12):
    torch.testing.assert_close(actual, wanted, rtol=0, atol=atol)


def scalar(value) -> torch.Tensor:
    return torch.tensor(value, dtype=F64)


# --- validity and weights ---------------------------------------------------------------------


def test_a_hole_in_the_mask_ends_the_valid_prefix():
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]])
    valid = validity(mask, torch.tensor([[0, 1, 3]]), torch.ones(1, 3, dtype=torch.bool), 3)
    assert valid.tolist() == [
        [[True, True, False], [True, False, False], [True, True, True]],
    ]


def test_depths_beyond_the_sequence_are_not_valid():
    mask = torch.ones(1, 5, dtype=torch.long)
    valid = validity(mask, torch.tensor([[2, 3, 4]]), torch.ones(1, 3, dtype=torch.bool), 3)
    assert valid.sum(-1).tolist() == [[2, 1, 0]]
    assert valid[0, 0].tolist() == [True, True, False]


def test_rows_of_a_batch_use_their_own_mask():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    anchors = torch.zeros(2, 1, dtype=torch.long)
    valid = validity(mask, anchors, torch.ones(2, 1, dtype=torch.bool), 3)
    assert valid.sum(-1).squeeze(-1).tolist() == [3, 1]


def test_dummy_blocks_have_no_valid_depth():
    mask = torch.ones(1, 9, dtype=torch.long)
    keep = torch.tensor([[True, False]])
    valid = validity(mask, torch.tensor([[1, 1]]), keep, 4)
    assert valid.any(-1).tolist() == [[True, False]]


def test_depth_weights_start_at_one_and_fall_by_exp_of_one_over_gamma():
    valid = torch.tensor([[True, True, True], [True, False, False]])
    weights = depth_weights(valid, 4.0, F64)
    first, second, third = 1.0, math.exp(-0.25), math.exp(-0.5)
    close(weights, scalar([[first, second, third], [first, 0, 0]]))


def test_gamma_must_be_positive():
    with pytest.raises(UsageError, match="gamma 0"):
        depth_weights(torch.ones(1, 2, dtype=torch.bool), 0.0)


def test_rows_of_weight_zero_may_hold_nan():
    rows = scalar([1.0, float("nan")]).requires_grad_()
    term = weighted_term(rows, scalar([2.0, 0.0]))
    assert (term.numerator.item(), term.denominator.item()) == (2.0, 2.0)
    close(torch.autograd.grad(term.value, rows)[0], scalar([2 / (2 + 1e-6), 0.0]))


# --- base losses ------------------------------------------------------------------------------


def test_l1_is_two_for_disjoint_and_zero_for_equal_distributions():
    logits = scalar([[0.0, -800.0], [1.0, 2.0]])
    teacher = torch.stack([scalar([0.0, 1.0]), logits[1].softmax(-1)])
    close(l1_rows(logits, teacher), scalar([2.0, 0.0]))


def test_l1_lies_in_0_2_and_overlap_is_one_minus_its_half():
    torch.manual_seed(0)
    logits, teacher = 3 * torch.randn(50, 11, dtype=F64), torch.randn(50, 11, dtype=F64).softmax(-1)
    l1 = l1_rows(logits, teacher)
    assert bool((l1 >= 0).all() and (l1 <= 2).all())
    close(overlap_rows(l1), torch.minimum(logits.softmax(-1), teacher).sum(-1))


def test_cross_entropy_is_the_negative_log_probability_of_the_label():
    logits = scalar([[1.0, 0.0, -1.0]])
    wanted = -(logits[0, 2] - logits[0].exp().sum().log())
    close(cross_entropy_rows(logits, torch.tensor([2]))[0], wanted)


def test_confidence_gradient_vanishes_where_the_prediction_equals_the_overlap():
    overlap = scalar([0.1, 0.5, 0.9])
    logits = torch.logit(overlap).requires_grad_()
    rows = confidence_rows(logits, overlap)
    close(torch.autograd.grad(rows.sum(), logits)[0], torch.zeros(3, dtype=F64))
    entropy = -(overlap * overlap.log() + (1 - overlap) * (1 - overlap).log())
    close(rows.detach(), entropy)


def test_no_gradient_reaches_the_overlap():
    l1 = scalar([0.3, 1.2]).requires_grad_()
    assert not overlap_rows(l1).requires_grad
    confidence = scalar([0.0, 1.0]).requires_grad_()
    term = base_terms(l1 * 0, l1, torch.ones(2, dtype=F64), confidence)["confidence"]
    grads = torch.autograd.grad(term.value, (l1, confidence), allow_unused=True)
    assert grads[0] is None
    assert bool((grads[1] != 0).all())


def test_base_terms_share_weights_and_skip_what_is_not_given():
    ce, l1, weights = scalar([1.0, 3.0]), scalar([0.5, 1.5]), scalar([1.0, 0.5])
    terms = base_terms(ce, l1, weights, scalar([0.0, 0.0]))
    assert list(terms) == ["ce", "l1", "confidence"]
    assert terms["ce"].numerator.item() == 2.5
    assert terms["l1"].numerator.item() == 1.25
    close(terms["confidence"].numerator, scalar(1.5 * math.log(2)))
    assert {t.denominator.item() for t in terms.values()} == {1.5}
    assert list(base_terms(ce, None, weights)) == ["ce"]
    with pytest.raises(UsageError, match="confidence"):
        base_terms(ce, None, weights, scalar([0.0, 0.0]))


# --- tree losses ------------------------------------------------------------------------------


def test_survival_is_invariant_to_the_scale_of_the_masses():
    torch.manual_seed(1)
    log_q, mass = -torch.rand(9, dtype=F64), torch.rand(9, dtype=F64)
    one, scaled = survival_term(log_q, mass).value, survival_term(log_q, 1e3 * mass).value
    # the 1e-6 in the denominator is all that differs
    close(one, scaled, atol=1e-6)


def test_survival_treats_masses_as_constants():
    log_q = scalar([-1.0, -2.0]).requires_grad_()
    mass = scalar([0.5, 0.25]).requires_grad_()
    term = survival_term(log_q, mass)
    grads = torch.autograd.grad(term.value, (log_q, mass), allow_unused=True)
    assert grads[1] is None
    close(grads[0], -mass.detach() / (0.75 + 1e-6))


@pytest.mark.parametrize(
    ("logit", "value", "slope"),
    [(-6.0, 4, 0), (-3.5, 4, 0), (-3.0, 4, 0), (-2.0, 3, -1), (1.0, 0, 0), (2.0, 0, 0)],
)
def test_coverage_penalty_in_all_regions_and_at_both_kinks(logit, value, slope):
    z, boundary = scalar([logit]).requires_grad_(), scalar(0.0).requires_grad_()
    phi = coverage_penalty(z, boundary, margin=1.0, cap=4.0)
    assert phi.item() == value
    grads = torch.autograd.grad(phi.sum(), (z, boundary))
    assert (grads[0].item(), grads[1].item()) == (slope, -slope)


def test_coverage_penalty_of_the_boundary_token_itself_has_no_gradient():
    z = scalar([3.0, 1.0]).requires_grad_()
    phi = coverage_penalty(z[1:], z[1], margin=1.0, cap=4.0)
    assert phi.item() == 1.0
    assert torch.autograd.grad(phi.sum(), z)[0].tolist() == [0.0, 0.0]


def test_coverage_stays_between_zero_and_the_cap():
    torch.manual_seed(2)
    phi = coverage_penalty(
        9 * torch.randn(8, 3, 4, dtype=F64), 9 * torch.randn(8, 3, dtype=F64), 1.0, 4.0
    )
    value = coverage_term(phi, torch.rand(8, 4, dtype=F64), torch.rand(8, dtype=F64)).value
    assert 0 < value.item() < 4
    assert bool((phi >= 0).all() and (phi <= 4).all())


def test_a_constant_factor_on_depth_weights_cancels_in_coverage():
    torch.manual_seed(3)
    phi, probs = torch.rand(8, 3, 4, dtype=F64), torch.rand(8, 4, dtype=F64)
    weights = torch.rand(8, dtype=F64)
    shifted = math.exp(-1 / 4.0) * weights
    # the 1e-6 in the denominator is all that differs
    close(
        coverage_term(phi, probs, weights).value,
        coverage_term(phi, probs, shifted).value,
        atol=1e-6,
    )


def test_coverage_denominator_counts_each_expanded_parent():
    probs = scalar([[0.5, 0.25], [0.125, 0.125]])
    term = coverage_term(torch.ones(2, 3, 2, dtype=F64), probs, scalar([1.0, 0.5]))
    assert term.denominator.item() == 3 * (0.75 + 0.5 * 0.25)
    assert term.numerator.item() == term.denominator.item()


# --- normalisation ----------------------------------------------------------------------------


def toy_terms(weight, rows, counts) -> dict[str, LossTerm]:
    """Two terms with different counting weights on the same parameters [3]."""
    values = (rows @ weight) ** 2
    return {
        "ce": weighted_term(values, counts),
        "survival": weighted_term(values.exp(), counts**2),
    }


LAMBDAS = {"ce": 0.1, "survival": 0.9}


def toy_batch():
    torch.manual_seed(4)
    weight = torch.randn(3, dtype=F64).requires_grad_()
    rows, counts = torch.rand(10, 3, dtype=F64), torch.rand(10, dtype=F64)
    return weight, rows, counts, [slice(0, 2), slice(2, 10)]


def test_two_ranks_with_unequal_weights_equal_one_rank_on_the_union():
    weight, rows, counts, parts = toy_batch()
    total, values = combine(toy_terms(weight, rows, counts), LAMBDAS)
    wanted = torch.autograd.grad(total, weight)[0]
    terms = [toy_terms(weight, rows[p], counts[p]) for p in parts]
    both = {name: sum(rank[name].denominator for rank in terms) for name in LAMBDAS}
    ranks = [combine(t, LAMBDAS, world_size=2, denominators=both) for t in terms]
    averaged = sum(torch.autograd.grad(rank[0], weight)[0] for rank in ranks) / 2
    close(averaged, wanted)
    for name in LAMBDAS:
        close(ranks[0][1][name] + ranks[1][1][name], values[name])


def test_accumulation_over_micro_batches_equals_one_batch():
    weight, rows, counts, parts = toy_batch()
    total, values = combine(toy_terms(weight, rows, counts), LAMBDAS)
    wanted = torch.autograd.grad(total, weight)[0]
    terms = [toy_terms(weight, rows[p], counts[p]) for p in parts]
    step = {name: sum(t[name].denominator for t in terms) for name in LAMBDAS}
    micro = [combine(t, LAMBDAS, denominators=step, accumulation_steps=2) for t in terms]
    # what the engine does: each micro-batch's loss is divided by their number
    accumulated = sum(torch.autograd.grad(m[0] / 2, weight)[0] for m in micro)
    close(accumulated, wanted)
    for name in LAMBDAS:
        close(micro[0][1][name] + micro[1][1][name], values[name])


def test_normalising_each_rank_by_itself_would_differ():
    weight, rows, counts, parts = toy_batch()
    wanted = torch.autograd.grad(combine(toy_terms(weight, rows, counts), LAMBDAS)[0], weight)[0]
    local = [combine(toy_terms(weight, rows[p], counts[p]), LAMBDAS)[0] for p in parts]
    naive = sum(torch.autograd.grad(loss, weight)[0] for loss in local) / 2
    assert (naive - wanted).abs().max().item() > 1e-3


def test_the_value_is_numerator_over_denominator_plus_1e_6():
    term = LossTerm(scalar(3.0), scalar(1.5))
    assert term.value.item() == 3.0 / (1.5 + 1e-6)
    total, values = combine({"ce": term}, {"ce": 0.5})
    assert values["ce"].item() == 3.0 / (1.5 + 1e-6)
    assert total.item() == 0.5 * values["ce"].item()


def test_nothing_supervised_is_an_exact_zero_with_finite_gradients():
    weight, rows, counts, _ = toy_batch()
    total, values = combine(toy_terms(weight, rows, torch.zeros_like(counts)), LAMBDAS)
    assert total.item() == 0.0
    assert [v.item() for v in values.values()] == [0.0, 0.0]
    assert torch.autograd.grad(total, weight)[0].tolist() == [0.0, 0.0, 0.0]


def test_a_numerator_without_weight_does_not_leak_into_the_loss():
    numerator = scalar(float("nan")).requires_grad_()
    value = LossTerm(numerator, scalar(0.0)).value
    assert value.item() == 0.0
    assert torch.autograd.grad(value, numerator)[0].item() == 0.0


def test_zero_weights_leave_the_step_bit_for_bit_unchanged():
    weight, rows, counts, _ = toy_batch()
    terms = toy_terms(weight, rows, counts)
    base = combine({"ce": terms["ce"]}, {"ce": 0.1})[0]
    both = combine(terms, {"ce": 0.1, "survival": 0.0})[0]
    assert torch.equal(base, both)
    grads = [torch.autograd.grad(t, weight, retain_graph=True)[0] for t in (base, both)]
    assert torch.equal(*grads)
    broken = LossTerm(scalar(float("inf")), scalar(1.0))
    assert torch.equal(base, combine({**terms, "survival": broken}, {"ce": 0.1, "survival": 0})[0])


def test_a_term_without_a_weight_is_refused():
    term = LossTerm(scalar(1.0), scalar(1.0))
    with pytest.raises(UsageError, match=r"losses\.coverage"):
        combine({"coverage": term}, {"ce": 1.0})
    with pytest.raises(UsageError, match="no term"):
        combine({}, {})


def test_terms_of_two_sets_of_rows_add_up():
    weight, rows, counts, parts = toy_batch()
    whole = toy_terms(weight, rows, counts)["ce"]
    first, second = (toy_terms(weight, rows[p], counts[p])["ce"] for p in parts)
    close((first + second).value, whole.value)
    assert not (first + second).detach().numerator.requires_grad
