# SPDX-License-Identifier: Apache-2.0
"""Launches a compiled kernel on NumPy arrays and reads its counters."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Orders of the enumerations in include/emulator/types.h and machine.h.
PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
MEMORIES = ("UB", "L1", "L0A", "L0B", "L0C", "BT", "FB")
KINDS = {"aiv": 0, "aic": 1, "mix_aiv_1_0": 2, "mix_aic_1_2": 3}
_MAX_BLOCKS = 64


class EmulatorError(RuntimeError):
    """A kernel broke a rule of the device, or could not be built or launched."""


@dataclass(frozen=True)
class In:
    """A tensor in global memory that the kernel only reads."""

    name: str
    array: np.ndarray
    role = 0


@dataclass(frozen=True)
class Out(In):
    """A tensor that the kernel writes; reading it before is an error."""

    role = 1


@dataclass(frozen=True)
class InOut(In):
    """A tensor with contents that the kernel changes."""

    role = 2


@dataclass(frozen=True)
class Workspace(In):
    """Scratch in global memory: like Out, but nobody expects it to be filled."""

    role = 3


Value = In | ctypes.Structure | ctypes._SimpleCData | None
"""A tensor, a tiling structure or number passed by value, or None for a null pointer."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("item_bytes", ctypes.c_uint32),
        ("role", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("kind", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("strict", ctypes.c_int32),
        ("num_tensors", ctypes.c_int32),
        ("tensors", ctypes.POINTER(_Tensor)),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("argument_bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("num_arguments", ctypes.c_int32),
        ("backwards", ctypes.c_int32),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("error", ctypes.c_char * 2048),
        ("instructions", ctypes.c_uint64 * 8),
        ("peak", ctypes.c_uint64 * 8),
        ("vector_repeats", ctypes.c_uint64),
        ("macs", ctypes.c_uint64),
        ("read_bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("written_bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("unwritten_bytes", ctypes.POINTER(ctypes.c_uint64)),
    )


class Library:
    """Compiled kernels of one source.

    warnings: what the compiler said.
    """

    def __init__(self, path: Path, warnings: str) -> None:
        self.path = path
        self.warnings = warnings
        self._library = ctypes.CDLL(str(path))

    def function(self, name: str) -> ctypes._CFuncPtr:
        """Return a function of the host's part."""
        return getattr(self._library, name)

    def launch(
        self,
        kernel: str,
        arguments: Sequence[Value],
        *,
        blocks: int,
        kind: str = "aiv",
        strict: bool = True,
        backwards: bool = False,
    ) -> dict:
        """Run a kernel on `blocks` emulated cores and return its counters.

        arguments: in the kernel's order. Arrays are C-contiguous and changed in place.
        kind: "aiv", "aic", "mix_aiv_1_0" or "mix_aic_1_2" (one cube and two vector cores a block).
        strict: no synchronisation but the kernel's own; False adds what the compiler adds by
        default.  backwards: the last core runs first.

        Returns instructions (per pipe), vector_repeats (of 256 bytes), macs (multiply-adds of the
        cube), peak (bytes allocated per memory, of the core that has most), and per tensor
        read_bytes, written_bytes and unwritten_bytes.
        Raises EmulatorError for a rule of the device that the kernel broke.
        """
        if not hasattr(self._library, f"emu_run_{kernel}"):
            raise EmulatorError(f"{self.path.name} has no kernel {kernel}; name it in build()")
        if kind not in KINDS:
            raise EmulatorError(f"kind {kind!r}: one of {', '.join(KINDS)}")
        if not 1 <= blocks <= _MAX_BLOCKS:
            raise EmulatorError(f"blocks {blocks}: 1 to {_MAX_BLOCKS}")
        tensors = [argument for argument in arguments if isinstance(argument, In)]
        placed = _place_all(tensors)
        values = [_by_value(argument, placed) for argument in arguments]
        launch = _Launch(
            kernel=kernel.encode(),
            kind=KINDS[kind],
            blocks=blocks,
            strict=strict,
            num_tensors=len(tensors),
            tensors=_described(tensors, placed),
            arguments=(ctypes.c_void_p * len(values))(*map(ctypes.addressof, values)),
            argument_bytes=(ctypes.c_uint64 * len(values))(*map(ctypes.sizeof, values)),
            num_arguments=len(values),
            backwards=backwards,
        )
        per_tensor = [(ctypes.c_uint64 * max(len(tensors), 1))() for _ in range(3)]
        report = _Report()
        report.read_bytes, report.written_bytes, report.unwritten_bytes = per_tensor
        run = getattr(self._library, f"emu_run_{kernel}")
        if run(ctypes.byref(launch), ctypes.byref(report)):
            raise EmulatorError(report.error.decode(errors="replace"))
        for tensor in tensors:
            if tensor.role != In.role and placed[tensor.name] is not tensor.array:
                tensor.array[...] = placed[tensor.name]
        return _counters(report, list(placed), per_tensor)


def _place_all(tensors: Sequence[In]) -> dict[str, np.ndarray]:
    """Return the arrays as the kernel gets them, by name."""
    placed = {tensor.name: _place(tensor) for tensor in tensors}
    if len(placed) < len(tensors):
        names = ", ".join(tensor.name for tensor in tensors)
        raise EmulatorError(f"two tensors of the launch have one name: {names}")
    return placed


def _described(tensors: Sequence[In], placed: dict[str, np.ndarray]) -> ctypes.Array:
    """Return the table of tensors that the runtime checks accesses against."""
    rows = (
        _Tensor(
            placed[tensor.name].ctypes.data,
            tensor.array.nbytes,
            tensor.array.itemsize,
            tensor.role,
            tensor.name.encode(),
        )
        for tensor in tensors
    )
    return (_Tensor * len(tensors))(*rows)


def _by_value(argument: Value, placed: dict[str, np.ndarray]) -> ctypes._SimpleCData:
    """Return what the kernel function takes for an argument: addresses for tensors."""
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, In):
        return ctypes.c_void_p(placed[argument.name].ctypes.data)
    return argument


def _counters(report: _Report, names: list[str], per_tensor: list) -> dict:
    """Return the counters of a launch as `Library.launch` describes them."""
    read, written, unwritten = (dict(zip(names, counter, strict=False)) for counter in per_tensor)
    return {
        "instructions": dict(zip(PIPES, report.instructions, strict=False)),
        "vector_repeats": report.vector_repeats,
        "macs": report.macs,
        "peak": dict(zip(MEMORIES, report.peak, strict=False)),
        "read_bytes": read,
        "written_bytes": written,
        "unwritten_bytes": unwritten,
    }


def _place(tensor: In) -> np.ndarray:
    """Return the array, or a copy that starts at a cache line, as tensors on a card do."""
    array = tensor.array
    if not array.flags.c_contiguous:
        raise EmulatorError(f"tensor {tensor.name} of the launch is not contiguous")
    if array.ctypes.data % 64 == 0:
        return array
    buffer = np.empty(array.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
