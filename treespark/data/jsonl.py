# SPDX-License-Identifier: Apache-2.0
"""JSONL files: a strict reader, a whole-file writer and an append writer that survives a kill.

One JSON object a line, UTF-8, `\\n` or `\\r\\n`; a byte order mark and blank lines are skipped.
Any other deviation is a `UsageError` that begins with `file:line:`, so no row is lost silently.
"""

import contextlib
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from treespark.errors import UsageError

Row = dict[str, Any]

_BOM = b"\xef\xbb\xbf"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def parse_object(line: bytes, where: str, is_last: bool = False) -> Row | None:
    """Return the object on one line, or in the whole body of an answer; None for a blank one.

    Raises UsageError, begun by `where`, for anything that a row could not hold.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        if is_last and error.reason == "unexpected end of data":
            raise UsageError(f"{where}: truncated, the file ends inside this line") from None
        raise UsageError(f"{where}: not UTF-8 (byte {error.start + 1} of the line)") from None
    if not text.strip():
        return None
    try:
        row = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise UsageError(f"{where}: nested too deeply") from None
    except ValueError as error:
        if is_last and not line.endswith(b"\n"):
            raise UsageError(f"{where}: truncated, the file ends inside this line") from None
        raise UsageError(f"{where}: malformed JSON: {error}") from None
    if not isinstance(row, dict):
        raise UsageError(f"{where}: need an object, got {type(row).__name__}")
    if "\\ud" in text.lower():
        _check_encodable(row, where)
    return row


def _check_encodable(row: Row, where: str) -> None:
    """Refuse half a surrogate pair: JSON can spell it, a UTF-8 file or a tokenizer cannot."""
    try:
        encode(row)
    except UnicodeEncodeError:
        raise UsageError(f"{where}: lone surrogate escape in a string") from None


def iter_jsonl(path: Path, *, ignore_tail: bool = False) -> Iterator[tuple[int, Row]]:
    """Yield (line number from 1, object) for each non-blank line.

    ignore_tail: leave out a last line that has no newline. Raises UsageError `file:line: reason`
    for a line that is malformed, truncated, not UTF-8 or not an object, and for a file that cannot
    be opened.
    """
    try:
        stream: BinaryIO = path.open("rb")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    with stream:
        number, pending = 0, stream.readline()
        if pending.startswith(_BOM):
            pending = pending[len(_BOM) :]
        while pending:
            line, pending, number = pending, stream.readline(), number + 1
            if ignore_tail and not line.endswith(b"\n"):
                return
            row = parse_object(line, f"{path}:{number}", is_last=not pending)
            if row is not None:
                yield number, row


class UniqueIds:
    """Remembers where each id was seen, over one file or several."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}

    def add(self, row_id: str, path: Path, number: int) -> None:
        """Record an id; raises UsageError naming both places when it was there before."""
        where = f"{path}:{number}"
        first = self._seen.setdefault(row_id, where)
        if first != where:
            raise UsageError(f"{where}: duplicate id {row_id!r}, first at {first}")


def label(row: Row, key: str, where: str) -> str:
    """Return a row's id, source or category as text; raises UsageError for another type."""
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UsageError(f"{where}: {key}: need a string or an integer, got {value!r}")
    return str(value)


def read_jsonl(path: Path, *, ignore_tail: bool = False) -> Iterator[tuple[int, Row]]:
    """Yield what `iter_jsonl` yields.

    Raises UsageError also for an `id` that is no string or integer, or that came before.
    """
    ids = UniqueIds()
    for number, row in iter_jsonl(path, ignore_tail=ignore_tail):
        if "id" in row:
            ids.add(label(row, "id", f"{path}:{number}"), path, number)
        yield number, row


def encode(row: Row) -> bytes:
    """Return the line of one row, `\\n` included."""
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def report_path(out: Path) -> Path:
    """Return where the report of an output file lies."""
    return out.with_name(out.name + ".report.json")


