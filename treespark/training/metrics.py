# SPDX-License-Identifier: Apache-2.0
"""One JSON line per training step, continued cleanly after a resume."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


class MetricsLog:
    """Appends {"step": n, ...} lines; lines at or after `first_step` belong to work that will be
    redone.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(path) if line["step"] < first_step]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a")

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Write one line."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def flush(self) -> None:
        """Hand everything written to the operating system."""
        self._file.flush()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file; a last line cut by a kill is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
