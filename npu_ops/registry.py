# SPDX-License-Identifier: Apache-2.0
"""Registers the operators with torch and knows which implementation of each is active.

An operator is one `OpSpec`. Its schema is written in Python, once. The reference serves every
device; a fast form is registered for the dispatch keys it is made for, and the kernel library, a
shared object in npu_ops/lib, adds PrivateUse1 (an NPU) and nothing else. Which one runs is the
dispatcher's decision by the key of the tensors, never an `if`.

TREESPARK_OPS: auto takes the best there is; reference leaves fast forms and library out; kernel
makes every call fail that no kernel serves. TREESPARK_CHECK=1: fast forms also check values, which
waits for the device.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import sys
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

NAMESPACE = "treespark"
MODES = ("auto", "reference", "kernel")
LIBRARY = Path(__file__).parent / "lib" / "libtreespark_ops.so"
# What `status` reports: kind of device and the dispatch key of its plain tensors.
DEVICE_KEYS = {"cpu": "CPU", "cuda": "CUDA", "npu": "PrivateUse1"}
# The reference under this key serves any device that has nothing of its own.
_ANY_DEVICE = "CompositeExplicitAutograd"
# Made of other operators: the dispatcher decomposes it, also for autograd and tracing.
_DECOMPOSED = "CompositeImplicitAutograd"

MODE = os.environ.get("TREESPARK_OPS", "auto")
if MODE not in MODES:
    raise ValueError(f"TREESPARK_OPS={MODE}: allowed: {', '.join(MODES)}")
CHECK_VALUES = os.environ.get("TREESPARK_CHECK") == "1"

_DEFINITIONS = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True)
class OpSpec:
    """One operator.

    name: with overload, if it has one.  schema: arguments and results, "(Tensor a) -> Tensor".
    reference: plain PyTorch, obeys the full contract on every device.  fake: shapes and dtypes of
    the results; None for an operator made of other operators, whose `reference` is that.
    fast: dispatch key -> faster implementation.  backward and setup_context: as
    torch.library.register_autograd takes them; None where a backward pass has to fail.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any] | None = None
    fast: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    backward: Callable[..., Any] | None = None
    setup_context: Callable[..., None] | None = None

    @property
    def qualified_name(self) -> str:
        """`treespark::name`, as the dispatcher knows it."""
        return f"{NAMESPACE}::{self.name}"


@dataclass
class _Kernels:
    """The kernel library: loaded or not, why not, whether that was said, and what it is of."""

    reason: str | None
    told: bool = False
    build: dict[str, str] = field(default_factory=dict)


def _absent() -> str:
    """Say where the library would be."""
    place = LIBRARY.relative_to(LIBRARY.parents[2])
    return f"no kernels built: {place} is missing"


def _initial_reason() -> str:
    if MODE == "reference":
        return "TREESPARK_OPS=reference"
    return "not loaded: torch_npu is not imported" if LIBRARY.exists() else _absent()


_kernels = _Kernels(_initial_reason())
_specs: list[OpSpec] = []


def load_library() -> str | None:
    """Load the kernel library, once torch_npu is imported; return None, or why there is none.

    Nothing is loaded with TREESPARK_OPS=reference, for another torch than the library was built
    with, or on another card than it is for. A second call changes nothing.
    """
    if _kernels.reason is None or MODE == "reference" or not LIBRARY.exists():
        return _kernels.reason
    try:
        _kernels.reason = _other_torch() or _load()
    except Exception as error:  # by CANN version: ImportError, OSError, RuntimeError
        message = " ".join(f"{type(error).__name__}: {error}".split())
        _kernels.reason = f"loading {LIBRARY.name} failed: {message}"
    return _kernels.reason


def _other_torch() -> str | None:
    """Read what the library was built with; return why it is not for this torch, or None."""
    record = LIBRARY.with_suffix(".json")
    if not record.exists():
        return None
    _kernels.build = json.loads(record.read_text(encoding="utf-8"))
    # torch keeps its binary interface within a minor version.
    built, here = _kernels.build["torch"], torch.__version__
    if built.split(".")[:2] == here.split(".")[:2]:
        return None
    return f"{LIBRARY.name} is for torch {built}, this is {here}: run bash npu_ops/build.sh again"


def _load() -> str | None:
    """Load the library; return why it registers nothing on this card, or None."""
    importlib.import_module("torch_npu")
    torch.ops.load_library(str(LIBRARY))
    refusal = ctypes.CDLL(str(LIBRARY)).treespark_ops_refusal
    refusal.restype = ctypes.c_char_p
    return refusal().decode() or None


