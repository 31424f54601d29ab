# SPDX-License-Identifier: Apache-2.0
"""One JSON line per training step, continued cleanly after a resume."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

from treespark.data.jsonl import write_atomic

if TYPE_CHECKING:
    from pathlib import Path


class MetricsLog:
    """Appends {"step": n, ...} lines; a line is with the operating system when `add` returns.

    Lines of `first_step` and later, found on opening, belong to work that will be redone and go.
    Use as a context manager, or call `close`.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] < first_step]
        write_atomic(path, [_encode(line) for line in kept])
        self._file = path.open("ab")

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Write one line; numbers that are not finite become null, which JSON can say."""
        self._file.write(_encode({"step": step, **values}))
        self._file.flush()

    def sync(self) -> None:
        """Wait until every line is on the disk, as a checkpoint that counts on them needs."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file; a last line cut by a kill is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _encode(line: dict[str, Any]) -> bytes:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }
    return (json.dumps(finite) + "\n").encode()
