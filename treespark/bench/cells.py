# SPDX-License-Identifier: Apache-2.0
"""Finished parts of a long measurement in a JSONL file, so that it goes on after a kill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treespark.data.jsonl import JsonlAppender
from treespark.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    Row = dict[str, Any]


class Cells:
    """The rows of a file by their `id`; its first row says of which setting they are.

    Raises UsageError for a file of another setting, and while another process writes it.
    """

    def __init__(self, path: Path, setting: Row) -> None:
        self._file = JsonlAppender(path)
        try:
            self._rows = {row["id"]: row for row in self._file.rows}
            first = {"id": "setting", **setting}
            known = self._rows.setdefault("setting", first)
            other = sorted(name for name in first if known.get(name) != first[name])
            if other:
                raise UsageError(
                    f"{path}: measured with another {', '.join(other)}; choose another --out"
                )
            if not self._file.rows:
                self._file.append([first])
        except BaseException:
            self._file.close()
            raise

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> Row:
        return self._rows[name]

    def add(self, row: Row) -> None:
        """Keep one row; it is on the disk when this returns."""
        self._file.append([row])
        self._rows[row["id"]] = row

    def __enter__(self) -> Cells:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
