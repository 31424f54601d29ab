# SPDX-License-Identifier: Apache-2.0
"""Vector instructions against values worked out by hand, and the misuses that are refused."""

import numpy as np
import pytest

from npu_ops.emulator import EmulatorError
from tests.ops.emulator.vector_world import run

F4, F2, I4, U4, U1 = np.float32, np.float16, np.int32, np.uint32, np.uint8
RINT, FLOOR, CEIL, ROUND, TRUNC = 1, 2, 3, 4, 5
LT, GT, EQ, LE, GE, NE = range(6)


def test_half_sums_round_to_nearest_even():
    # Above 2048 halves are 2 apart: 2049 lies between and goes to 2048, 2051 to 2052.
    a = np.array([2048, 2048, 65504, 6e-8] + [0] * 12, F2)
    b = np.array([1, 3, 32, 6e-8] + [0] * 12, F2)
    out = run("add_half", a, b, np.zeros(16, F2), 16)
    assert out[:4].tolist() == [2048, 2052, np.inf, np.float16(1.2e-7)]


def test_mask_and_repeat_strides_pick_lanes():
    # 2 repeats of 10 lanes. Source 0 stands still, source 1 moves by 8 blocks, the result by 2.
    a, b = np.arange(64, dtype=F4), 100 * np.arange(128, dtype=F4)
    out = run("add_lanes", a, b, np.zeros(32, F4), 10, 2, 2, 0, 8)
    first = [i + 100 * i for i in range(10)]
    second = [i + 100 * (64 + i) for i in range(10)]
    assert out.tolist() == [*first, *[0] * 6, *second, *[0] * 6]


@pytest.mark.parametrize(
    ("p", "text"),
    [
        ((65, 1, 8, 8, 8), "mask = 65: 1 to 64"),
        ((0, 1, 8, 8, 8), "mask = 0: 1 to 64"),
        ((64, 33, 8, 0, 0), "of a tensor of 8192 bytes"),
        ((64, 2, 8, 8, 8), "nothing has written"),
    ],
)
def test_lanes_outside_are_refused(p, text):
    a = np.ones(64, F4)
    with pytest.raises(EmulatorError, match=text):
        run("add_lanes", a, a, np.zeros(8, F4), *p)


def test_count_zero_and_repeat_zero_do_nothing():
    a = np.ones(64, F4)
    assert run("max", a, a, np.zeros(8, F4), 0).tolist() == [0] * 8
    assert run("add_lanes", a, a, np.zeros(8, F4), 64, 0, 8, 8, 8).tolist() == [0] * 8


def test_casts_round_half_to_even():
    # A bfloat16 has 8 bits: 257 lies between 256 and 258, 259 between 258 and 260.
    a = np.array([257, 259, 1, -0.5] + [0] * 12, F4)
    bits = run("to_bfloat16", a, None, np.zeros(16, np.uint16), 16, RINT)
    assert (bits[:4].astype(U4) << 16).view(F4).tolist() == [256, 260, 1, -0.5]
    a = np.array([2049, 2051, 70000, 1e-9] + [0] * 12, F4)
    out = run("to_half", a, None, np.zeros(16, F2), 16)
    assert out[:4].tolist() == [2048, 2052, np.inf, 0]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (RINT, [0, 2, 2, -2, 1, -1, 3, 0]),
        (FLOOR, [0, 1, 2, -2, 0, -2, 3, -1]),
        (CEIL, [1, 2, 3, -1, 1, -1, 3, 0]),
        (ROUND, [1, 2, 3, -2, 1, -1, 3, -1]),
        (TRUNC, [0, 1, 2, -1, 0, -1, 3, 0]),
    ],
)
def test_casts_to_integers_follow_their_mode(mode, expected):
    a = np.array([0.5, 1.5, 2.5, -1.5, 0.7, -1.2, 3.0, -0.5], F4)
    assert run("to_int", a, None, np.zeros(8, I4), 8, mode).tolist() == expected


