# SPDX-License-Identifier: Apache-2.0
"""Rules of buffers, queues and copies: each broken one ends the launch with its reason."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from npu_ops.emulator import EmulatorError, In, Out, build

KERNELS = Path(__file__).parent / "kernels"


@pytest.fixture(scope="module")
def library():
    return build(KERNELS / "rules.cpp", ["rules_kernel"])


def run(library, which):
    x, y = np.arange(64, dtype=np.float32), np.full(64, -1, np.float32)
    library.launch("rules_kernel", [In("x", x), Out("y", y), ctypes.c_int32(which)], blocks=1)
    return y


@pytest.mark.parametrize(
    ("which", "text"),
    [
        (0, r"InitBuffer\(TBuf\).*65 buffers; a TPipe has at most 64"),
        (1, "one TPipe at a time"),
        (2, "L1 is not on a vector core"),
        (3, r"TBuf of 256 bytes: \[0, 260\) is not inside"),
        (4, r"LocalTensor\[65\]: the tensor has 64 elements"),
        (5, "Duplicate .*dst was never allocated; InitBuffer"),
        (6, "writes bytes 0 to 260 of a tensor of 256 bytes at UB"),
        (7, "count = -1: must not be negative"),
        (8, "writes bytes 0 to 36 of a tensor of 32 bytes"),
        (9, "give at least 1 of 32"),
        (10, "EnQue .*the queue of depth 1 is full"),
        (11, "does not come from this TQue"),
        (12, "the tensor is in the queue already"),
        (13, "the tensor was freed already"),
        (14, "8 tensors of this TPosition are allocated already"),
        (15, "AllocTensor .*the TQue was not initialised"),
        (16, "put into a TQue and never taken"),
        (20, "7 elements is 28 bytes, not a multiple of 32; use DataCopyPad"),
        (21, r"local tensor at UB\+772 is not aligned to 32 bytes"),
        (22, "elements 0 to 8 of a GlobalTensor of 4 elements"),
        (23, r"WAW hazard at UB\+800.*PipeBarrier<PIPE_MTE2>"),
        (24, "belongs to no argument of the launch"),
        (25, "writes to x, which is an input"),
        (26, r"reads y\+0 in global memory, which nothing has written"),
        (27, "blockCount = 4096: at most 4095"),
    ],
)
def test_broken_rule_is_named(library, which, text):
    with pytest.raises(EmulatorError, match=text):
        run(library, which)


def test_strides_of_a_block_copy(library):
    # Elements 0..15, then after a block of 8 elements 24..39; out with a block between the rows.
    rows = [*range(16), *[-1] * 8, *range(24, 40)]
    assert run(library, 28).tolist() == [*rows, *[-1] * 24]


def test_kernel_compiles_without_warnings(library):
    assert library.warnings == ""
