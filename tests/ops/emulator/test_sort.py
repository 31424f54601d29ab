# SPDX-License-Identifier: Apache-2.0
"""Sort32 and MrgSort: order, ties, queues; and DataCopyPad: padding and strides."""

import ctypes

import numpy as np
import pytest

from npu_ops.emulator import EmulatorError, In, Out
from tests.ops.emulator.vector_world import library, run

F4, U4 = np.float32, np.uint32


def pairs(scores, indices):
    out = np.zeros(2 * len(scores), F4)
    out[::2] = scores
    out.view(U4)[1::2] = indices
    return out


def split(out):
    return out[::2].tolist(), out.view(U4)[1::2].tolist()


def test_sort32_sorts_each_32_down_and_keeps_ties_in_order():
    scores = np.array([i % 4 for i in range(32)] + [-np.inf] * 31 + [7], F4)
    out = run("sort32", scores, np.arange(100, 164, dtype=U4), np.zeros(128, F4), 2)
    values, indices = split(out)
    assert values == [*[3] * 8, *[2] * 8, *[1] * 8, *[0] * 8, 7, *[-np.inf] * 31]
    first = [100 + i for rest in (3, 2, 1, 0) for i in range(rest, 32, 4)]
    assert indices == [*first, 163, *range(132, 163)]


def test_sort32_refuses_wrong_addresses_and_nan():
    scores, indices = np.zeros(64, F4), np.arange(64, dtype=U4)
    with pytest.raises(EmulatorError, match="not aligned to 128 bytes"):
        run("sort32", scores, indices, np.zeros(64, F4), 1, 8)
    scores[3] = np.nan
    with pytest.raises(EmulatorError, match="order is not documented"):
        run("sort32", scores, indices, np.zeros(64, F4), 1)


def test_merge_takes_the_earlier_queue_on_ties():
    queues = [pairs([3, 1], [10, 11]), pairs([3, 2], [20, 21]), pairs([5, 1], [30, 31])]
    a = np.concatenate([*queues, pairs([3, 0], [40, 41])])
    out = run("merge", a, None, np.zeros(16, F4), 2, 15, 1, 0, 0)
    assert split(out) == ([5, 3, 3, 3, 2, 1, 1, 0], [30, 10, 20, 40, 21, 11, 31, 41])
    # Only the first two queues.
    out = run("merge", a, None, np.zeros(16, F4), 2, 3, 1, 0, 0)
    assert split(out[:8]) == ([3, 3, 2, 1], [10, 20, 21, 11])
    assert out[8:].tolist() == [0] * 8


def test_merge_stops_when_a_queue_ends():
    queues = [pairs([9, 8], [0, 1]), pairs([7, 1], [2, 3]), pairs([6, 0], [4, 5])]
    a = np.concatenate([*queues, pairs([5, 4], [6, 7])])
    out = run("merge", a, None, np.zeros(24, F4), 2, 15, 1, 1, 16)
    assert split(out[:4]) == ([9, 8], [0, 1])
    assert out.view(U4)[16:20].tolist() == [2, 0, 0, 0]


def test_merge_repeats_over_groups_of_four_queues():
    rng = np.random.default_rng(0)
    scores = np.sort(rng.integers(0, 9, (8, 32)), 1)[:, ::-1].astype(F4)
    out = run("merge", pairs(scores.ravel(), np.arange(256)), None, np.zeros(512, F4), 32, 15, 2, 0)
    for group in range(2):
        values, indices = split(out[group * 256 : (group + 1) * 256])
        flat = scores.ravel()[group * 128 : (group + 1) * 128]
        order = np.argsort(-flat, kind="stable")
        assert values == flat[order].tolist()
        assert indices == (order + group * 128).tolist()


@pytest.mark.parametrize(
    ("p", "text"),
    [
        ((2, 5, 1, 0), "validBit = 5: 3, 7 or 15"),
        ((2, 7, 2, 0), "needs 4 adjacent queues"),
        ((2, 15, 2, 1), "needs 4 adjacent queues"),
    ],
)
def test_merge_refuses_what_the_unit_cannot_do(p, text):
    with pytest.raises(EmulatorError, match=text):
        run("merge", pairs([1] * 16, range(16)), None, np.zeros(32, F4), *p)


def test_merge_refuses_a_queue_that_is_not_sorted():
    a = pairs([1, 2, 2, 1, 2, 1, 2, 1], range(8))
    with pytest.raises(EmulatorError, match="queue 1 of MrgSort is not sorted at entry 1"):
        run("merge", a, None, np.zeros(16, F4), 2, 15, 1, 0)


class PadCase(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("count", "block_count", "block_len", "src_stride")),
        *(
            (name, ctypes.c_uint32)
            for name in ("dst_stride", "is_pad", "left", "right", "out_bytes")
        ),
        ("value", ctypes.c_float),
    )


def pad(count, *p, value=9.0, out=8):
    a, target = np.arange(1, count + 1, dtype=F4), np.zeros(out, F4)
    case = PadCase(count, *p, target.nbytes, value)
    library().launch("pad_case", [In("a", a), Out("out", target), case], blocks=1)
    return target.tolist()


def test_pad_fills_up_to_the_block():
    # 5 floats, 1 before and 2 behind: 8 floats.
    assert pad(5, 1, 20, 0, 0, 1, 1, 2) == [9, 1, 2, 3, 4, 5, 9, 9]
    # 3 floats and 1 behind leave 4 of the block, which get the value too.
    assert pad(3, 1, 12, 0, 0, 1, 0, 1) == [1, 2, 3, 9, 9, 9, 9, 9]


def test_pad_strides_are_bytes_outside_and_blocks_inside():
    # Two runs of 2 floats, 1 float apart in global memory; a block between them is not written.
    with pytest.raises(EmulatorError, match=r"reads UB\+32, which nothing has written"):
        pad(5, 2, 8, 4, 1, 1, 0, 6, out=24)
    assert pad(5, 2, 8, 4, 0, 1, 0, 6, out=16) == [1, 2, *[9] * 6, 4, 5, *[9] * 6]


def test_bytes_behind_the_data_are_undefined_without_padding():
    assert pad(3, 1, 12, 0, 0, 0, 0, 0, out=3) == [1, 2, 3]
    with pytest.raises(EmulatorError, match=r"reads UB\+12, which nothing has written"):
        pad(3, 1, 12, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("p", "text"),
    [
        ((4096, 4, 0, 0, 0, 0, 0), "blockCount = 4096: at most 4095"),
        ((1, 2097152, 0, 0, 0, 0, 0), "blockLen = 2097152: at most 2097151"),
        ((1, 6, 0, 0, 0, 0, 0), "not a multiple of the element size"),
        ((1, 4, 0, 0, 1, 9, 0), "leftPadding in bytes = 36: at most 32"),
        ((1, 24, 0, 0, 0, 0, 0), "elements 0 to 6 of a GlobalTensor of 5"),
    ],
)
def test_pad_refuses_parameters_out_of_range(p, text):
    with pytest.raises(EmulatorError, match=text):
        pad(5, *p)
