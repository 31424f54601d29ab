# SPDX-License-Identifier: Apache-2.0
"""A vector kernel from end to end: right sums, exact counters, and every mistake is named."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from npu_ops.emulator import EmulatorError, In, Out, build

KERNELS = Path(__file__).parent / "kernels"


@pytest.fixture(scope="module")
def library():
    return build(KERNELS / "add.cpp", ["add_kernel"])


def add(library, count, mistake=0, **options):
    rng = np.random.default_rng(count)
    x, y = rng.normal(size=(2, count)).astype(np.float32)
    z = np.full(count, 7, np.float32)
    arguments = [In("x", x), In("y", y), Out("z", z)]
    numbers = [ctypes.c_uint32(count), ctypes.c_int32(mistake)]
    counters = library.launch("add_kernel", [*arguments, *numbers], **({"blocks": 3} | options))
    np.testing.assert_array_equal(z, x + y)
    return counters


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 3, 20, 24])
@pytest.mark.parametrize("count", [1, 255, 256, 1000, 5001])
def test_add_is_exact_at_every_size_and_core_count(library, count, blocks, strict):
    counters = add(library, count, blocks=blocks, strict=strict)
    assert counters["unwritten_bytes"]["z"] == 0


def test_kernel_compiles_without_warnings(library):
    assert library.warnings == ""


def test_order_of_the_cores_does_not_matter(library):
    assert add(library, 5001) == add(library, 5001, backwards=True)


def test_counters_are_the_kernels_bytes_and_instructions(library):
    counters = add(library, 1000, blocks=2)
    assert counters["read_bytes"] == {"x": 4000, "y": 4000, "z": 0}
    assert counters["written_bytes"] == {"x": 0, "y": 0, "z": 4000}
    # 4 tiles: two copies in, one Add of 256, 256, 256 and 232 floats, one copy out.
    issued = {pipe: n for pipe, n in counters["instructions"].items() if n}
    assert issued == {"V": 4, "MTE2": 8, "MTE3": 4}
    assert counters["vector_repeats"] == 16
    assert counters["peak"]["UB"] == 6 * 1024


@pytest.mark.parametrize(
    ("mistake", "texts"),
    [
        (1, ["InitBuffer(TQue)", "UB overflow", "188160", "shrink the tiles"]),
        (2, ["DataCopyPad", "of a GlobalTensor of 231 elements"]),
        (3, ["Add", "reads UB+3068, which nothing has written"]),
        (4, ["Add", "not aligned to 32 bytes"]),
        (5, ["Add", "overlap in part"]),
        (6, ["Add", "after FreeTensor"]),
        (7, ["LocalTensor.SetValue", "WAW hazard", "Add on pipe V", "HardEvent::V_S"]),
        (8, ["Adds", "RAW hazard", "PipeBarrier<PIPE_V>"]),
        (9, ["pipe MTE3, DataCopyPad", "RAW hazard", "HardEvent::V_MTE3"]),
        (10, ["FreeTensor", "never put into the queue"]),
        (11, ["Muls", "between EnQue and DeQue"]),
        (12, ["DeQue", "queue is empty"]),
        (13, ["of a tensor of 1024 bytes"]),
        (14, ["Adds", "WAR hazard", "DataCopyPad on pipe MTE3", "HardEvent::MTE3_V"]),
        (15, ["AllocTensor", "all 2 buffers", "hang"]),
        (16, ["kernel end", "SetFlag<HardEvent::V_MTE3>(3) was never waited for"]),
        (17, ["WaitFlag<HardEvent::MTE3_V>(4) without SetFlag", "hang"]),
        (18, ["HardEvent::MTE1_M does not exist on a vector core"]),
        (19, ["event id 6 is reserved"]),
        (20, ["writes to x, which is an input"]),
    ],
)
def test_mistake_is_named_with_core_and_cure(library, mistake, texts):
    with pytest.raises(EmulatorError) as caught:
        add(library, 1000, mistake, blocks=1)
    message = str(caught.value)
    assert message.startswith("add_kernel: AIV core 0, pipe ")
    for text in texts:
        assert text in message


def test_tensor_that_is_never_freed_is_found_at_the_end(library):
    with pytest.raises(EmulatorError, match=r"kernel end .*UB\+4096 was never freed"):
        add(library, 200, 15, blocks=1)


@pytest.mark.parametrize("mistake", [7, 8])
def test_default_mode_adds_what_the_compiler_adds(library, mistake):
    x = np.ones(8, np.float32)
    z = np.zeros(8, np.float32)
    numbers = [ctypes.c_uint32(8), ctypes.c_int32(mistake)]
    arguments = [In("x", x), In("y", x), Out("z", z), *numbers]
    library.launch("add_kernel", arguments, blocks=1, strict=False)
    assert z[1] == (2 if mistake == 7 else 3)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ([ctypes.c_uint64(8)], {}, "argument 3 has 4 bytes, the launch gives 8"),
        ([], {}, "takes 5 arguments, the launch gives 3"),
        ([], {"blocks": 0}, "blocks 0: 1 to 64"),
        ([], {"kind": "gpu"}, "kind 'gpu'"),
    ],
)
def test_launch_refuses_arguments_that_do_not_fit(library, arguments, options, text):
    x = np.ones(8, np.float32)
    tensors = [In("x", x), In("y", x), Out("z", x)]
    values = [*tensors, *arguments, *([ctypes.c_int32(0)] if arguments else [])]
    with pytest.raises(EmulatorError, match=text):
        library.launch("add_kernel", values, **({"blocks": 1} | options))


def test_compiler_errors_come_back_as_text(tmp_path):
    source = tmp_path / "broken.cpp"
    source.write_text('#include "kernel_operator.h"\nvoid f() { AscendC::NoSuchName(); }\n')
    with pytest.raises(EmulatorError, match="NoSuchName"):
        build(source, ["f"])
