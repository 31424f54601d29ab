# SPDX-License-Identifier: Apache-2.0
"""What the target saw on texts of its own: features for drafters that are replayed along them.

Shapes: L tokens of a row, m taps, H target hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from treespark.data.batches import Row
    from treespark.drafter.auto import AnyDrafter
    from treespark.target.model import TargetModel


@dataclass(frozen=True)
class Views:
    """Answers of a target and the outputs of its layers on them.

    outputs: (layer, row id) -> [1, L, H].
    """

    rows: Sequence[Row]
    outputs: dict[tuple[int, str], Tensor]

    def __call__(self, rows: Sequence[Row], layer_ids: Sequence[int]) -> Tensor:
        """Return features [1, L, m*H] of the only row."""
        return torch.cat([self.outputs[layer, rows[0].id] for layer in layer_ids], -1)


@dataclass(frozen=True)
class ViewedFeatures:
    """A FeatureSource of one row at a time, as a drafter with these taps sees it."""

    views: Views
    layer_ids: Sequence[int]

    def __call__(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """See FeatureSource; of the last hidden states, which only training reads, none."""
        features = self.views(rows, self.layer_ids)
        return features, features[..., :0]

    def prefetch(self, rows: Sequence[Row]) -> None:
        """See FeatureSource: nothing to read."""


def view(target: TargetModel, rows: Sequence[Row], layer_ids: Sequence[int]) -> Views:
    """Run the target over the rows, these layers tapped."""
    target.set_taps(layer_ids)
    outputs = {}
    for row in rows:
        ids = torch.from_numpy(row.token_ids)[None].to(target.device)
        features, _ = target.sequence_outputs(ids, [len(row.token_ids)])
        parts = features.split(target.hidden_size, -1)
        outputs |= {(layer, row.id): part for layer, part in zip(layer_ids, parts, strict=True)}
    return Views(rows, outputs)


def taps_of(drafter: AnyDrafter) -> list[int]:
    """Return the layers of the target that a loaded drafter sees."""
    taps = drafter.config.target_layer_ids
    assert taps is not None
    return taps
