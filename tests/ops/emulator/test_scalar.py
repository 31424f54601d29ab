# SPDX-License-Identifier: Apache-2.0
"""The scalar unit: its cache before global memory, its order with other pipes, event ids."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from npu_ops.emulator import EmulatorError, In, Out, build

KERNELS = Path(__file__).parent / "kernels"


@pytest.fixture(scope="module")
def library():
    return build(KERNELS / "scalar.cpp", ["scalar_kernel"])


def run(library, which, blocks=1, **options):
    x, y = np.arange(16, dtype=np.int32), np.zeros(64, np.int32)
    arguments = [In("x", x), Out("y", y), ctypes.c_int32(which)]
    counters = library.launch("scalar_kernel", arguments, blocks=blocks, **options)
    return y, counters


def test_lines_of_their_own_come_out_of_the_cache(library):
    y, counters = run(library, 0, blocks=3)
    assert y.tolist() == [i + block for block in range(3) for i in range(16)] + [0] * 16
    assert counters["written_bytes"]["y"] == 3 * 64
    assert counters["unwritten_bytes"]["y"] == 64
    # Each core reads the line of x once.
    assert counters["read_bytes"]["x"] == 3 * 64


def test_cleaned_line_is_read_again(library):
    y, _ = run(library, 4)
    assert y[:3].tolist() == [6, 7, 6]


@pytest.mark.parametrize(
    ("which", "blocks", "text"),
    [
        (1, 1, r"kernel end .*SetValue on y\+12 stayed in the scalar cache; call DataCacheClean"),
        (2, 2, "an AIV core of block 0 writes to the same 64-byte line.*is lost"),
        (3, 1, r"y\+0: the scalar cache holds an old copy .* DataCacheCleanAndInvalid"),
        (5, 1, "RAW hazard in global memory at y.*HardEvent::MTE3_S"),
        (6, 2, "WAW hazard in global memory at y.*CrossCoreSetFlag"),
        (7, 1, r"GetValue .*RAW hazard at UB\+0: DataCopy on pipe MTE2.*HardEvent::MTE2_S"),
        (8, 1, r"DataCopy .*RAW hazard at UB\+0: LocalTensor.SetValue on pipe S.*S_MTE3"),
        (10, 1, "flags between cores need a mixed kernel type"),
    ],
)
def test_mistake_is_named(library, which, blocks, text):
    with pytest.raises(EmulatorError, match=text):
        run(library, which, blocks)


def test_default_mode_orders_ub_but_not_global_memory(library):
    y, _ = run(library, 8, strict=False)
    assert y[0] == 9
    with pytest.raises(EmulatorError, match="RAW hazard in global memory"):
        run(library, 5, strict=False)


def test_event_ids_are_taken_and_given_back(library):
    y, _ = run(library, 9)
    # Taken: 0 and 1; 0 is free again.
    assert y[0] == 10


def test_kernel_compiles_without_warnings(library):
    assert library.warnings == ""
