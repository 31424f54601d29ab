# SPDX-License-Identifier: Apache-2.0
"""The feature store: a folder of safetensors shards that several processes fill and read at once.

    manifest.json                    what all rows depend on; another identity is refused
    shard-<writer>-<n>.safetensors   the tensors of several rows end to end, along their tokens
    shard-<writer>-<n>.json          written last: sha256 of the shard; of each row id, key, offset
                                     and length in tokens, and checksum

Every process writes shards under a name that it drew by lot, and none changes a file that is
there, so no two write the same file. A file is written under a hidden name, synced and renamed; a
shard without its .json does not count. A kill therefore loses the shard in work and nothing else.
Two processes may compute the same row: it is there twice then, and either is right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import secrets
import shutil
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save

from treespark.data.batches import Row
from treespark.data.feature_identity import (
    FORMAT,
    MANIFEST,
    DamagedFileError,
    Identity,
    read_json,
)
from treespark.data.feature_rows import Kept, checksum, row_key
from treespark.data.jsonl import check_folder, write_atomic, write_json_atomic
from treespark.data.shard_file import ShardFile
from treespark.errors import UsageError
from treespark.sizes import readable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# A shard is held in memory until it is written, and what a kill loses.
SHARD_BYTES = 1 << 28
# Shards whose headers are remembered.
_HEADERS = 1024
_STALE_SECONDS = 3600
# In the headers and the .json of a shard, about.
_EXTRA_BYTES = 512


@dataclasses.dataclass(frozen=True)
class Shard:
    """A finished shard.  path: of its safetensors file.  keys: of its rows."""

    path: Path
    num_bytes: int
    sha256: str
    keys: list[str]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a row lies.  starts: first token of it in each tensor, in the layout's order."""

    shard: Shard
    id: str
    starts: tuple[int, ...]
    length: int
    prompt_len: int
    checksum: str


