# SPDX-License-Identifier: Apache-2.0
"""Online features and stored ones are the same to training, at a size that is known before."""

import logging
import shutil

import pytest
import torch

from tests.data.features_world import (
    equal_where_read,
    files,
    fill,
    flip,
    open_store,
    some_rows,
    tapped,
)
from tests.training.tiny_run import random_rows, recipe, write
from treespark.data import feature_store as store_module
from treespark.data.batches import load_rows
from treespark.data.feature_identity import Identity
from treespark.data.feature_rows import rows_that_fit
from treespark.data.features import OnlineFeatures, feature_source, stored_features
from treespark.errors import UsageError
from treespark.training import loop
from treespark.training.metrics import read_metrics

ROWS = some_rows(5)


@pytest.fixture
def target():
    return tapped()


def stored(tmp_path, rows=None, **changes):
    """A recipe's data section with a store in `tmp_path`."""
    data = {"features": "store", "store": tmp_path / "store", **changes}
    path = tmp_path / "rows.jsonl"
    return recipe(tmp_path / "run", path if rows is None else rows, data=data).data


def kept_bytes(store):
    """Bytes of the tensors of all rows of a store."""
    rows = [store.load(key)[1] for shard in store.shards.values() for key in shard.keys]
    return sum(t.nbytes for kept in rows for t in kept.values())


@pytest.mark.parametrize("taps_dtype", ["plain", "int8", "float8_e4m3"])
def test_a_store_gives_online_features_bit_for_bit_first_and_later(target, tmp_path, taps_dtype):
    online = OnlineFeatures(target, taps_dtype)(ROWS)
    with feature_source(target, stored(tmp_path, taps_dtype=taps_dtype), ROWS) as source:
        found = [source(ROWS), source(ROWS)]
    with feature_source(target, stored(tmp_path, taps_dtype=taps_dtype), ROWS) as source:
        found.append(source(ROWS))
    for batch in found:
        assert [t.shape for t in batch] == [t.shape for t in online]
        assert all(equal_where_read(row, batch, online, i) for i, row in enumerate(ROWS))
    # A row's features do not depend on the rows beside it.
    assert equal_where_read(ROWS[3], OnlineFeatures(target, taps_dtype)(ROWS[3:4]), _row(online, 3))


def _row(batch, index):
    return tuple(tensor[index : index + 1] for tensor in batch)


def test_what_is_left_out_reads_as_zeros_and_is_not_stored(target, tmp_path):
    row, store = ROWS[0], fill(tmp_path, target, ROWS[:1])
    length, prompt = len(row.token_ids), row.prompt_len
    with feature_source(target, stored(tmp_path, store=tmp_path), ROWS[:1]) as source:
        features, hidden = source(ROWS[:1])
    assert features[0].any(-1).tolist() == [True] * (length - 2) + [False] * 2
    seen = [False] * (prompt - 1) + [True] * (length - prompt) + [False]
    assert hidden[0].any(-1).tolist() == seen
    kept = store.read(row)
    assert kept["taps"].shape == (length - 2, 2, 32)
    assert kept["last_hidden"].shape == (length - prompt, 32)
    assert kept["tokens"].tolist() == row.token_ids.tolist()


def test_prefetched_rows_are_the_rows_and_a_damaged_one_is_refused_when_asked_for(target, tmp_path):
    path = files(fill(tmp_path / "store", target, ROWS[:4]).folder)[0]
    online = OnlineFeatures(target)(ROWS)
    with feature_source(target, stored(tmp_path), ROWS) as source:
        source.prefetch(ROWS)
        source.prefetch(ROWS[1:])
        for rows in (ROWS[::-1], ROWS):
            found = source(rows)
            for i, row in enumerate(rows):
                expected = _row(online, [r.id for r in ROWS].index(row.id))
                assert equal_where_read(row, _row(found, i), expected)
    flip(path, path.stat().st_size - 1)
    with feature_source(target, stored(tmp_path), ROWS) as source:
        source.prefetch(ROWS[:4])
        with pytest.raises(UsageError, match=path.name):
            source(ROWS)


