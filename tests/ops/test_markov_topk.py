# SPDX-License-Identifier: Apache-2.0
"""markov_topk: every implementation does what its contract says.

Integer-valued inputs make sums exact in any order, so values and indices are compared exactly,
ties included. lse is compared to 1e-5: float32 sums of exponentials in another order.
"""

import math

import pytest
import torch

from npu_ops import markov_topk
from npu_ops.markov_topk import SPEC, fast, fits
from treespark.prepack import can_prepack

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
IMPLEMENTATIONS = {"reference": SPEC.reference, "cpu": fast.on_cpu, "cuda": fast.on_cuda}


@pytest.fixture(params=IMPLEMENTATIONS)
def run(request):
    """One implementation; that for CUDA computes on a CPU as well."""
    return IMPLEMENTATIONS[request.param]


def inputs(num_rows, num_base, vocab, rank, dtype=torch.float32, spread=3, seed=0):
    """Base logits, base rows, latents and w2 of small whole numbers."""
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape):
        return torch.randint(-spread, spread + 1, shape, generator=generator).to(dtype)

    base_row = torch.randint(num_base, (num_rows,), generator=generator, dtype=torch.int32)
    return whole(num_base, vocab), base_row, whole(num_rows, rank), whole(vocab, rank)


def slowly(base, base_row, latent, w2, k, inv_temperature=1.0, vocab_size=-1):
    """The definition in lists: values and indices by (-value, index), and the log-sum-exp."""
    columns = base.shape[1] if vocab_size == -1 else vocab_size
    z = (base.double()[base_row.long()] + latent.double() @ w2.double().T) * inv_temperature
    z = z[:, :columns].nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).tolist()
    order = [sorted(range(columns), key=lambda i: (-row[i], i))[:k] for row in z]
    values = [[row[i] for i in best] for row, best in zip(z, order, strict=True)]
    return values, order, [float(torch.tensor(row).double().logsumexp(0)) for row in z]


def check(run, arguments, k, **options):
    values, indices, lse = run(*arguments, k, **options)
    expected = slowly(*arguments, k, **options)
    num_rows = len(arguments[2])
    assert values.shape == indices.shape == (num_rows, k)
    assert lse.shape == (num_rows,)
    assert indices.dtype == torch.int32
    assert values.tolist() == expected[0]
    assert indices.tolist() == expected[1]
    torch.testing.assert_close(lse.tolist(), expected[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (17, 4), (255, 8), (1000, 32)])
def test_best_tokens_and_lse_are_those_of_the_definition(run, dtype, vocab, k):
    for num_rows, num_base in ((1, 1), (12, 3)):
        check(run, inputs(num_rows, num_base, vocab, 16, dtype, seed=vocab), k)


def test_scores_are_summed_and_returned_in_float32_or_in_double(run):
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        values, _, lse = run(*inputs(2, 1, 50, 16, dtype), 4)
        assert values.dtype == lse.dtype == expected
    # 256 + 1 has no bfloat16: the sum must not have been rounded to one.
    base, latent = torch.full((1, 9), 256.0).bfloat16(), torch.zeros(1, 16).bfloat16()
    latent[0, 0] = 1
    w2 = torch.zeros(9, 16).bfloat16()
    w2[5, 0] = 1
    values, indices, _ = run(base, torch.zeros(1).int(), latent, w2, 2)
    assert values.tolist() == [[257.0, 256.0]]
    assert indices.tolist() == [[5, 0]]


@pytest.mark.parametrize("value", [0.0, -math.inf, math.inf, 3.5])
def test_equal_logits_come_in_the_order_of_their_indices(run, value):
    base = torch.full((1, 700), value)
    arguments = (base, torch.zeros(2).int(), torch.zeros(2, 16), torch.zeros(700, 16))
    values, indices, lse = run(*arguments, 8)
    assert indices.tolist() == [list(range(8))] * 2
    assert values.tolist() == [[value] * 8] * 2
    torch.testing.assert_close(lse.tolist(), [value + math.log(700)] * 2, rtol=1e-6, atol=1e-5)