def check_out(out: Path, inputs: Sequence[Path], option: str = "--out") -> None:
    """Raise UsageError unless `out` and its report can be written and neither is an input.

    option: what named the file, for messages.
    """
    check_file(out, f"{option} ")
    check_file(report_path(out), f"report of {option}: ")
    sources = {os.path.realpath(path) for path in inputs}
    for path in (out, report_path(out)):
        if os.path.realpath(path) in sources:
            raise UsageError(f"{option} {out}: {path} is also an input")


def check_file(path: Path, option: str = "") -> None:
    """Raise UsageError, begun by `option`, unless a regular file can be made or replaced here."""
    name = f"{option}{path}"
    try:
        is_free = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        is_free = path.name != ".."
    except OSError as error:
        raise UsageError(f"{name}: cannot be written: {error.strerror}") from None
    if not is_free:
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise UsageError(f"{name}: cannot be written: it is {kind}")
    check_folder(path.parent, name)


def check_folder(folder: Path, name: str) -> None:
    """Raise UsageError, begun by `name`, unless files can be made in a folder or one to come."""
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        # The permission bits do not tell: root passes them all, and /proc takes no file at all.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UsageError(f"{name}: cannot be written: {error.strerror}") from None


def open_for_writing(path: Path, mode: str) -> BinaryIO:
    """Open a file in a folder that is made if need be; raises UsageError when that is refused.

    mode `xb`: FileExistsError, for the caller to explain, when the file has come to be.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return cast("BinaryIO", path.open(mode))
    except OSError as error:
        if mode == "xb" and isinstance(error, FileExistsError):
            raise
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def named_if_full(path: Path) -> Iterator[None]:
    """Make a UsageError that names `path` of what the system says while its file is written."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_atomic(path: Path, chunks: Iterable[bytes]) -> None:
    """Replace a file by these bytes, or leave it as it was if anything raises.

    Raises UsageError when its folder cannot be made or written, when the disk is full, and for a
    folder or a device.
    """
    check_file(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    stream = open_for_writing(partial, "wb")
    try:
        with named_if_full(path), stream:
            stream.writelines(chunks)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace a file by one indented JSON value."""
    write_atomic(path, [(json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode("utf-8")])


class JsonlAppender:
    """Appends rows so that after a kill at any byte the file holds whole rows and at most one tail.

    Opening reads the whole `rows` that are there, takes a lock and changes nothing. The first
    `append` cuts off a last line without its newline, the trace of a kill. Each `append` returns
    when its rows are on the disk. Raises UsageError for rows that `read_jsonl` would refuse, when
    another process is writing the same file, and when the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._stream: Any = None
        if path.exists():
            self._stream = self._open("rb+")
            self.rows = [row for _, row in read_jsonl(path, ignore_tail=True)]
            self._stream.seek(_whole_lines_size(self._stream))

    def _open(self, mode: str) -> BinaryIO:
        busy = UsageError(f"{self.path}: another process is writing this file")
        try:
            stream = open_for_writing(self.path, mode)
        except FileExistsError:
            raise busy from None
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()
            raise busy from None
        return stream

    def append(self, rows: Iterable[Row]) -> None:
        """Write the rows in order and wait for the disk, once for the whole batch."""
        data = b"".join(encode(row) for row in rows)
        if not data:
            return
        if self._stream is None:
            self._stream = self._open("xb")
        with named_if_full(self.path):
            try:
                self._stream.truncate()
                self._stream.write(data)
                self._stream.flush()
                os.fsync(self._stream.fileno())
            except OSError:
                # Else closing it would try again to write what is still in its buffer.
                self._stream.raw.close()
                raise

    def close(self) -> None:
        """Release the file and its lock."""
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> "JsonlAppender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _whole_lines_size(stream: BinaryIO, block: int = 1 << 16) -> int:
    """Return the number of bytes up to and including the last newline, 0 without one."""
    end = stream.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - block)
        stream.seek(start)
        newline = stream.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
