# SPDX-License-Identifier: Apache-2.0
"""Lets `torch.ops.treespark.*` run the emulated kernels on CPU tensors, as they would on a card."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from npu_ops.emulator import operators

NAMES = ("markov_topk", "tree_attention", "pack_tree")
# Weights that a CPU holds in an order of its own have a key of their own.
KEYS = ("CPU", "MkldnnCPU")


@contextmanager
def emulated(*, blocks: int = 20, strict: bool = True) -> Iterator[Counter]:
    """Within, the operators of CPU tensors are their emulated kernels; yields calls per operator.

    The operators have to be defined: import npu_ops before.  blocks, strict: see `Library.launch`.
    What a kernel does not take, such as float32, raises there; nothing falls back.
    """
    calls: Counter = Counter()
    library = torch.library.Library("treespark", "IMPL")
    try:
        for name in NAMES:
            kernel = _counted(name, calls, blocks, strict)
            for key in KEYS:
                library.impl(name, kernel, key, allow_override=True)
        yield calls
    finally:
        library._destroy()


def _counted(name: str, calls: Counter, blocks: int, strict: bool) -> Callable[..., Any]:
    """Return the operator by its kernel."""
    kernel = getattr(operators, name)

    def run(*arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        plain = [_dense(argument) for argument in arguments]
        return kernel(*plain, **options, blocks=blocks, strict=strict).results

    return run


def _dense(argument: Any) -> Any:
    """Return a tensor in rows: a CPU may hold weights in an order of its own."""
    packed = isinstance(argument, Tensor) and argument.is_mkldnn
    return argument.to_dense() if packed else argument