def test_nan_counts_as_minus_infinity(run):
    arguments = inputs(4, 2, 300, 16)
    arguments[0][0, ::2] = math.nan
    arguments[0][1] = math.nan
    check(run, arguments, 8)
    _, indices, lse = run(*arguments, 8)
    lost = arguments[1] == 1
    assert lost.any()
    assert indices[lost].tolist() == [list(range(8))] * int(lost.sum())
    assert lse[lost].isneginf().all()


def test_plus_infinity_comes_first_and_makes_lse_infinite(run):
    arguments = inputs(4, 2, 300, 16)
    arguments[0][0, 250] = arguments[0][0, 40] = math.inf
    arguments[0][1, ::2], arguments[0][1, 1::2], arguments[0][1, 5] = math.nan, -math.inf, math.inf
    check(run, arguments, 8)
    _, indices, lse = run(*arguments, 8)
    assert (lse == math.inf).all()
    first = [[40, 250] if row == 0 else [5, 0] for row in arguments[1].tolist()]
    assert indices[:, :2].tolist() == first


def test_columns_from_vocab_size_on_do_not_exist(run):
    arguments = inputs(4, 2, 300, 16)
    arguments[0][:, 130:] = 99
    check(run, arguments, 8, vocab_size=130)
    arguments[0][:, :130] = -math.inf
    assert run(*arguments, 4, vocab_size=130)[1].tolist() == [[0, 1, 2, 3]] * 4


def test_inverse_temperature_scales_logits_before_lse(run):
    check(run, inputs(3, 2, 100, 16), 4, inv_temperature=0.5)


def test_strides_of_logits_and_latents_do_not_matter(run):
    base, base_row, latent, w2 = inputs(6, 3, 200, 32)
    expected = run(base, base_row, latent, w2, 4)
    strided = (base.T.contiguous().T, base_row.repeat_interleave(2)[::2])
    wide = torch.full((6, 70), math.nan)
    wide[:, 3:67:2] = latent
    results = run(*strided, wide[:, 3:67:2], w2, 4)
    for found, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_no_rows_give_empty_results(run):
    base, base_row, latent, w2 = inputs(2, 1, 50, 16)
    values, indices, lse = run(base, base_row[:0], latent[:0], w2, 4)
    assert values.shape == indices.shape == (0, 4)
    assert lse.shape == (0,)


