# SPDX-License-Identifier: Apache-2.0
"""Writing the records of `treespark bench suite`: cell by cell, so that a kill costs one cell."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, BinaryIO

from treespark.bench.suite_records import (
    CELLS,
    REQUESTS,
    ROUNDS,
    SETTING,
    TRACES,
    RequestRow,
    RoundRow,
    TraceRow,
    complete_traces,
    read_cells,
    rows_of,
)
from treespark.bench.typed_rows import row_of
from treespark.data.jsonl import (
    JsonlAppender,
    encode,
    named_if_full,
    open_for_writing,
    parse_object,
    write_atomic,
    write_json_atomic,
)
from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from treespark.bench.suite_records import CellKey, CellRow, SuiteSetting


def write_setting(folder: Path, setting: SuiteSetting) -> None:
    """Write `suite.json`, as a whole or not at all."""
    write_json_atomic(folder / SETTING, asdict(setting))


class SuiteWriter:
    """Adds cells and traces to a run folder; what a kill left unfinished is cut off first.

    finished: cells that are there.  traced: complete traces that are there.
    Raises UsageError where another process writes there, a file has lost rows or has some that no
    kill leaves, and where the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # An appender locks a file that exists.
        (folder / CELLS).touch()
        self._cells = JsonlAppender(folder / CELLS)
        self._files: dict[str, BinaryIO] = {}
        self._traces: JsonlAppender | None = None
        try:
            cells = read_cells(folder / CELLS)
            self.finished = {cell.key for cell in cells}
            sizes = cells[-1].file_sizes if cells else {}
            for name, kind in ((REQUESTS, RequestRow), (ROUNDS, RoundRow)):
                self._files[name] = _open_at(folder / name, sizes.get(name, 0))
                _check_tail(self._files[name], folder / name, kind, self.finished)
            path = folder / TRACES
            traces = complete_traces(rows_of(path, TraceRow))
            # Nothing is cut off before all of it is known to be the trace of a kill.
            for stream in self._files.values():
                stream.truncate()
            if path.exists():
                write_atomic(path, (encode(asdict(row)) for trace in traces for row in trace))
            self.traced = {trace[0].key for trace in traces}
            self._traces = JsonlAppender(path)
        except BaseException:
            self.close()
            raise

    def add_cell(
        self, cell: CellRow, requests: Sequence[RequestRow], rounds: Sequence[RoundRow]
    ) -> None:
        """Write a finished cell with its requests and rounds; returns when they are on the disk."""
        sizes = {}
        for name, rows in ((REQUESTS, requests), (ROUNDS, rounds)):
            stream = self._files[name]
            with named_if_full(self._cells.path.with_name(name)):
                stream.write(b"".join(encode(asdict(row)) for row in rows))
                stream.flush()
                os.fsync(stream.fileno())
            sizes[name] = stream.tell()
        self._cells.append([asdict(dataclasses.replace(cell, file_sizes=sizes))])
        self.finished.add(cell.key)

    def add_trace(self, rows: Sequence[TraceRow]) -> None:
        """Write the rounds of one traced prompt."""
        assert self._traces is not None
        self._traces.append(asdict(row) for row in rows)
        self.traced.add(rows[0].key)

    def close(self) -> None:
        """Release the files and their locks."""
        for stream in (self._cells, self._traces, *self._files.values()):
            if stream is not None:
                stream.close()

    def __enter__(self) -> SuiteWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_at(path: Path, size: int) -> BinaryIO:
    """Open a file to go on at `size`."""
    if not path.exists():
        open_for_writing(path, "xb").close()
    stream = open_for_writing(path, "rb+")
    if stream.seek(0, os.SEEK_END) < size:
        stream.close()
        raise UsageError(f"{path}: shorter than {size} bytes, which {CELLS} counts on")
    stream.seek(size)
    return stream


def _check_tail(
    stream: BinaryIO,
    path: Path,
    kind: type[RequestRow] | type[RoundRow],
    finished: set[CellKey],
) -> None:
    """Leave the stream where it is; refuse what stands behind, unless a kill can have left it.

    That is whole rows of one unfinished cell and at most one torn row.
    """
    size, keys = stream.tell(), set()
    where = f"{path}: behind byte {size}, where {CELLS} has its last row end"
    stream.seek(max(size - 1, 0))
    if size and stream.read(1) != b"\n":
        raise UsageError(f"{path}: no row ends at byte {size}, as {CELLS} has it: it was changed")
    for line in stream:
        values = parse_object(line, where) if line.endswith(b"\n") else None
        if values is not None:
            keys.add(row_of(kind, values, where).key)
        if len(keys) > 1 or keys & finished:
            raise UsageError(
                f"{where}: rows of finished or of several cells, which no kill leaves; put back "
                f"the {CELLS} that belongs to them, or choose another folder"
            )
    stream.seek(size)
