# SPDX-License-Identifier: Apache-2.0
"""AscendC kernels on a CPU: the same sources, built with g++, run under the rules of Ascend 910B.

`build` compiles a kernel source against `include/kernel_operator.h`, our own implementation of the
AscendC names we use; `Library.launch` runs it on NumPy arrays and returns what it moved and issued.
A mistake that a card would answer with garbage, a hang or nothing at all raises `EmulatorError`,
which names kernel, core, pipe, instruction, address and what to do. See README.md.
"""

from npu_ops.emulator.build import build
from npu_ops.emulator.launch import EmulatorError, In, InOut, Library, Out, Workspace

__all__ = ["EmulatorError", "In", "InOut", "Library", "Out", "Workspace", "build"]