@pytest.mark.parametrize(("kind", "step"), [("int8", 1 / 254), ("float8_e4m3", 1 / 16)])
def test_rounded_taps_stay_within_half_a_step_of_their_largest_number(target, kind, step):
    """int8: half of 1/127 of the largest number of the token and tap. e4m3: three bits of mantissa,
    1/16 of the number itself, and half of 2**-9 of the scale near zero. Rounding to float32 comes
    on top."""
    plain, rounded = (OnlineFeatures(target, k)(ROWS[:1])[0].unflatten(-1, (2, 32))
                      for k in ("plain", kind))  # fmt: skip
    largest = plain.abs().amax(-1, keepdim=True)
    bound = largest * step if kind == "int8" else plain.abs() * step + largest / 448 * 2**-10
    assert ((plain - rounded).abs() <= bound * 1.0001).all()
    assert not torch.equal(plain, rounded)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3"])
def test_a_token_that_is_not_finite_stays_so_and_one_of_zeros_zero(target, tmp_path, kind):
    layout = Identity.of(target, kind).layout
    features = torch.ones(3, 64)
    features[0, 3], features[1, 3], features[2] = torch.nan, torch.inf, 0.0
    found = layout.as_stored(features).unflatten(-1, (2, 32))
    assert found[:2, 0].isnan().all()
    assert found[:2, 1].eq(1).all()
    assert found[2].eq(0).all()


def train(folder, rows, **data):
    loop.train(recipe(folder, rows, train={"eval_every": 6}, data={"holdout_rows": 2, **data}))
    lines = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key != "step_s"} for line in lines]


def test_losses_and_held_out_acceptance_are_equal_online_stored_and_mixed(tmp_path):
    rows, folder = write(tmp_path / "rows.jsonl", random_rows(9)), tmp_path / "store"
    online = train(tmp_path / "online", rows)
    assert any("acceptance/chain" in line for line in online)
    sizes = {}
    for name, data in {
        "fills": {"features": "store"},
        "reads": {"features": "store"},
        "mixed": {"features": "mixed", "store_bytes": 20_000, "store": tmp_path / "part"},
        "mixed again": {"features": "mixed", "store_bytes": 20_000, "store": tmp_path / "part"},
    }.items():
        assert train(tmp_path / name, rows, **{"store": folder, **data}) == online, name
        sizes[name] = {path.name for path in data.get("store", folder).iterdir()}
    # The second run wrote nothing: all was there.
    assert sizes["fills"] == sizes["reads"]
    assert sizes["mixed"] == sizes["mixed again"]


def test_rounded_taps_change_losses_a_little_and_alike_everywhere(tmp_path):
    """Tolerance 2 % of each loss over 12 steps at random weights: int8 rounds each tap to half of
    1/127 of its largest number."""
    rows = write(tmp_path / "rows.jsonl", random_rows(9))
    plain = train(tmp_path / "plain", rows)
    online = train(tmp_path / "online", rows, taps_dtype="int8")
    stored_ = train(
        tmp_path / "stored", rows, taps_dtype="int8", features="store", store=tmp_path / "store"
    )
    assert stored_ == online != plain
    for ours, theirs in zip(online, plain, strict=True):
        for key in ("ce", "l1", "confidence", "loss"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=0.02), (ours["step"], key)


def test_a_run_does_not_go_on_with_other_rounding_but_with_another_source(tmp_path):
    rows = write(tmp_path / "rows.jsonl", random_rows(9))
    half, store = {"max_steps": 12, "save_every": 5}, {"store": tmp_path / "store"}
    loop.train(recipe(tmp_path / "run", rows, train=half))
    shutil.rmtree(tmp_path / "run" / "step-00000012")
    with pytest.raises(UsageError, match=r"data\.taps_dtype was None, now 'int8'"):
        loop.train(recipe(tmp_path / "run", rows, train=half, data={"taps_dtype": "int8"}))
    loop.train(recipe(tmp_path / "run", rows, train=half, data={"features": "store", **store}))