class FeatureStore:
    """Rows by their tokens.  Read-only until the first `add`; rows added are readable at once.

    Raises UsageError for a folder of other files, a store of another identity, naming what differs,
    and a damaged file, naming it.
    """

    def __init__(self, folder: Path, identity: Identity, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.identity, self.layout = folder, identity, identity.layout
        self.shards: dict[str, Shard] = {}
        self._digest, self._shard_bytes = identity.digest, shard_bytes
        self._places: dict[str, _Place] = {}
        self._pending: dict[str, tuple[Row, Kept]] = {}
        self._pending_bytes = 0
        self._writer, self._num_written = secrets.token_hex(6), 0
        self._shard_file = functools.lru_cache(maxsize=_HEADERS)(self._open)
        self._listed_ns: int | None = None
        self._check_manifest()
        self.refresh()

    def __len__(self) -> int:
        return len(self._places.keys() | self._pending.keys())

    def __contains__(self, row: Row) -> bool:
        key = row_key(row)
        return key in self._pending or key in self._places

    @property
    def num_bytes(self) -> int:
        """Size of all finished shards."""
        return sum(shard.num_bytes for shard in self.shards.values())

    def check_sizes(self) -> None:
        """Raise UsageError, naming it, for a shard that is missing or not as long as listed."""
        for shard in self.shards.values():
            size = shard.path.stat().st_size if shard.path.is_file() else None
            if size != shard.num_bytes:
                found = "it is missing" if size is None else f"{size} bytes"
                raise DamagedFileError(shard.path, f"{found}, should be {shard.num_bytes} bytes")

    def check_room(self, needed: int, num_rows: int) -> None:
        """Raise UsageError unless the folder takes files and `needed` more bytes of `num_rows`."""
        check_folder(self.folder, f"data.store {self.folder}")
        needed += num_rows * _EXTRA_BYTES
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise UsageError(
                f"data.store {self.folder}: needs {needed} bytes ({readable(needed)}), {free} "
                f"({readable(free)}) are free; set data.features=mixed with a smaller "
                "data.store_bytes, or data.taps_dtype=int8"
            )

    def refresh(self) -> None:
        """Take in the shards that other processes have finished since the last time."""
        changed_ns = self.folder.stat().st_mtime_ns if self.folder.is_dir() else None
        if changed_ns == self._listed_ns:
            return
        self._listed_ns = changed_ns
        for path in sorted(self.folder.glob("shard-*.json")):
            if path.stem not in self.shards:
                self._take(path, read_json(path))

    def read(self, row: Row) -> Kept | None:
        """Return what is stored of a row, None where it is not here.

        Of its file only this row is read and checked.
        """
        key = row_key(row)
        # Asked once: readers run beside a flush.
        pending = self._pending.get(key)
        if pending is not None:
            return pending[1]
        return self.load(key)[1] if key in self._places else None

    def load(self, key: str) -> tuple[Row, Kept]:
        """Return the row of a key of `shards`, and what is stored of it."""
        place = self._places[key]
        tensors, path = self.layout.tensors(), place.shard.path
        counts = {
            name: int(count)
            for name, count in self.layout.counts(place.length, place.prompt_len).items()
        }
        starts = dict(zip(tensors, place.starts, strict=True))
        try:
            kept = self._shard_file(path, place.shard.num_bytes).read(tensors, starts, counts)
        except FileNotFoundError:
            raise DamagedFileError(path, "it is missing") from None
        except OSError as error:
            raise DamagedFileError(path, error.strerror or str(error)) from None
        except ValueError as error:
            raise DamagedFileError(path, str(error)) from None
        if checksum(kept) != place.checksum:
            raise DamagedFileError(path, f"checksum of row {place.id} differs")
        return Row(place.id, kept["tokens"].numpy().astype(np.int64), place.prompt_len), kept

    def add(self, row: Row, kept: Kept) -> None:
        """Put a row into the shard in work, and write that one first where it would get too big."""
        size = self.layout.row_bytes(row)
        if self._pending_bytes + size > self._shard_bytes:
            self.flush()
        self._pending[row_key(row)] = (row, kept)
        self._pending_bytes += size

    def flush(self) -> None:
        """Write the shard in work; raises UsageError where that fails, and then it is lost."""
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        if not pending:
            return
        shard = self.folder / f"shard-{self._writer}-{self._num_written:05d}.safetensors"
        index = shard.with_suffix(".json")
        data = save(
            {n: torch.cat([kept[n] for _, kept in pending.values()]) for n in self.layout.tensors()}
        )
        content = {
            "store": self._digest,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "rows": _index_rows(pending),
        }
        try:
            if not self._num_written:
                self._begin()
            write_atomic(shard, [data])
            write_json_atomic(index, content)
        except (UsageError, OSError) as error:
            raise UsageError(
                f"data.store: {error}; the {len(self._places)} rows before are kept, the same "
                "command goes on from them"
            ) from None
        finally:
            if not index.exists():
                shard.unlink(missing_ok=True)
        self._num_written += 1
        self._take(index, content)

    def _begin(self) -> None:
        """Write the manifest, and remove what killed writers left; young files may be in work."""
        manifest = {"format": FORMAT, "identity": dataclasses.asdict(self.identity)}
        if not (self.folder / MANIFEST).exists():
            # Others may do the same; all write the same.
            draft = self.folder / f".manifest-{self._writer}.tmp"
            write_json_atomic(draft, manifest)
            os.replace(draft, self.folder / MANIFEST)
        orphans = (p for p in self.folder.glob("shard-*.safetensors") if not _index(p).exists())
        for path in (*self.folder.glob(".*.tmp"), *orphans):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()

    def _check_manifest(self) -> None:
        # Listed before it is looked for: another process may be making the store right now.
        others = os.listdir(self.folder) if self.folder.is_dir() else []
        if not (self.folder / MANIFEST).exists():
            if any(not name.startswith(".") for name in others):
                raise UsageError(
                    f"data.store {self.folder}: holds files but no {MANIFEST}, so it is no feature "
                    "store; choose another folder or delete it"
                )
            return
        saved = dataclasses.asdict(Identity.read(self.folder))
        for name, now in dataclasses.asdict(self.identity).items():
            if saved[name] != now:
                raise UsageError(
                    f"data.store {self.folder}: {name} was {saved[name]!r}, now {now!r}; choose "
                    "another folder, or delete this one to compute it anew"
                )

    def _take(self, index: Path, content: dict[str, Any]) -> None:
        shard = index.with_suffix(".safetensors")
        starts = dict.fromkeys(self.layout.tensors(), 0)
        places = {}
        try:
            owner = content["store"]
            found = Shard(shard, int(content["bytes"]), content["sha256"], [])
            for row in content["rows"]:
                if row["offset"] != starts["tokens"]:
                    raise ValueError("offsets leave a gap")
                where = tuple(starts.values())
                length, prompt = row["length"], row["prompt_len"]
                places[row["key"]] = _Place(
                    found, row["id"], where, length, prompt, row["checksum"]
                )
                found.keys.append(row["key"])
                for name, count in self.layout.counts(length, prompt).items():
                    starts[name] += int(count)
        except (KeyError, TypeError, ValueError):
            raise DamagedFileError(index, "not the list of a shard's rows") from None
        if owner != self._digest:
            raise UsageError(f"data.store {self.folder}: {index.name} belongs to another store")
        self.shards[index.stem] = found
        for key, place in places.items():
            self._places.setdefault(key, place)

    def _open(self, path: Path, num_bytes: int) -> ShardFile:
        return ShardFile.open(path, num_bytes, self.layout.tensors())

    def check_shards(self) -> Iterator[tuple[Shard, str | None]]:
        """Read every shard once; yield it with what is wrong with it, None for nothing."""
        for shard in self.shards.values():
            try:
                digest = hashlib.sha256()
                with shard.path.open("rb") as file:
                    while block := file.read(1 << 22):
                        digest.update(block)
                whole = digest.hexdigest() == shard.sha256
                yield shard, None if whole else "sha256 differs"
            except OSError as error:
                yield shard, str(error.strerror)

    def _problem(self, shard: Shard, problem: str | None) -> str | None:
        """What is wrong with a shard or its list of rows, of which `problem` is known."""
        try:
            own = [key for key in shard.keys if self._places[key].shard is shard]
            for key in own if problem is None else []:
                if row_key(self.load(key)[0]) != key:
                    return f"key of row {self._places[key].id} is another row's"
        except DamagedFileError as error:
            return str(error)
        return problem


def remove_bad_shards(folder: Path, identity: Identity) -> dict[str, str]:
    """Delete the damaged shards of a store; return their names and what was wrong with them.

    All rows are read. What was deleted is computed again by whoever fills the store next. Raises
    UsageError as `FeatureStore` does, but not for a damaged list of a shard's rows.
    """
    removed: dict[str, str] = {}

    def remove(path: Path, reason: str) -> None:
        removed[path.with_suffix(".safetensors").name] = reason
        # First what makes it count.
        for suffix in (".json", ".safetensors"):
            path.with_suffix(suffix).unlink(missing_ok=True)

    store = None
    while store is None:
        try:
            store = FeatureStore(folder, identity)
        except DamagedFileError as error:
            if error.path.name == MANIFEST:
                raise
            remove(error.path, str(error))
    for shard, problem in store.check_shards():
        if problem := store._problem(shard, problem):
            remove(shard.path, problem)
    return removed


def _index(shard: Path) -> Path:
    return shard.with_suffix(".json")


def _index_rows(pending: dict[str, tuple[Row, Kept]]) -> list[dict[str, Any]]:
    rows, offset = [], 0
    for key, (row, kept) in pending.items():
        place = {"id": row.id, "key": key, "offset": offset, "length": len(row.token_ids)}
        rows.append({**place, "prompt_len": row.prompt_len, "checksum": checksum(kept)})
        offset += len(row.token_ids)
    return rows
