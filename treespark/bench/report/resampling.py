# SPDX-License-Identifier: Apache-2.0
"""How far a number would move with other prompts of the same kind: a paired bootstrap over prompts.

Repeats of greedy decoding repeat the same rounds, so their spread says nothing of the prompts. Each
resampling draws the prompts of every dataset anew, with replacement and the same for all methods,
and everything that is asked of it is computed from those draws.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from treespark.bench.report.results import Metric, Results

    Draws = NDArray[np.float64]

NUM_RESAMPLINGS = 1000
# 95 % of the resamplings lie between.
_PERCENTILES = (2.5, 97.5)


def resampled(
    results: Results, metric: Metric, datasets: Sequence[str], method: str, concurrency: int
) -> dict[str, Draws] | None:
    """Return the number of each dataset in every resampling, [S] each; None unless all are known.

    For metrics that are sums over prompts: acceptance, and the throughput of single requests.
    """
    rows = {name: _of_dataset(results, metric, name, method, concurrency) for name in datasets}
    known = {name: row for name, row in rows.items() if row is not None}
    return known if known and len(known) == len(rows) else None


def _of_dataset(
    results: Results, metric: Metric, dataset: str, method: str, concurrency: int
) -> Draws | None:
    cells = list(results.repeats(dataset, method, concurrency).values())
    names = sorted({name for cell in cells for name in cell.prompts})
    if not names:
        return None
    parts = [[cell.prompts[name] for cell in cells if name in cell.prompts] for name in names]
    above = np.array([sum(map(metric.numerator, part)) for part in parts], dtype=np.float64)
    below = np.array([sum(map(metric.denominator, part)) for part in parts], dtype=np.float64)
    draw = np.random.default_rng(zlib.crc32(dataset.encode()))
    picks = draw.integers(len(names), size=(NUM_RESAMPLINGS, len(names)))
    with np.errstate(invalid="ignore", divide="ignore"):
        values: Draws = above[picks].sum(1) / below[picks].sum(1)
    return values


def interval(values: Draws | Sequence[float]) -> tuple[float, float] | None:
    """Return the bounds of the middle 95 %; None where there is a resampling without a value."""
    if not np.isfinite(values).all():
        return None
    low, high = np.percentile(values, _PERCENTILES)
    return float(low), float(high)