def test_the_size_that_is_logged_is_that_of_the_rows_stored(target, tmp_path, caplog):
    rows = load_rows(
        [write(tmp_path / "rows.jsonl", random_rows(9))],
        max_tokens=64, block_size=4, vocab_size=272)[0]  # fmt: skip
    for kind in ("plain", "int8", "float8_e4m3"):
        layout = Identity.of(target, kind).layout
        counted = sum(map(layout.row_bytes, rows))
        assert kept_bytes(fill(tmp_path / kind, target, rows, kind)) == counted
    with caplog.at_level(logging.INFO):
        stored_features(target, stored(tmp_path, store=tmp_path / "new"), rows)
        stored_features(target, stored(tmp_path, store=tmp_path / "plain"), rows[:4])
    size = sum(map(Identity.of(target, "plain").layout.row_bytes, rows)) / 1e6
    assert f"{size:.1f} MB for 9 of 9 rows, {size:.1f} MB of it missing (9 rows)" in caplog.text
    assert "for 4 of 4 rows, 0.0 MB of it missing (0 rows)" in caplog.text


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    target, tmp_path, monkeypatch
):
    free = store_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda _: free._replace(free=1234))
    with pytest.raises(UsageError, match=r"data.store .*store: needs \d{4,} bytes .*, 1234 .*free"):
        stored_features(target, stored(tmp_path), ROWS)
    assert not (tmp_path / "store").exists()


def test_mixed_stores_the_same_rows_for_everyone_and_no_more_than_asked_for(target, tmp_path):
    layout = Identity.of(target, "plain").layout
    limit = 3 * max(map(layout.row_bytes, ROWS))
    chosen = rows_that_fit(ROWS, layout, limit)
    assert 3 <= len(chosen) < 5
    assert sum(map(layout.row_bytes, chosen)) <= limit
    assert [row.id for row in rows_that_fit(ROWS[::-1], layout, limit)] == [r.id for r in chosen]
    assert rows_that_fit(ROWS, layout, 1) == []
    assert len(rows_that_fit(ROWS + ROWS, layout, None)) == 5
    data = stored(tmp_path, features="mixed", store_bytes=limit)
    with feature_source(target, data, ROWS) as source:
        found = source(ROWS)
    online = OnlineFeatures(target)(ROWS)
    assert all(equal_where_read(row, found, online, i) for i, row in enumerate(ROWS))
    store = open_store(tmp_path / "store", target)
    assert {row.id for row in ROWS if row in store} == {row.id for row in chosen}


@pytest.mark.parametrize("folder", ["file", "file/inside/deep", "/proc/store"])
def test_a_store_that_is_no_folder_is_refused_before_any_row(target, tmp_path, folder):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match=f"data.store .*{folder}: cannot be written: "):
        stored_features(target, stored(tmp_path, store=tmp_path / folder), ROWS)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_store_that_takes_no_files_is_read_but_not_written(target, tmp_path, monkeypatch):
    fill(tmp_path / "store", target, ROWS[:3])

    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    # As root, the tests' usual user, permission bits refuse nothing.
    monkeypatch.setattr("treespark.data.jsonl.tempfile.TemporaryFile", refuse)
    with feature_source(target, stored(tmp_path), ROWS[:3]) as source:
        source(ROWS[:3])
    with pytest.raises(UsageError, match=r"data.store .*: cannot be written: Permission denied"):
        stored_features(target, stored(tmp_path), ROWS)


def test_training_computes_stored_rows_once(tmp_path, monkeypatch):
    rows = write(tmp_path / "rows.jsonl", random_rows(5))
    calls, plain = [], OnlineFeatures.exact
    monkeypatch.setattr(OnlineFeatures, "exact", lambda *a: calls.append(a[1].id) or plain(*a))
    data = {"features": "store", "store": tmp_path / "store"}
    loop.train(recipe(tmp_path / "run", rows, data=data))
    assert sorted(calls) == ["r0", "r1", "r2", "r3", "r4"]
    assert len(files(tmp_path / "store")) == 1
