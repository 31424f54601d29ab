# SPDX-License-Identifier: Apache-2.0
"""The cube unit, and a cube core that feeds two vector cores through a ring in global memory."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from npu_ops.emulator import EmulatorError, In, Out, Workspace, build

KERNELS = Path(__file__).parent / "kernels"


class CubeCase(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("m", "n", "k", "transposed", "tiles", "mistake")
    )


@pytest.fixture(scope="module")
def library():
    return build(KERNELS / "cube.cpp", ["product_kernel", "ring_kernel"])


def operands(m, n, k):
    # Whole numbers so small that every sum is exact, in any order.
    rng = np.random.default_rng(m * n + k)
    return (rng.integers(-4, 5, shape).astype(np.float16) for shape in ((m, k), (n, k)))


def product(library, m, n, k, transposed=0, mistake=0):
    a, b = operands(m, n, k)
    out = np.zeros((m, n), np.float32)
    stored = np.ascontiguousarray(b.T) if transposed else b
    case = CubeCase(m, n, k, transposed, 1, mistake)
    tensors = [In("a", a), In("b", stored), Out("out", out)]
    counters = library.launch("product_kernel", [*tensors, case], blocks=1, kind="aic")
    return out, a.astype(np.float32) @ b.astype(np.float32).T, counters


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("shape", [(16, 16, 16), (48, 64, 128), (33, 40, 32), (2, 7, 16)])
def test_product_is_exact_in_whole_and_part_fractals(library, shape, transposed):
    out, expected, counters = product(library, *shape, transposed)
    np.testing.assert_array_equal(out, expected)
    assert counters["macs"] == np.prod(shape)
    assert counters["unwritten_bytes"]["out"] == 0


def test_counters_of_a_product(library):
    _, _, counters = product(library, 33, 40, 32)
    assert counters["read_bytes"] == {"a": 33 * 64, "b": 40 * 64, "out": 0}
    assert counters["written_bytes"]["out"] == 33 * 40 * 4
    issued = {pipe: n for pipe, n in counters["instructions"].items() if n}
    assert issued == {"M": 1, "MTE1": 4, "MTE2": 2, "FIX": 1}
    peak = {"L1": 48 * 64 * 2, "L0A": 48 * 64, "L0B": 48 * 64, "L0C": 48 * 48 * 4}
    assert {memory: n for memory, n in counters["peak"].items() if n} == peak


def test_second_product_adds_to_the_first(library):
    out, expected, _ = product(library, 16, 16, 32, mistake=13)
    np.testing.assert_array_equal(out, 2 * expected)


@pytest.mark.parametrize(("shape", "mistake"), [((32, 16, 32), 4), ((16, 16, 16), 5)])
def test_wrong_fractals_give_a_wrong_product(library, shape, mistake):
    out, expected, _ = product(library, *shape, transposed=1, mistake=mistake)
    assert (out != expected).any()


@pytest.mark.parametrize(
    ("mistake", "texts"),
    [
        (1, ["pipe MTE1, LoadData", "RAW hazard at L1+0", "MTE2_MTE1"]),
        (2, ["pipe M, Mmad", "RAW hazard at L0A+0", "MTE1_M"]),
        (3, ["pipe FIX, Fixpipe", "RAW hazard at L0C+0", "M_FIX"]),
        (6, ["srcStride = 15 is less than mSize = 16"]),
        (7, ["quantPre = 1 does not fit"]),
        (8, ["dst at L0C+256 is not aligned to 1024"]),
        (9, ["L0A overflow", "65536"]),
        (10, ["m = 1 switches the cube to GEMV"]),
        (11, ["Mmad", "reads L0C+0, which nothing has written"]),
        (12, ["RAW hazard at L0C+0", "PipeBarrier<PIPE_M>"]),
    ],
)
def test_mistake_on_the_cube_is_named(library, mistake, texts):
    with pytest.raises(EmulatorError) as caught:
        product(library, 16, 16, 32, mistake=mistake)
    assert str(caught.value).startswith("product_kernel: AIC core 0, pipe ")
    for text in texts:
        assert text in str(caught.value)


def ring(library, blocks, tiles, mistake=0, **options):
    m, n, k = 16, 24, 32
    rng = np.random.default_rng(tiles)
    a = rng.integers(-4, 5, (blocks * tiles, m, k)).astype(np.float16)
    b = rng.integers(-4, 5, (n, k)).astype(np.float16)
    out = np.zeros((blocks * tiles, m, n), np.float32)
    tensors = [
        *(In("a", a), In("b", b)),
        Workspace("ring", np.zeros((blocks, 2, m, n), np.float32)),
        Out("out", out),
    ]
    case = CubeCase(m, n, k, 0, tiles, mistake)
    kind = options.pop("kind", "mix_aic_1_2")
    counters = library.launch("ring_kernel", [*tensors, case], blocks=blocks, kind=kind, **options)
    np.testing.assert_array_equal(out, a.astype(np.float32) @ b.astype(np.float32).T + 1)
    return counters


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("blocks", [1, 3, 24])
def test_ring_between_cube_and_vector_cores(library, blocks, backwards):
    counters = ring(library, blocks, 5, backwards=backwards)
    moved = blocks * 5 * 16 * 24 * 4
    assert counters["written_bytes"]["ring"] == counters["read_bytes"]["ring"] == moved


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (20, "nothing has written|RAW hazard in global memory at ring"),
        (21, "(RAW|WAR) hazard in global memory at ring.*CrossCoreSetFlag<.., PIPE_FIX>"),
        (22, "deadlock in CrossCoreWaitFlag: AIC 0 of block 0 for flag 1"),
        (23, "ends with CrossCore flag 2 set 1 times more than waited for"),
        (24, "ends with CrossCore flag 0 set 1 times more"),
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_mistake_between_cores_is_named(library, mistake, text, backwards):
    with pytest.raises(EmulatorError, match=text):
        ring(library, 2, 5, mistake, backwards=backwards)


def test_kernel_type_has_to_be_the_launchs(library):
    with pytest.raises(EmulatorError, match="names kernel type 3, the launch 1"):
        ring(library, 1, 1, kind="aic")


def test_kernels_compile_without_warnings(library):
    assert library.warnings == ""
