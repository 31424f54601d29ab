# SPDX-License-Identifier: Apache-2.0
"""JSONL: what the reader refuses, and what an interrupted writer leaves behind."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from treespark.data.jsonl import JsonlAppender, encode, iter_jsonl, read_jsonl, write_atomic
from treespark.errors import UsageError


def _file(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": 1}\n{"a": 2}\n',
        b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n',
        b'{"a": 1}\r\n{"a": 2}\r\n',
        b'{"a": 1}\n\n  \n{"a": 2}',
        b'\xef\xbb\xbf\n{"a": 1}\n\r\n{"a": 2}\r\n\n',
    ],
    ids=["plain", "bom", "crlf", "blank-and-no-last-newline", "bom-blank-crlf"],
)
def test_bom_crlf_blank_lines_and_missing_last_newline_are_read(tmp_path, content):
    assert [row for _, row in read_jsonl(_file(tmp_path, content))] == [{"a": 1}, {"a": 2}]


def test_unicode_line_separator_inside_a_string_is_no_line_end(tmp_path):
    path = _file(tmp_path, encode({"a": "x\u2028y\x85z"}))
    assert list(read_jsonl(path)) == [(1, {"a": "x\u2028y\x85z"})]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b'{"a": 1}\n{"a" 2}\n{"a": 3}\n', 2, "malformed JSON"),
        (b'{"a": 1}\n\n{"a": "un', 3, "truncated"),
        ('{"a": "é'.encode()[:-1], 1, "truncated"),
        (b'{"a": 1}\n[1, 2]\n', 2, "need an object, got list"),
        (b"null\n", 1, "need an object, got NoneType"),
        (b'{"a": "\xff"}\n', 1, "not UTF-8"),
        ('{"a": 1}\n'.encode("utf-16"), 1, "not UTF-8"),
        (b'{"a": NaN}\n', 1, "malformed JSON"),
        (b'{"a": "\\ud800"}\n', 1, "lone surrogate"),
        (b'{"a":' + b"[" * 100_000 + b"\n", 1, "nested too deeply"),
        (b'{"a": 1} {"a": 2}\n', 1, "malformed JSON"),
    ],
)
def test_bad_line_is_named_with_file_line_and_reason(tmp_path, content, line, reason):
    path = _file(tmp_path, content)
    with pytest.raises(UsageError) as caught:
        list(read_jsonl(path))
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert reason in str(caught.value)


def test_surrogate_pair_is_read(tmp_path):
    assert list(read_jsonl(_file(tmp_path, b'{"a": "\\ud83d\\ude00"}\n'))) == [(1, {"a": "😀"})]


def test_duplicate_id_is_named_with_both_places(tmp_path):
    path = _file(tmp_path, b'{"id": "a"}\n{"id": "b"}\n\n{"id": "a"}\n')
    with pytest.raises(UsageError, match=r"rows.jsonl:4: duplicate id 'a', first at .*jsonl:1"):
        list(read_jsonl(path))


def test_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        list(iter_jsonl(tmp_path / "none.jsonl"))


def test_atomic_write_keeps_the_old_file_when_a_row_fails(tmp_path):
    path = _file(tmp_path, b"old\n")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_atomic(path, (encode({"a": value}) for value in (1.0, float("nan"))))
    assert path.read_bytes() == b"old\n"
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_folder_that_is_a_file_is_a_usage_error(tmp_path):
    path = _file(tmp_path, b"")
    with pytest.raises(UsageError, match="cannot be written"):
        write_atomic(path / "out.jsonl", [b""])


def test_atomic_write_replaces_nothing_but_a_regular_file(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name, kind in (("folder", "a folder"), ("pipe", "not a regular"), ("link", "not a reg")):
        with pytest.raises(UsageError, match=f"{name}: cannot be written: it is {kind}"):
            write_atomic(tmp_path / name, [b""])
    for path in (Path(""), Path(".."), tmp_path / "new" / ".."):
        with pytest.raises(UsageError, match="cannot be written: it is "):
            write_atomic(path, [b""])
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe"]


@pytest.mark.parametrize("cut", range(1, 14))
def test_resume_after_a_cut_at_any_byte_rewrites_the_last_row(tmp_path, cut):
    rows = [{"id": "a"}, {"id": "bé"}]
    content = b"".join(map(encode, rows))
    path = _file(tmp_path, content[:-cut])
    with JsonlAppender(path) as file:
        assert file.rows == rows[:1]
        file.append(rows[1:])
    assert path.read_bytes() == content


def test_torn_tail_longer_than_the_next_row_leaves_no_trace(tmp_path):
    path = _file(tmp_path, encode({"id": "a"}) + b'{"id": "b", "text": "' + b"x" * 100_000)
    with JsonlAppender(path) as file:
        file.append([{"id": "b"}])
    assert path.read_bytes() == encode({"id": "a"}) + encode({"id": "b"})


def test_opening_for_append_changes_nothing(tmp_path):
    path = _file(tmp_path, b'{"id": "a"}\n{"id":')
    JsonlAppender(path).close()
    JsonlAppender(tmp_path / "new.jsonl").close()
    assert path.read_bytes() == b'{"id": "a"}\n{"id":'
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_damage_before_the_last_line_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"rows\.jsonl:1: malformed"):
        JsonlAppender(_file(tmp_path, b'{"id":\n{"id": "b"}\n'))


@contextlib.contextmanager
def full_disk_beyond(size: int):
    """No file of this process may grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_named_and_costs_no_row_that_was_written(tmp_path):
    path = _file(tmp_path, b'{"id": "a"}\n')
    rows = [{"id": "b", "text": "x" * 300_000}]
    with (
        full_disk_beyond(100_000),
        pytest.raises(UsageError, match=r"rows\.jsonl: cannot be written: File too large"),
        JsonlAppender(path) as file,
    ):
        file.append(rows)
    with JsonlAppender(path) as file:
        assert file.rows == [{"id": "a"}]
        file.append(rows)
    assert [row["id"] for _, row in read_jsonl(path)] == ["a", "b"]
    before = path.read_bytes()
    with full_disk_beyond(100_000), pytest.raises(UsageError, match="jsonl: cannot be written: Fi"):
        write_atomic(path, [before])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["rows.jsonl"]


