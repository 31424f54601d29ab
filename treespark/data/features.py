# SPDX-License-Identifier: Apache-2.0
"""Target features for training rows: computed for every batch, or read from a store once computed.

Which it is does not change what is trained. Both round taps alike where `data.taps_dtype` asks for
it, and the store leaves out only what training never reads (`feature_rows.py`). Shapes: S rows, L
padded length, m taps, H target hidden size.
"""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch

from treespark.data.feature_identity import Identity
from treespark.data.feature_rows import RowFeatures, RowLayout, row_key, rows_that_fit
from treespark.data.feature_store import FeatureStore
from treespark.sizes import readable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from treespark.data.batches import Row
    from treespark.data.feature_rows import Kept
    from treespark.recipe import DataSection
    from treespark.target.model import TargetModel

logger = logging.getLogger(__name__)

_READERS = 4


class FeatureSource(Protocol):
    """Where training gets the target's view of its rows."""

    def __call__(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Features [S, L, m*H] and post-norm last hidden states [S, L, H].

        Zero on padding; from a store also where training reads nothing.
        """
        ...

    def prefetch(self, rows: Sequence[Row]) -> None:
        """Begin to read what the next call will ask for, if it is on a disk."""
        ...


class OnlineFeatures:
    """Runs the target for every batch; needs no disk.

    One row at a time: the sums inside a matrix product depend on the number of rows, and a row's
    features must not depend on its neighbours.  taps_dtype: the rounding of `RowLayout`.
    """

    def __init__(self, target: TargetModel, taps_dtype: str = "plain") -> None:
        self._target, self.device = target, target.device
        num_taps = len(target.target_layer_ids)
        self._layout = RowLayout(num_taps, target.hidden_size, target.dtype, taps_dtype)

    def __call__(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """See FeatureSource."""
        return _batch(rows, [self.row(row) for row in rows])

    def prefetch(self, rows: Sequence[Row]) -> None:
        """See FeatureSource: nothing to read."""

    def row(self, row: Row) -> RowFeatures:
        """The view of one whole row, its taps rounded."""
        features, hidden = self.exact(row)
        return RowFeatures(self._layout.as_stored(features), hidden, 0)

    def exact(self, row: Row) -> tuple[Tensor, Tensor]:
        """Features [L, m*H] and last hidden states [L, H] of one row, as the target gives them."""
        input_ids = torch.from_numpy(row.token_ids)[None].to(self._target.device)
        with torch.no_grad():
            features, hidden = self._target.sequence_outputs(input_ids, [len(row.token_ids)])
        return features[0], hidden[0]


class StoredFeatures:
    """Reads rows from a store; of the missing ones it adds the `chosen` and computes the others.

    A context manager: leaving it writes the shard in work.  Threads read and check what is
    prefetched while the device computes: a step of eight rows of 70 MB (8B target, 1,500 tokens)
    would wait a quarter of a second for it, at the 2 GB/s of one core.
    """

    def __init__(self, store: FeatureStore, online: OnlineFeatures, chosen: Sequence[Row]) -> None:
        self.store, self.chosen = store, chosen
        self._online = online
        self._keys = {row_key(row) for row in chosen}
        self._pool = ThreadPoolExecutor(_READERS)
        self._soon: dict[str, Future[Kept | None]] = {}

    def __enter__(self) -> StoredFeatures:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self.store.flush()

    def __call__(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """See FeatureSource."""
        return _batch(rows, [self.row(row) for row in rows])

    def prefetch(self, rows: Sequence[Row]) -> None:
        """See FeatureSource."""
        for row in rows:
            if row in self.store and row_key(row) not in self._soon:
                self._soon[row_key(row)] = self._pool.submit(self.store.read, row)

    def row(self, row: Row) -> RowFeatures:
        """The view of one row."""
        soon = self._soon.pop(row_key(row), None)
        kept = self.store.read(row) if soon is None else soon.result()
        if kept is None and row_key(row) not in self._keys:
            return self._online.row(row)
        return self.store.layout.view(self.fill(row) if kept is None else kept, self._online.device)

    def fill(self, row: Row) -> Kept:
        """Return what the store has of a row, computing and adding it unless another process did.

        Raises UsageError where the disk takes no more.
        """
        self.store.refresh()
        kept = self.store.read(row)
        if kept is None:
            kept = self.store.layout.keep(row, *self._online.exact(row))
            self.store.add(row, kept)
        return kept


def _batch(rows: Sequence[Row], views: Sequence[RowFeatures]) -> tuple[Tensor, Tensor]:
    """The views of rows side by side, zeros where they hold nothing."""
    shape = (len(rows), max(len(row.token_ids) for row in rows))
    first = views[0]
    features = first.features.new_zeros(*shape, first.features.shape[-1])
    hidden = first.last_hidden.new_zeros(*shape, first.last_hidden.shape[-1])
    for i, view in enumerate(views):
        features[i, : len(view.features)] = view.features
        hidden[i, view.start : view.start + len(view.last_hidden)] = view.last_hidden
    return features, hidden


def stored_features(target: TargetModel, data: DataSection, rows: Sequence[Row]) -> StoredFeatures:
    """The recipe's store as a source of these rows; logs how large it gets.

    Raises UsageError for a store of another identity, and unless all rows that are to be added fit
    on the disk.
    """
    assert data.store is not None
    store = FeatureStore(data.store, Identity.of(target, data.taps_dtype))
    limit = data.store_bytes if data.features == "mixed" else None
    chosen = rows_that_fit(rows, store.layout, limit)
    missing = [row for row in chosen if row not in store]
    size, needed = (sum(map(store.layout.row_bytes, some)) for some in (chosen, missing))
    logger.info(
        "data.store %s: %s for %d of %d rows, %s of it missing (%d rows)",
        data.store,
        readable(size),
        len(chosen),
        len(rows),
        readable(needed),
        len(missing),
    )
    if missing:
        store.check_room(needed, len(missing))
    return StoredFeatures(store, OnlineFeatures(target, data.taps_dtype), chosen)


@contextlib.contextmanager
def feature_source(
    target: TargetModel, data: DataSection, rows: Sequence[Row]
) -> Iterator[FeatureSource]:
    """Hold the source that `data.features` names, for these rows; raises as `stored_features`."""
    if data.features == "online":
        yield OnlineFeatures(target, data.taps_dtype)
    else:
        with stored_features(target, data, rows) as source:
            yield source
