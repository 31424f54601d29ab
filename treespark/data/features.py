# SPDX-License-Identifier: Apache-2.0
"""Target features for training rows: computed on the fly, or kept on disk once computed.

The store is content-addressed: a row's file is named by the hash of everything its features
depend on
(target, taps, dtype, tokens), so a stale or foreign file can never be read by mistake and an
interrupted run continues where it stopped.
Shapes: S rows, L padded length, m taps, H target hidden size.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from treespark.data.batches import Row
    from treespark.target.model import TargetModel


class FeatureSource(Protocol):
    """Where training gets the target's view of its rows."""

    def __call__(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Features [S, L, m*H] and post-norm last hidden states [S, L, H], zero on padding."""
        ...


class OnlineFeatures:
    """Runs the target for every batch; needs no disk."""

    def __init__(self, target: TargetModel) -> None:
        self._target = target

    def __call__(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """See FeatureSource."""
        lengths = torch.tensor([len(row.token_ids) for row in rows])
        input_ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for i, row in enumerate(rows):
            input_ids[i, : lengths[i]] = torch.from_numpy(row.token_ids)
        return self._target.sequence_outputs(input_ids.to(self._target.device), lengths)


class StoredFeatures:
    """Reads rows from a folder of safetensors files, computing and writing those that are
    missing.
    """

    def __init__(self, target: TargetModel, folder: Path) -> None:
        self._online = OnlineFeatures(target)
        self._folder = folder
        self._device = target.device
        self._key = f"{target.fingerprint}|{list(target.target_layer_ids)}|{target.dtype}|v1"
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, row: Row) -> Path:
        """The file that holds this row."""
        digest = hashlib.sha256(
            self._key.encode() + row.token_ids.astype("<i8").tobytes()
        ).hexdigest()
        return self._folder / digest[:2] / f"{digest}.safetensors"

    def __call__(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """See FeatureSource."""
        loaded = [self._read(row) or self._write(row) for row in rows]
        features = torch.nn.utils.rnn.pad_sequence([f for f, _ in loaded], batch_first=True)
        hidden = torch.nn.utils.rnn.pad_sequence([h for _, h in loaded], batch_first=True)
        return features.to(self._device), hidden.to(self._device)

    def _read(self, row: Row) -> tuple[Tensor, Tensor] | None:
        path = self.path(row)
        if not path.exists():
            return None
        try:
            with safe_open(str(path), framework="pt") as file:
                return file.get_tensor("features"), file.get_tensor("last_hidden")
        except SafetensorError as error:
            raise UsageError(
                f"feature store: {path} is damaged ({error}); delete it to recompute"
            ) from None

    def _write(self, row: Row) -> tuple[Tensor, Tensor]:
        features, hidden = (x[0].cpu().contiguous() for x in self._online([row]))
        path = self.path(row)
        size = 2 * (
            features.numel() * features.element_size() + hidden.numel() * hidden.element_size()
        )
        if shutil.disk_usage(self._folder).free < size + (1 << 28):
            raise UsageError(f"data.store {self._folder}: less than 256 MiB of disk left")
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        save_file({"features": features, "last_hidden": hidden}, str(temporary))
        os.replace(temporary, path)
        return features, hidden


def feature_source(target: TargetModel, mode: str, store: Path | None) -> FeatureSource:
    """The source a recipe names: `online` or `store` (which needs data.store)."""
    if mode == "online":
        return OnlineFeatures(target)
    if mode == "store" and store is not None:
        return StoredFeatures(target, store)
    raise UsageError(
        f"data.features {mode!r} with data.store {store}: use 'online', or 'store' with a folder"
    )
