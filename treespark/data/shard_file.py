# SPDX-License-Identifier: Apache-2.0
"""Parts of the tensors of a safetensors file, read without mapping it into memory.

A page of a mapped file that is truncated or cannot be read ends the process (SIGBUS) when it is
looked at; a read gives an error that can be named. The header is JSON behind its length in 8 bytes:
name -> dtype, shape, and where the data begins and ends behind the header.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.int32: "I32",
}


@dataclass(frozen=True)
class ShardFile:
    """A file of `num_bytes` whose tensors begin at these bytes."""

    path: Path
    num_bytes: int
    begins: dict[str, int]

    @classmethod
    def open(
        cls,
        path: Path,
        num_bytes: int,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    ) -> ShardFile:
        """Read the header of a file that should have this size and these tensors.

        tensors: name -> dtype and shape behind the first dimension.  Raises OSError where the file
        cannot be read and ValueError, saying why, where it is not like that.
        """
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != num_bytes:
                raise ValueError(f"{size} bytes, should be {num_bytes} bytes")
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, size)))
        begins = {}
        for name, (dtype, shape) in tensors.items():
            try:
                found = header[name]
                first, last = found["data_offsets"]
                is_right = found["dtype"] == _DTYPES[dtype] and found["shape"][1:] == [*shape]
                is_right &= last - first == found["shape"][0] * _row_bytes(dtype, shape)
                is_right &= first >= 0 and 8 + length + last <= size
            except (KeyError, TypeError, ValueError, IndexError):
                is_right = False
            if not is_right:
                raise ValueError(f"its header has no {name} as it should be")
            begins[name] = 8 + length + first
        return cls(path, num_bytes, begins)

    def read(
        self,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        starts: Mapping[str, int],
        counts: Mapping[str, int],
    ) -> dict[str, torch.Tensor]:
        """Return rows starts[name] .. starts[name] + counts[name] - 1 of each tensor.

        Raises OSError where the file cannot be read, and ValueError where it ends before.
        """
        rows = {}
        with self.path.open("rb") as file:
            for name, (dtype, shape) in tensors.items():
                rows[name] = torch.empty(counts[name], *shape, dtype=dtype)
                file.seek(self.begins[name] + starts[name] * _row_bytes(dtype, shape))
                target = rows[name].view(torch.uint8).numpy()
                if file.readinto(target) != target.nbytes:
                    size = os.fstat(file.fileno()).st_size
                    raise ValueError(f"{size} bytes, should be {self.num_bytes} bytes")
        return rows


def _row_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)
