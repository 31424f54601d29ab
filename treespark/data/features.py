# SPDX-License-Identifier: Apache-2.0
"""Target features for training rows: computed on the fly, or kept on disk once computed.

The store is content-addressed: a row's file is named by the hash of everything its features depend
on (target, taps, dtype, tokens), so a stale or foreign file can never be read by mistake and an
interrupted run continues where it stopped. Shapes: S rows, L padded length, m taps, H target hidden
size.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
import zlib
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from treespark.data.jsonl import check_folder
from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from treespark.data.batches import Row
    from treespark.target.model import TargetModel

_TENSORS = ("features", "last_hidden")
_SPARE_BYTES = 1 << 28
_STALE_SECONDS = 3600


class FeatureSource(Protocol):
    """Where training gets the target's view of its rows."""

    def __call__(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Features [S, L, m*H] and post-norm last hidden states [S, L, H], zero on padding."""
        ...


class OnlineFeatures:
    """Runs the target for every batch; needs no disk.

    One row at a time: the sums inside a matrix product depend on the number of rows, and a row's
    features must not depend on its neighbours.
    """

    def __init__(self, target: TargetModel) -> None:
        self._target = target

    def __call__(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """See FeatureSource."""
        return _pad([self.row(row) for row in rows])

    def row(self, row: Row) -> tuple[Tensor, Tensor]:
        """Features [L, m*H] and last hidden states [L, H] of one row."""
        input_ids = torch.from_numpy(row.token_ids)[None].to(self._target.device)
        with torch.no_grad():
            features, hidden = self._target.sequence_outputs(input_ids, [len(row.token_ids)])
        return features[0], hidden[0]


class StoredFeatures:
    """Reads rows from a folder of safetensors files, computing and writing those that are missing.

    A file carries its row's name and a checksum. Raises UsageError for one that does not fit, at
    once for a folder that cannot be made, and when a row is missing from one that takes no files.
    """

    def __init__(self, target: TargetModel, folder: Path) -> None:
        self._online = OnlineFeatures(target)
        self._folder = folder
        # A folder that is there may be complete, and then need not take files.
        if not os.path.isdir(folder):
            check_folder(folder, f"data.store {folder}")
        self._device = target.device
        self._key = f"{target.fingerprint}|{list(target.target_layer_ids)}|{target.dtype}|v2"
        self._swept = False

    def path(self, row: Row) -> Path:
        """The file that holds this row."""
        content = self._key.encode() + row.token_ids.astype("<i8").tobytes()
        digest = hashlib.sha256(content).hexdigest()
        return self._folder / digest[:2] / f"{digest}.safetensors"

    def __call__(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """See FeatureSource."""
        return _pad([self._read(row) or self._write(row) for row in rows])

    def _read(self, row: Row) -> tuple[Tensor, Tensor] | None:
        path = self.path(row)
        if not os.path.exists(path):
            return None
        try:
            with safe_open(str(path), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in _TENSORS}
                metadata = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise _damaged(path, str(error)) from None
        if metadata != _metadata(path, tensors):
            raise _damaged(path, "checksum differs")
        features, hidden = (tensors[name].to(self._device) for name in _TENSORS)
        return features, hidden

    def _write(self, row: Row) -> tuple[Tensor, Tensor]:
        path = self.path(row)
        check_folder(path.parent, f"data.store {self._folder}")
        features, hidden = self._online.row(row)
        tensors = {
            "features": features.cpu().contiguous(),
            "last_hidden": hidden.cpu().contiguous(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sweep()
        if shutil.disk_usage(self._folder).free < _SPARE_BYTES:
            raise UsageError(f"data.store {self._folder}: less than 256 MiB of disk left")
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file(tensors, str(partial), metadata=_metadata(path, tensors))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        return features, hidden

    def _sweep(self) -> None:
        """Remove, once, what killed writers left; young files may belong to a living one."""
        if self._swept:
            return
        for partial in self._folder.glob("*/.*.safetensors.*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - partial.stat().st_mtime > _STALE_SECONDS:
                    partial.unlink()
        self._swept = True


def _pad(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    features = pad_sequence([f for f, _ in rows], batch_first=True)
    return features, pad_sequence([h for _, h in rows], batch_first=True)


def _metadata(path: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """What a whole file at `path` says of itself; a file under another's name fails the compare."""
    checksum = 0
    for name in _TENSORS:
        checksum = zlib.crc32(memoryview(tensors[name].view(torch.uint8).numpy()), checksum)
    return {"row": path.stem, "crc32": f"{checksum:08x}"}


def _damaged(path: Path, reason: str) -> UsageError:
    return UsageError(f"feature store: {path} is damaged ({reason}); delete it to recompute")


def feature_source(target: TargetModel, mode: str, store: Path | None) -> FeatureSource:
    """The source a recipe names: `online` or `store` (which needs data.store)."""
    if mode == "online":
        return OnlineFeatures(target)
    if mode == "store" and store is not None:
        return StoredFeatures(target, store)
    raise UsageError(
        f"data.features {mode!r} with data.store {store}: use 'online', or 'store' with a folder"
    )