def test_a_row_does_not_depend_on_the_others(run):
    base, base_row, latent, w2 = inputs(12, 3, 500, 16)
    together = run(base, base_row, latent, w2, 8)
    for row in range(12):
        alone = run(base, base_row[row : row + 1], latent[row : row + 1], w2, 8)
        assert torch.equal(alone[1][0], together[1][row])
        assert torch.equal(alone[0][0], together[0][row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prepacked_weights_give_the_same(dtype):
    arguments = inputs(8, 2, 640, 32, dtype, spread=1)
    reason = can_prepack(arguments[3])
    if reason is not None:
        pytest.skip(reason)
    packed = torch.ops.mkldnn._reorder_linear_weight(arguments[3], 16)
    # Sums stay below 256, which bfloat16 holds exactly.
    expected = SPEC.reference(*arguments, 4, vocab_size=600)
    for run in (markov_topk, SPEC.reference):
        values, indices, lse = run(*arguments[:3], packed, 4, vocab_size=600)
        assert torch.equal(indices, expected[1])
        assert torch.equal(values, expected[0])
        torch.testing.assert_close(lse, expected[2], rtol=1e-6, atol=1e-6)


def test_parent_overload_takes_the_parents_rows_of_w1(run):
    base, base_row, w1, w2 = inputs(40, 3, 40, 16)
    parents = torch.tensor([5, 0, 39, 5], dtype=torch.int32)
    arguments = (base, base_row[:4], w1, parents, w2, 4)
    found = torch.ops.treespark.markov_topk.parent(*arguments)
    expected = run(base, base_row[:4], w1[parents.long()], w2, 4)
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w1": torch.zeros(9, 16)}, "w1 must be [V=8, r], got [9, 16]"),
        ({"parent_ids": torch.zeros(2)}, "parent_ids must be int32, got float32"),
        ({"parent_ids": torch.zeros(2, 1).int()}, "parent_ids must be [R=2], got [2, 1]"),
        ({"w2": torch.zeros(9, 16)}, "w2 must be [V=8, r=16], got [9, 16]"),
    ],
)
def test_wrong_argument_of_the_parent_overload_is_named(changes, message):
    arguments = {
        "base_logits": torch.zeros(1, 8),
        "base_row": torch.zeros(2).int(),
        "w1": torch.zeros(8, 16),
        "parent_ids": torch.zeros(2).int(),
        "w2": torch.zeros(8, 16),
        "k": 4,
    }
    with pytest.raises(RuntimeError) as caught:
        torch.ops.treespark.markov_topk.parent(**(arguments | changes))
    assert str(caught.value) == f"markov_topk: {message}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_logits": torch.zeros(5)}, "base_logits must be [R0, V], got [5]"),
        ({"latent": torch.zeros(3, 16)}, "latent must be [R=2, r], got [3, 16]"),
        ({"w2": torch.zeros(9, 16)}, "w2 must be [V=8, r=16], got [9, 16]"),
        ({"base_row": torch.zeros(2).long()}, "base_row must be int32, got int64"),
        ({"w2": torch.zeros(8, 16).half()}, "w2 must be float32, got float16"),
        (
            {"base_logits": torch.zeros(1, 8).int()},
            "base_logits must be bfloat16 or float16 or float32 or float64, got int32",
        ),
        ({"w2": torch.zeros(16, 8).T}, "w2 must be contiguous, got strides [1, 8]"),
        (
            {"latent": torch.zeros(2, 8), "w2": torch.zeros(8, 8)},
            "r must be in 16..512, got 8",
        ),
        (
            {"latent": torch.zeros(2, 24), "w2": torch.zeros(8, 24)},
            "r must be a multiple of 16, got 24",
        ),
        ({"base_logits": torch.zeros(0, 8)}, "R0 must be in 1..4096, got 0"),
        ({"k": 0}, "k must be in 1..8, got 0"),
        ({"k": 9}, "k must be in 1..8, got 9"),
        ({"k": 5, "vocab_size": 4}, "k must be in 1..4, got 5"),
        ({"vocab_size": 9}, "vocab_size must be in 1..8, got 9"),
        ({"inv_temperature": 0.0}, "inv_temperature must be positive, got 0.0"),
        (
            {"base_row": torch.zeros(4097).int(), "latent": torch.zeros(4097, 16)},
            "R must be in 0..4096, got 4097",
        ),
    ],
)
def test_wrong_argument_is_named(run, changes, message):
    arguments = {
        "base_logits": torch.zeros(1, 8),
        "base_row": torch.zeros(2).int(),
        "latent": torch.zeros(2, 16),
        "w2": torch.zeros(8, 16),
        "k": 4,
    }
    with pytest.raises(RuntimeError) as caught:
        run(**(arguments | changes))
    assert str(caught.value) == f"markov_topk: {message}"


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_row_number_out_of_range_is_named(name):
    base, base_row, latent, w2 = inputs(2, 1, 50, 16)
    with pytest.raises(RuntimeError, match=r"base_row must hold values in 0\.\.0, got 1"):
        IMPLEMENTATIONS[name](base, base_row + 1, latent, w2, 4)


def test_limits_are_those_of_fits():
    assert fits(16, 1, 1)
    assert fits(512, 32, 4096)
    for sizes in ((0, 4, 1), (8, 4, 1), (528, 4, 1), (64, 33, 1), (64, 0, 1), (64, 4, 4097)):
        assert not fits(*sizes)
