# SPDX-License-Identifier: Apache-2.0
"""The feature store gives what the target gives, or refuses by name."""

import pytest
import torch

from tests.serving_world import world
from treespark.data import features as module
from treespark.data.batches import Row
from treespark.data.features import OnlineFeatures, StoredFeatures
from treespark.errors import UsageError
from treespark.target.model import TargetModel


@pytest.fixture
def target():
    target = world().target
    target.set_taps([0, 2])
    return target


ROWS = [Row(str(n), torch.arange(3, 3 + n).numpy(), 2) for n in (9, 5)]


def test_store_equals_online_bit_for_bit(target, tmp_path):
    online, store = OnlineFeatures(target)(ROWS), StoredFeatures(target, tmp_path)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(online, store(ROWS), strict=True))
    assert torch.equal(online[0][1, :5], OnlineFeatures(target)(ROWS[1:])[0][0])


@pytest.mark.parametrize("how", ["flip", "half", "swap"])
def test_a_damaged_file_is_refused_by_name(target, tmp_path, how):
    store = StoredFeatures(target, tmp_path)
    store(ROWS)
    path, other = store.path(ROWS[0]), store.path(ROWS[1])
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    damaged = {"flip": content, "half": content[:200], "swap": other.read_bytes()}
    path.write_bytes(damaged[how])
    with pytest.raises(UsageError, match=path.name):
        store(ROWS)


def test_other_taps_are_another_file(target, tmp_path):
    first = StoredFeatures(target, tmp_path).path(ROWS[0])
    target.set_taps([1, 2])
    assert StoredFeatures(target, tmp_path).path(ROWS[0]) != first


def test_another_target_and_another_dtype_are_other_files(tmp_path):
    targets = [world().target, world(seed=1).target]
    targets.append(TargetModel.from_pretrained(targets[0].path, dtype="bfloat16", device="cpu"))
    for target in targets:
        target.set_taps([0, 2])
    paths = {StoredFeatures(target, tmp_path).path(ROWS[0]) for target in targets}
    assert len(paths) == 3


def test_a_failed_writer_leaves_nothing(target, tmp_path, monkeypatch):
    def full(tensors, name, metadata):
        open(name, "w").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        StoredFeatures(target, tmp_path)(ROWS)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("folder", ["file", "file/inside/deep", "/proc/store"])
def test_a_store_that_is_no_folder_is_refused_before_any_row(target, tmp_path, folder):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match=f"data.store .*{folder}: cannot be written: "):
        StoredFeatures(target, tmp_path / folder)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_store_that_takes_no_files_is_read_but_not_written(target, tmp_path, monkeypatch):
    store = StoredFeatures(target, tmp_path)
    store(ROWS[:1])

    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    # As root, the tests' usual user, permission bits refuse nothing.
    monkeypatch.setattr("treespark.data.jsonl.tempfile.TemporaryFile", refuse)
    StoredFeatures(target, tmp_path)(ROWS[:1])
    with pytest.raises(UsageError, match=r"data.store .*: cannot be written: Permission denied"):
        store(ROWS)