def test_bfloat16_widens_exactly():
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0001] + [0] * 12, np.uint16)
    out = run("from_bfloat16", bits, None, np.zeros(16, F4), 16)
    assert out[:4].tolist() == [1, -2, np.inf, 2.0**-133]


def test_casts_that_hide_a_rounding_are_refused():
    a = np.ones(16, F4)
    with pytest.raises(EmulatorError, match="name the mode"):
        run("to_bfloat16", a, None, np.zeros(16, np.uint16), 16, 0)
    with pytest.raises(EmulatorError, match="name the mode"):
        run("to_int", a, None, np.zeros(8, I4), 8, 0)


def test_index_and_shift():
    a = np.arange(8, dtype=I4)
    assert run("index", a, None, np.zeros(16, I4), 10, 5).tolist() == [*range(5, 15), *[0] * 6]
    assert run("shift_left", a, None, np.zeros(8, I4), 8, 2).tolist() == [4 * i for i in range(8)]


def test_duplicate_in_every_second_block():
    out = run("duplicate_lanes", np.zeros(8, F4), None, np.zeros(48, F4), 12, 1, 2, 0, f=3)
    assert out.tolist() == [*[3] * 8, *[0] * 8, *[3] * 4, *[0] * 28]


@pytest.mark.parametrize(
    ("mode", "expected"), [(LT, 14), (GT, 240), (EQ, 1), (LE, 15), (GE, 241), (NE, 254)]
)
def test_compare_packs_bits_lowest_first(mode, expected):
    a = np.array([2, 3, 5, 7, 11, 13, 17, 19] * 8, F4)
    b = np.array([2, 4, 6, 8, 10, 12, 14, 16] * 8, F4)
    out = run("compare", a, b, np.zeros(32, U1), 64, mode)
    assert out.tolist() == [expected] * 8 + [0] * 24


def test_compare_with_nan_is_false_but_for_ne():
    a = np.full(64, np.nan, F4)
    assert run("compare", a, a, np.zeros(32, U1), 64, EQ)[:8].tolist() == [0] * 8
    assert run("compare", a, a, np.zeros(32, U1), 64, NE)[:8].tolist() == [255] * 8


def test_compare_refuses_odd_sizes_and_integer_order():
    a = np.ones(64, F4)
    with pytest.raises(EmulatorError, match="multiple of 256 bytes"):
        run("compare", a, a, np.zeros(32, U1), 56, LT)
    a = np.arange(64, dtype=I4)
    assert run("compare_int", a, None, np.zeros(32, U1), 64, EQ, 9)[:2].tolist() == [0, 2]
    with pytest.raises(EmulatorError, match="CMPMODE::EQ only"):
        run("compare_int", a, None, np.zeros(32, U1), 64, LT, 9)


def test_select_takes_bits_of_every_repeat():
    # 96 floats: 64 bits for the first repeat, 32 for the second.
    a = np.arange(96, dtype=F4)
    bits = np.zeros(32, U1)
    bits[0], bits[8] = 0b101, 0b10
    out = run("select", a, bits, np.zeros(96, F4), 96, f=-1)
    assert {i: x for i, x in enumerate(out.tolist()) if x != -1} == {0: 0, 2: 2, 65: 65}


def test_gather_takes_byte_offsets():
    a = np.arange(16, dtype=F4) * 10
    offsets = np.array([60, 0, 4, 4, 8, 56, 12, 0], U4)
    out = run("gather", a, offsets, np.zeros(8, F4), 8, 0)
    assert out.tolist() == [150, 0, 10, 10, 20, 140, 30, 0]
    assert run("gather", a, offsets[:8] * 0, np.zeros(8, F4), 8, 8)[0] == 20


def test_gather_refuses_offsets_between_elements_and_outside():
    a = np.ones(16, F4)
    with pytest.raises(EmulatorError, match=r"srcOffset\[1\] gives byte 6, not a multiple of 4"):
        run("gather", a, np.array([0, 6, 0, 0, 0, 0, 0, 0], U4), np.zeros(8, F4), 8, 0)
    with pytest.raises(EmulatorError, match="of a tensor of 8192 bytes"):
        run("gather", a, np.array([8192] * 8, U4), np.zeros(8, F4), 8, 0)
    with pytest.raises(EmulatorError, match=r"reads UB\+64, which nothing has written"):
        run("gather", a, np.array([64] * 8, U4), np.zeros(8, F4), 8, 0)


