# SPDX-License-Identifier: Apache-2.0
"""Damaged files of a store are named; kills and full disks cost the shard in work and no more."""

import json
import os
import subprocess
import sys

import pytest

from tests.data.features_world import (
    ROWS,
    files,
    fill,
    flip,
    open_store,
    read_all,
    same,
    small_shards,
    tapped,
)
from treespark.data.feature_identity import Identity
from treespark.data.feature_store import remove_bad_shards
from treespark.errors import UsageError


@pytest.fixture(scope="module")
def target():
    return tapped()


@pytest.fixture
def filled(target, tmp_path):
    """A store of six rows in three shards."""
    return small_shards(tmp_path / "store", target)


@pytest.mark.parametrize("how", ["payload", "last byte", "header", "empty", "half", "gone", "junk"])
def test_a_damaged_shard_is_named_when_it_is_read(filled, target, how):
    path = files(filled)[0]
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    if how in ("payload", "last byte", "header"):
        flip(path, {"payload": start + 5, "last byte": len(content) - 1, "header": 20}[how])
    elif how == "gone":
        path.unlink()
    else:
        cut = {"empty": b"", "half": content[: len(content) // 2], "junk": b"x" * len(content)}
        path.write_bytes(cut[how])
    with pytest.raises(UsageError, match=rf"{path.name} is damaged .*delete {path.stem}"):
        read_all(filled, target)
    checked = list(open_store(filled, target).check_shards())
    assert len(checked) == 3
    assert [shard.path for shard, problem in checked if problem] == [path]


@pytest.mark.parametrize("left", [0, 0.3, 0.99])
def test_a_shard_cut_while_it_is_read_is_named_and_ends_no_process(target, tmp_path, left):
    # One shard, of which the first row is read before the file is cut, and the last one after it.
    store = fill(tmp_path, target, ROWS)
    (path,) = files(tmp_path)
    size = path.stat().st_size
    store = open_store(tmp_path, target)
    first = store.read(ROWS[0])
    os.truncate(path, int(left * size))
    with pytest.raises(UsageError, match=rf"{path.name} is damaged .*, should be {size} bytes"):
        [store.read(row) for row in ROWS]
    # What was read before is the reader's own.
    assert all(tensor.isfinite().all() for tensor in first.values())


@pytest.mark.parametrize("how", ["payload", "cut", "gone", "list", "list gone", "key", "row"])
def test_bad_shards_are_removed_and_the_others_stay(filled, target, how):
    before, path = read_all(filled, target), files(filled)[1]
    index = path.with_suffix(".json")
    kept = {p.name for p in filled.iterdir()} - {path.name, index.name}
    rows = json.loads(index.read_text())
    if how == "payload":
        flip(path, path.stat().st_size - 9)
    elif how == "cut":
        os.truncate(path, 100)
    elif how == "gone":
        path.unlink()
    elif how == "list":
        index.write_text("{")
    elif how == "list gone":
        index.unlink()
    else:
        rows["rows"][0]["key" if how == "key" else "checksum"] = "0" * 8
        index.write_text(json.dumps(rows))
    removed = remove_bad_shards(filled, Identity.of(target, "plain"))
    if how == "list gone":
        # Files without a list do not count; writers remove them after a while.
        assert removed == {}
        path.unlink()
    else:
        assert list(removed) == [path.name]
    assert {p.name for p in filled.iterdir()} == kept
    fill(filled, target, ROWS)
    assert all(map(same, read_all(filled, target), before))
    assert remove_bad_shards(filled, Identity.of(target, "plain")) == {}


def test_a_flipped_bit_is_noticed_wherever_in_a_shard_it_is(target, tmp_path):
    rows = ROWS[:2]
    fill(tmp_path, target, rows)
    (path,) = files(tmp_path)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    places = [*range(header), *range(header, len(content), 97), len(content) - 1]
    for n, place in enumerate(places):
        flip(path, place, n % 8)
        store = open_store(tmp_path, target)
        with pytest.raises(UsageError, match=path.name):
            [store.read(row) for row in rows]
        flip(path, place, n % 8)
    assert path.read_bytes() == content


def test_two_swapped_shards_are_named(filled, target):
    first, second, *_ = files(filled)
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    named = set()
    store = open_store(filled, target)
    for row in ROWS:
        try:
            store.read(row)
        except UsageError as error:
            named |= {path for path in (first, second) if path.name in str(error)}
    assert named == {first, second}


@pytest.mark.parametrize("content", [b"", b"[]", b'{"rows": []}', b'{"rows": 3', b"\xff"])
def test_a_damaged_list_of_rows_is_named(filled, target, content):
    path = files(filled, "shard-*.json")[0]
    path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"{path.name} is damaged"):
        open_store(filled, target)


def test_deleting_the_files_that_are_named_is_enough_to_compute_their_rows_anew(filled, target):
    before, path = read_all(filled, target), files(filled)[1]
    path.unlink()
    path.with_suffix(".json").unlink()
    assert any(kept is None for kept in read_all(filled, target))
    fill(filled, target, ROWS)
    assert all(map(same, read_all(filled, target), before))


# Fills a store shard by shard and kills itself at the n-th touch of the file system, for each n.
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.data.features_world import fill, open_store, same, some_rows, tapped
from treespark.data import feature_store
feature_store._STALE_SECONDS = -1
root, rows, target = Path(sys.argv[1]), some_rows(2), tapped()
whole = fill(root / "whole", target, rows)
def touch(event, args):
    global left
    if event.split(".")[0] in ("os", "open", "tempfile") and args and str(root) in str(args[0]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
left, point, survived, seen = 0, 0, False, set()
sys.addaudithook(touch)
while not survived:
    point += 1
    folder = root / str(point)
    child = os.fork()
    if child == 0:
        left = point
        # One row a shard: the manifest comes with the first.
        fill(folder, target, rows, shard_bytes=1)
        os._exit(0)
    survived = os.waitpid(child, 0)[1] == 0
    found = [row in open_store(folder, target) for row in rows]
    # Whole shards, in the order in which they were written.
    assert found == sorted(found, reverse=True), (point, found)
    seen.add(sum(found))
    fill(folder, target, rows, shard_bytes=1)
    store = open_store(folder, target)
    assert all(same(store.read(row), whole.read(row)) for row in rows), point
    names = sorted(path.suffix for path in folder.iterdir())
    assert names == [".json"] * 3 + [".safetensors"] * 2 or sum(found) == 2, (point, names)
assert seen == {0, 1, 2}, seen
print(point)
"""

# Writes until a file gets larger than the limit, as on a full disk.
FULL = """
import resource, sys
from pathlib import Path
from tests.data.features_world import fill, some_rows, tapped
from treespark.errors import UsageError
folder, rows, target = Path(sys.argv[1]), some_rows(6), tapped()
fill(folder, target, rows[:2])
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    fill(folder, target, rows)
except UsageError as error:
    print(error)
"""


def run_python(code, *args, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_kill_at_any_write_loses_the_shard_in_work_and_nothing_else(tmp_path):
    # A fork of a process with a pool of OpenMP threads waits for ever for threads it does not have.
    assert int(run_python(KILLED, tmp_path, OMP_NUM_THREADS="1")) > 30


def test_a_full_disk_leaves_the_store_readable_and_resumable(target, tmp_path):
    folder = tmp_path / "store"
    message = run_python(FULL, folder)
    assert "cannot be written: File too large; the 2 rows before are kept" in message
    assert [kept is not None for kept in read_all(folder, target)] == [True] * 2 + [False] * 4
    assert len(list(folder.iterdir())) == 3
    fill(folder, target, ROWS)
    whole = fill(tmp_path / "whole", target, ROWS)
    assert all(map(same, read_all(folder, target), map(whole.read, ROWS)))
