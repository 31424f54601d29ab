# SPDX-License-Identifier: Apache-2.0
"""What every operator demands of its tensors, said in the same words everywhere.

The texts are part of the operators' contract: references, fast forms, fake forms and the kernels'
host code raise them alike, as RuntimeError, which is what TORCH_CHECK raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
# What the kernels take is HALVES; the torch implementations compute in these as well.
FLOATS = (*HALVES, torch.float32, torch.float64)


def refuse(op: str, demand: str, got: object) -> NoReturn:
    """Raise RuntimeError `op: demand, got value`."""
    raise RuntimeError(f"{op}: {demand}, got {got}")


def check_shape(op: str, name: str, tensor: Tensor, letters: str, sizes: dict[str, int]) -> None:
    """Compare the shape with letters such as "B C"; a letter in `sizes` has to have that size."""
    names, shape = letters.split(), tensor.shape
    if len(names) == len(shape):
        for letter, size in zip(names, shape, strict=True):
            if sizes.get(letter, size) != size:
                break
        else:
            return
    known = [sizes.get(letter) for letter in names]
    wanted = ", ".join(
        letter if size is None or letter == str(size) else f"{letter}={size}"
        for letter, size in zip(names, known, strict=True)
    )
    refuse(op, f"{name} must be [{wanted}]", list(shape))


def check_dtype(op: str, name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Raise unless the dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        names = [str(dtype).removeprefix("torch.") for dtype in allowed]
        refuse(op, f"{name} must be {' or '.join(names)}", str(tensor.dtype).removeprefix("torch."))


def check_device(op: str, first: str, device: torch.device, **others: Tensor | None) -> None:
    """Raise unless all tensors are on `device`, that of the argument `first`."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != device:
            refuse(op, f"{name} must be on {device} as {first} is", tensor.device)


def check_contiguous(op: str, name: str, tensor: Tensor) -> None:
    """Raise unless the tensor is contiguous. An opaque tensor has no strides and passes."""
    if not tensor.is_mkldnn and not tensor.is_contiguous():
        refuse(op, f"{name} must be contiguous", f"strides {list(tensor.stride())}")


def check_range(op: str, name: str, tensor: Tensor, lowest: int, highest: int) -> None:
    """Raise unless lowest <= values <= highest. Waits for the device: references and debugging."""
    if tensor.numel():
        least, most = int(tensor.min()), int(tensor.max())
        if least < lowest or most > highest:
            wrong = least if least < lowest else most
            refuse(op, f"{name} must hold values in {lowest}..{highest}", wrong)
