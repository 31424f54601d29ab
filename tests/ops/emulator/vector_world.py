# SPDX-License-Identifier: Apache-2.0
"""Runs single vector instructions of kernels/vector.cpp for the tests."""

import ctypes
from functools import cache
from pathlib import Path

from npu_ops.emulator import In, Out, build

KERNELS = Path(__file__).parent / "kernels"
# Number of each case in kernels/vector.cpp.
NAMES = {
    "add_half": 0,
    "add_lanes": 1,
    "to_half": 2,
    "to_bfloat16": 3,
    "from_bfloat16": 4,
    "to_int": 5,
    "max": 6,
    "index": 7,
    "duplicate_lanes": 8,
    "shift_left": 9,
    "compare": 10,
    "select": 11,
    "gather": 12,
    "gather_pattern": 13,
    "brcb": 14,
    "gather_bits": 15,
    "compare_int": 16,
    "reduce_max": 20,
    "reduce_sum": 21,
    "whole_max": 22,
    "sort32": 23,
    "merge": 24,
    "whole_sum": 25,
}


class VectorCase(ctypes.Structure):
    """Mirrors VectorCase of kernels/vector.cpp."""

    _fields_ = (
        ("which", ctypes.c_int32),
        ("a_bytes", ctypes.c_uint32),
        ("b_bytes", ctypes.c_uint32),
        ("out_bytes", ctypes.c_uint32),
        ("p", ctypes.c_int32 * 6),
        ("f", ctypes.c_float),
    )


@cache
def library():
    return build(KERNELS / "vector.cpp", ["vector_case", "pad_case"])


def run(name, a, b, out, *p, f=0.0):
    """Run one instruction; `out` gets the first bytes of the result, which was 0 before."""
    case = VectorCase(
        NAMES[name],
        a.nbytes,
        0 if b is None else b.nbytes,
        out.nbytes,
        (ctypes.c_int32 * 6)(*p),
        f,
    )
    tensors = [In("a", a), None if b is None else In("b", b), Out("out", out)]
    library().launch("vector_case", [*tensors, case], blocks=1)
    return out