@pytest.mark.parametrize("content", [None, b'{"id": "a"}\n'], ids=["new", "existing"])
def test_second_writer_of_a_file_is_refused(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    if content:
        path.write_bytes(content)
    with JsonlAppender(path) as first:
        first.append([{"id": "b"}])
        with pytest.raises(UsageError, match="another process is writing"):
            JsonlAppender(path)


def test_second_writer_of_a_file_that_both_found_new_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    with JsonlAppender(path) as first, JsonlAppender(path) as second:
        first.append([{"id": "a"}])
        with pytest.raises(UsageError, match="another process is writing"):
            second.append([{"id": "a"}])
    assert path.read_bytes() == encode({"id": "a"})


_WRITER = """
import sys
from pathlib import Path
from treespark.data.jsonl import JsonlAppender
with JsonlAppender(Path(sys.argv[1])) as file:
    for i in range(len(file.rows), 100_000):
        file.append([{"id": str(i), "text": "x" * 5000}])
        print(i, flush=True)
"""


def test_every_appended_row_survives_sigkill(tmp_path):
    path = tmp_path / "rows.jsonl"
    acknowledged = -1
    for num_rows in (3, 40):
        command = [sys.executable, "-c", _WRITER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            acknowledged = [int(writer.stdout.readline()) for _ in range(num_rows)][-1]
            writer.send_signal(signal.SIGKILL)
    with JsonlAppender(path) as file:
        ids = [int(row["id"]) for row in file.rows]
    assert ids == list(range(len(ids)))
    assert len(ids) > acknowledged
    assert all(json.loads(line) for line in path.read_bytes().splitlines()[:-1])
