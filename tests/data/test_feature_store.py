# SPDX-License-Identifier: Apache-2.0
"""The store holds bounded shards, is shared by processes, and refuses what is not its own."""

import json
import shutil

import pytest

from tests.data.features_world import (
    ROWS,
    files,
    fill,
    flip,
    open_store,
    read_all,
    small_shards,
    some_rows,
    source,
    tapped,
)
from tests.serving_world import TEXT_VOCAB, world
from treespark.data import feature_store as module
from treespark.data.feature_identity import Identity
from treespark.data.feature_rows import row_key
from treespark.data.feature_store import FeatureStore
from treespark.errors import UsageError


@pytest.fixture(scope="module")
def target():
    return tapped()


@pytest.fixture
def filled(target, tmp_path):
    """A store of six rows in three shards."""
    return small_shards(tmp_path / "store", target)


def test_shards_are_bounded_and_one_larger_row_has_its_own(target, tmp_path):
    sizes = [Identity.of(target, "plain").layout.row_bytes(row) for row in ROWS]
    limit = sorted(sizes)[-1] - 1
    store = fill(tmp_path, target, ROWS, shard_bytes=limit)
    kept = {row_key(row): size for row, size in zip(ROWS, sizes, strict=True)}
    for shard in store.shards.values():
        assert len(shard.keys) == 1 or sum(kept[key] for key in shard.keys) <= limit
        assert shard.path.stat().st_size == shard.num_bytes
    assert sorted(key for shard in store.shards.values() for key in shard.keys) == sorted(kept)


def test_the_list_of_a_shard_names_rows_offsets_lengths_and_checksums(filled, target):
    for path in files(filled, "shard-*.json"):
        content = json.loads(path.read_text())
        offset = 0
        for row in content["rows"]:
            (known,) = [r for r in ROWS if r.id == row["id"]]
            assert row["key"] == row_key(known)
            assert (row["offset"], row["length"]) == (offset, len(known.token_ids))
            assert len(row["checksum"]) == 8
            offset += row["length"]
    manifest = json.loads((filled / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["identity"]["target"] == target.fingerprint
    assert manifest["identity"]["target_layer_ids"] == [0, 2]


def another_target():
    return tapped(path=world("llama", TEXT_VOCAB, seed=1, eos=256).target.path)


def changed_copy(tmp_path, name, change):
    """The target's folder with one changed file."""
    folder = tmp_path / "copy"
    shutil.copytree(tapped().path, folder)
    path = folder / name
    path.write_text(change(path.read_text()))
    return tapped(path=folder)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("target", lambda _: (another_target(), "plain")),
        ("target_layer_ids", lambda _: (tapped(1, 2), "plain")),
        ("target_layer_ids", lambda _: (tapped(2, 0), "plain")),
        ("dtype", lambda _: (tapped(dtype="bfloat16"), "plain")),
        ("taps_dtype", lambda _: (tapped(), "int8")),
        (
            "tokenizer",
            lambda path: (
                changed_copy(path, "tokenizer.json", lambda t: t.replace('"ha": 257', '"ha": 258')),
                "plain",
            ),
        ),
    ],
)
def test_a_store_of_something_else_is_refused_by_naming_what_differs(filled, tmp_path, name, other):
    with pytest.raises(UsageError, match=rf"data.store .*store: {name} was .*, now "):
        open_store(filled, *other(tmp_path))


def test_a_store_of_another_chat_template_is_refused(filled, tmp_path):
    other = tapped()
    other.tokenizer.chat_template = other.tokenizer.chat_template.replace("[", "<")
    with pytest.raises(UsageError, match=r"store: chat_template was '\w{16}', now '\w{16}'"):
        open_store(filled, other)


def test_a_folder_of_other_files_and_an_old_format_are_refused(filled, target, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("kept")
    with pytest.raises(UsageError, match=r"notes: holds files but no manifest.json"):
        open_store(tmp_path / "notes", target)
    path = filled / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "format": 0}))
    with pytest.raises(UsageError, match=r"manifest.json: format 0, .* reads 1; delete .*store to"):
        open_store(filled, target)
    for content in ("{", "[]", json.dumps({"format": 1, "identity": {"target": "x"}})):
        path.write_text(content)
        with pytest.raises(UsageError, match=r"manifest.json is damaged .*delete .*store to"):
            open_store(filled, target)


def test_a_shard_of_another_store_is_refused(filled, target, tmp_path):
    fill(tmp_path / "other", another_target(), ROWS)
    (path,) = files(tmp_path / "other", "shard-*.json")
    shutil.copy(path, filled)
    with pytest.raises(UsageError, match=rf"{path.name} belongs to another store"):
        open_store(filled, target)


def test_a_row_is_read_without_the_other_rows_and_shards(filled, target):
    store = open_store(filled, target)
    shard = store.shards[files(filled)[0].stem]
    first = next(row for row in ROWS if row_key(row) == shard.keys[0])
    last = next(row for row in ROWS if row_key(row) == shard.keys[-1])
    # The last bytes of a shard belong to a tensor of its last row; other shards are not there.
    flip(shard.path, shard.num_bytes - 1)
    for path in files(filled):
        if path != shard.path:
            path.unlink()
    assert store.read(first) is not None
    assert first is not last
    with pytest.raises(UsageError, match=shard.path.name):
        store.read(last)


def test_stored_rows_of_other_tokens_or_prompt_are_not_found(filled, target):
    store, row = open_store(filled, target), ROWS[0]
    changed = row.token_ids.copy()
    changed[-1] += 1
    assert store.read(row) is not None
    assert store.read(type(row)(row.id, changed, row.prompt_len)) is None
    assert store.read(type(row)(row.id, row.token_ids, row.prompt_len + 1)) is None


def test_processes_share_a_store_and_write_no_file_of_another(target, tmp_path):
    one, two = (source(tmp_path, target, ROWS, shard_bytes=8_000) for _ in range(2))
    one(ROWS[:4]), two(ROWS[3:])
    one.store.flush()
    two.store.flush()
    two(ROWS), one(ROWS)
    assert len(one.store) == len(two.store) == 6
    writers = {path.name.split("-")[1] for path in files(tmp_path)}
    assert len(writers) == 2
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with source(tmp_path, target, ROWS) as third:
        third(ROWS)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_killed_writers_left_is_removed_when_it_is_old(filled, target, monkeypatch):
    orphan, partial = filled / "shard-x-00000.safetensors", filled / ".shard-x.json.12.tmp"
    for path in (orphan, partial):
        path.write_bytes(b"x")
    more = some_rows(8, seed=1)
    fill(filled, target, more[:4])
    assert orphan.exists()
    assert partial.exists()
    monkeypatch.setattr(module, "_STALE_SECONDS", -1)
    fill(filled, target, more)
    assert not orphan.exists()
    assert not partial.exists()
    assert all(read_all(filled, target))


def test_a_store_is_opened_by_its_folder_alone(filled, target):
    store = FeatureStore(filled, Identity.read(filled))
    found = {store.load(key)[0].id for shard in store.shards.values() for key in shard.keys}
    assert found == {row.id for row in ROWS}