def register(spec: OpSpec) -> OpSpec:
    """Define the operator and register what TREESPARK_OPS allows of it; returns the spec."""
    _DEFINITIONS.define(spec.name + spec.schema, tags=(torch.Tag.pt2_compliant_tag,))
    if spec.fake is None:
        _DEFINITIONS.impl(spec.name, spec.reference, _DECOMPOSED)
        return spec
    stand_in = _refusal(spec) if MODE == "kernel" else _announced(spec)
    _DEFINITIONS.impl(spec.name, _without_autocast(stand_in), _ANY_DEVICE)
    for key, implementation in spec.fast.items() if MODE == "auto" else ():
        _DEFINITIONS.impl(spec.name, _without_autocast(implementation), key)
    torch.library.register_fake(spec.qualified_name, spec.fake, lib=_DEFINITIONS)
    torch.library.register_autograd(
        spec.qualified_name,
        spec.backward or _no_gradient(spec),
        setup_context=spec.setup_context,
        lib=_DEFINITIONS,
    )
    _specs.append(spec)
    if "torch_npu" in sys.modules:
        load_library()
    return spec


def has_kernel(name: str, device: torch.device | str) -> bool:
    """Whether an own kernel, not a torch implementation, serves the operator on this device.

    device: or its kind, which torch itself knows only once torch_npu is imported.
    """
    kind = device if isinstance(device, str) else device.type
    if kind not in ("npu", "privateuseone"):
        return False
    name = f"{NAMESPACE}::{name}"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, DEVICE_KEYS["npu"]))


def missing_kernels(kind: str) -> str | None:
    """With TREESPARK_OPS=kernel why a kind of device cannot be used, else None."""
    lacking = [spec.name for spec in _specs if not has_kernel(spec.name, kind)]
    if MODE != "kernel" or not lacking:
        return None
    return f"no kernel of {', '.join(lacking)} for {kind} ({_why_no_kernel(kind)})"


def status() -> dict[str, Any]:
    """Return what is active and why, for `treespark ops` and bug reports.

    mode: TREESPARK_OPS.  library: path of the kernel library, or None, with `reason`.  build: soc,
    cann, torch and torch_npu it was built with, as far as known.  operators: a row each with
    `operator`, `schema` and `devices`: per kind of device `active`, one of kernel, fast (torch,
    made for that device), reference (torch, any device), refused; and `reason`, why it is nothing
    better, or None.
    """
    return {
        "mode": MODE,
        "library": str(LIBRARY) if _kernels.reason is None else None,
        "reason": _kernels.reason,
        "build": _kernels.build,
        "operators": [
            {
                "operator": spec.name,
                "schema": spec.name + spec.schema,
                "devices": {kind: _active(spec, kind) for kind in DEVICE_KEYS},
            }
            for spec in _specs
        ],
    }


def _active(spec: OpSpec, kind: str) -> dict[str, str | None]:
    if has_kernel(spec.name, kind):
        return {"active": "kernel", "reason": None}
    if MODE == "kernel":
        return {"active": "refused", "reason": _why_no_kernel(kind)}
    if MODE == "auto" and DEVICE_KEYS[kind] in spec.fast:
        return {"active": "fast", "reason": None}
    return {"active": "reference", "reason": _why_no_kernel(kind)}


def _why_no_kernel(kind: str) -> str:
    if kind != "npu":
        return "TREESPARK_OPS=reference" if MODE == "reference" else "kernels are for an NPU"
    return _kernels.reason or f"{LIBRARY.name} does not have it"


def _without_autocast(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation with the dtypes of its arguments, also inside an autocast region."""

    @wraps(implementation)
    def run(*args: Any, **kwargs: Any) -> Any:
        kind = args[0].device.type
        if not torch.is_autocast_enabled(kind):
            return implementation(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return implementation(*args, **kwargs)

    return run


def _no_gradient(spec: OpSpec) -> Callable[..., Any]:
    """A backward that fails: torch on its own would only warn, and leave the gradient out."""

    def backward(*_: Any) -> Any:
        raise RuntimeError(f"{spec.name} has no gradient")

    return backward


def _announced(spec: OpSpec) -> Callable[..., Any]:
    """The reference, which says once that it stands in for a kernel where one could be."""

    @wraps(spec.reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _kernels.told and args[0].device.type not in ("cpu", "cuda", "meta"):
            _kernels.told = True
            kind = args[0].device.type
            logger.warning("operators run as their references on %s: %s", kind, _kernels.reason)
        return spec.reference(*args, **kwargs)

    return run


def _refusal(spec: OpSpec) -> Callable[..., Any]:
    """What stands in for a kernel with TREESPARK_OPS=kernel: an error with the reason."""

    def refuse(*args: Any, **_: Any) -> Any:
        kind = args[0].device.type
        # torch calls the device of PrivateUse1 by another name until torch_npu has renamed it.
        reason = _why_no_kernel(kind if kind in ("cpu", "cuda") else "npu")
        raise RuntimeError(f"TREESPARK_OPS=kernel: {spec.name} has no kernel for {kind}: {reason}")

    return refuse
