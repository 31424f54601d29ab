# SPDX-License-Identifier: Apache-2.0
"""A tiny tapped target with a tokenizer, rows for it, and stores of them, for the feature tests."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.training.tiny_run import tiny_world
from treespark.data.batches import Row
from treespark.data.feature_identity import Identity
from treespark.data.feature_store import FeatureStore
from treespark.data.features import OnlineFeatures, StoredFeatures
from treespark.target.model import TargetModel

if TYPE_CHECKING:
    from pathlib import Path

    from treespark.data.feature_rows import Kept


def tapped(*taps: int, dtype: str = "float32", path: Path | None = None) -> TargetModel:
    """The tiny target, or another folder's, in a dtype with these taps (default 0 and 2)."""
    folder = path or tiny_world().target.path
    target = TargetModel.from_pretrained(folder, dtype=dtype, device="cpu")
    target.set_taps(taps or (0, 2))
    return target


def some_rows(number: int, seed: int = 0) -> list[Row]:
    """Ragged rows of 2 to 5 prompt and 4 to 12 answer tokens."""
    draw = random.Random(seed)
    rows = []
    for i in range(number):
        prompt, answer = draw.randint(2, 5), draw.randint(4, 12)
        tokens = [draw.randrange(256) for _ in range(prompt + answer)]
        rows.append(Row(f"r{i}", np.array(tokens), prompt))
    return rows


def open_store(
    folder: Path, target: TargetModel, taps_dtype: str = "plain", **options: Any
) -> FeatureStore:
    """The store of a target, of which `options` are those of FeatureStore."""
    return FeatureStore(folder, Identity.of(target, taps_dtype), **options)


def fill(
    folder: Path, target: TargetModel, rows: list[Row], taps_dtype: str = "plain", **options: Any
) -> FeatureStore:
    """A store that holds these rows."""
    with source(folder, target, rows, taps_dtype, **options) as found:
        found(rows)
    return found.store


def source(
    folder: Path, target: TargetModel, rows: list[Row], taps_dtype: str = "plain", **options: Any
) -> StoredFeatures:
    """A source that stores all of `rows`."""
    store = open_store(folder, target, taps_dtype, **options)
    return StoredFeatures(store, OnlineFeatures(target, taps_dtype), rows)


ROWS = some_rows(6)


def small_shards(folder: Path, target: TargetModel) -> Path:
    """The folder of a store of ROWS in three shards of two."""
    fill(folder, target, ROWS, shard_bytes=8_000)
    assert len(files(folder)) == 3
    return folder


def read_all(folder: Path, target: TargetModel) -> list[Kept | None]:
    """What the store has of each of ROWS."""
    store = open_store(folder, target)
    return [store.read(row) for row in ROWS]


def same(ours: Kept, theirs: Kept) -> bool:
    """True if two stored rows are equal bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def files(folder: Path, pattern: str = "shard-*.safetensors") -> list[Path]:
    """Files of a store in the order in which they were written."""
    return sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def equal_where_read(row: Row, ours: Any, theirs: Any, index: int = 0) -> bool:
    """True if two sources' batches agree for row `index` in all that training reads of it."""
    length, first = len(row.token_ids), row.prompt_len - 1
    return torch.equal(ours[0][index, : length - 2], theirs[0][index, : length - 2]) and (
        torch.equal(ours[1][index, first : length - 1], theirs[1][index, first : length - 1])
    )