@pytest.mark.parametrize(
    ("pattern", "first"),
    [(1, [1, 3, 5]), (2, [2, 4, 6]), (3, [1, 5, 9]), (4, [2, 6, 10]), (6, [4, 8, 12]), (7, [1, 2])],
)
def test_gather_mask_patterns(pattern, first):
    a = np.arange(1, 257, dtype=U4)
    out = run("gather_pattern", a, None, np.zeros(512, U4), pattern, 4, 0, 8, 300)
    kept = {1: 128, 2: 128, 7: 256}.get(pattern, 64)
    assert out[: len(first)].tolist() == first
    assert out[300] == kept
    assert out[kept:300].tolist() == [0] * (300 - kept)


def test_gather_mask_counts_elements_of_a_repeat():
    # Counter mode: 70 elements a repeat, repeats 8 blocks apart: elements 0..69 and 64..133.
    a = np.arange(192, dtype=U4)
    pattern = np.full(8, 0x99999999, U4)
    pattern = np.concatenate([pattern, pattern])
    out = run("gather_bits", a, pattern, np.zeros(128, U4), 0, 2, 70, 8)
    one = [i for i in range(70) if i % 4 in (0, 3)]
    assert out[:70].tolist() == one + [64 + i for i in one]


def test_brcb_fills_a_block_with_each_element():
    a = np.arange(1, 17, dtype=F2)
    out = run("brcb", a, None, np.zeros(512, F2), 2, 1, 8)
    assert out[:256].tolist() == [1 + i // 16 for i in range(256)]
    out = run("brcb", a, None, np.zeros(512, F2), 2, 2, 16)
    assert out[:48].tolist() == [*[1] * 16, *[0] * 16, *[2] * 16]
    with pytest.raises(EmulatorError, match="dstBlkStride = 0"):
        run("brcb", a, None, np.zeros(512, F2), 1, 0, 8)


def test_reduce_max_gives_the_first_index_as_bits():
    a = np.zeros(200, F4)
    a[[70, 130]] = 5
    out = run("reduce_max", a, None, np.zeros(8, F4), 200, 1)
    assert out[0] == 5
    assert out.view(U4)[1] == 70


def test_reduce_max_needs_its_workspace():
    # 200 floats are 4 repeats, 8 entries. With the index two more rounds of 8 entries each.
    a = np.zeros(200, F4)
    run("reduce_max", a, None, np.zeros(8, F4), 200, 0, 0, 0, 0, 8)
    run("reduce_max", a, None, np.zeros(8, F4), 200, 1, 0, 0, 0, 24)
    with pytest.raises(EmulatorError, match="of a tensor of 64 bytes"):
        run("reduce_max", a, None, np.zeros(8, F4), 200, 1, 0, 0, 0, 16)


def test_reductions_of_repeats():
    a = np.arange(128, dtype=F4)
    assert run("whole_sum", a, None, np.zeros(8, F4), 10, 2, 1)[:2].tolist() == [45, 45 + 640]
    out = run("whole_max", a, None, np.zeros(8, F4), 10, 2, 1)
    assert out[[0, 2]].tolist() == [9, 73]
    assert out.view(U4)[[1, 3]].tolist() == [9, 9]
    assert run("reduce_sum", a, None, np.zeros(8, F4), 128)[0] == 128 * 127 / 2


@pytest.mark.parametrize("name", ["max", "reduce_max"])
def test_order_of_nan_is_refused(name):
    a = np.array([1, np.nan, 0, 0, 0, 0, 0, 0], F4)
    with pytest.raises(EmulatorError, match="order is not documented"):
        run(name, a, a, np.zeros(8, F4), 8)
