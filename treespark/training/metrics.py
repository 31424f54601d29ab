# SPDX-License-Identifier: Apache-2.0
"""What a step measured, summed over micro-batches and ranks, and written as one JSON line."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

import torch

from treespark.data.jsonl import iter_jsonl, named_if_full, write_atomic
from treespark.errors import UsageError
from treespark.training.losses import normalise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from treespark.training.losses import LossTerm
    from treespark.training.ranks import Ranks


METRICS = "metrics.jsonl"
COUNTERS = ("overlap", "survival_mass", "greedy_hit", "reference_hit")


class StepSums:
    """Loss values and per-depth diagnostics of a step, added up over micro-batches and ranks.

    losses: names of all terms.  depth: B.  A name that no rank added is left out of the result.
    """

    def __init__(self, losses: Sequence[str], depth: int) -> None:
        self._values = {name: torch.zeros(2, dtype=torch.float64) for name in losses}
        self._counters = {name: torch.zeros(2, depth, dtype=torch.float64) for name in COUNTERS}

    def add(self, values: Mapping[str, Tensor], counters: Mapping[str, LossTerm]) -> None:
        """Add one micro-batch: its share of each loss, and its pairs."""
        for name, value in values.items():
            self._values[name] += torch.tensor([float(value), 1.0], dtype=torch.float64)
        for name, pair in counters.items():
            self._counters[name] += torch.stack([pair.numerator, pair.denominator]).detach().cpu()

    def over(self, ranks: Ranks, weights: Mapping[str, float]) -> dict[str, Any]:
        """Return the loss, its terms, and the diagnostics as lists of B ratios; collective."""
        parts = [*self._values.values(), *self._counters.values()]
        flat = torch.cat([part.flatten() for part in parts]).float().to(ranks.device)
        sums = ranks.sum(flat).cpu().split([part.numel() for part in parts])
        values = dict(zip(self._values, sums, strict=False))
        present = {name: float(pair[0]) for name, pair in values.items() if pair[1] > 0}
        counters = {
            name: [round(x, 5) for x in normalise(*pair.view(2, -1)).tolist()]
            for name, pair in zip(self._counters, sums[len(values) :], strict=True)
            if pair.view(2, -1)[1].any()
        }
        loss = sum(weights[name] * value for name, value in present.items())
        return {"loss": loss, **present, **counters}


class MetricsLog:
    """Appends {"step": n, ...} lines; a line is with the operating system when `add` returns.

    Lines of `first_step` and later, found on opening, belong to work that will be redone and go.
    earlier: the file that has the lines before, where another run took these steps.
    Use as a context manager, or call `close`.
    """

    def __init__(self, path: Path, *, first_step: int, earlier: Path | None = None) -> None:
        kept = [line for line in read_metrics(earlier or path) if line["step"] < first_step]
        # What killed runs left; nobody else writes here.
        for partial in path.parent.glob(f".{path.name}.*.tmp"):
            partial.unlink()
        write_atomic(path, [_encode(line) for line in kept])
        self._path = path
        self._file = path.open("ab", buffering=0)

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Write one line; numbers that are not finite become null, which JSON can say.

        Raises UsageError where the disk is full.
        """
        line = _encode({"step": step, **values})
        with named_if_full(self._path):
            while line:
                line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Wait until every line is on the disk, as a checkpoint that counts on them needs."""
        with named_if_full(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file; a last line cut by a kill is left out.

    Raises UsageError, naming the line, for a file that holds anything else.
    """
    if not path.exists():
        return []
    lines = [line for _, line in iter_jsonl(path, ignore_tail=True)]
    for number, line in enumerate(lines, 1):
        if type(line.get("step")) is not int:
            raise UsageError(f"{path}:{number}: not the metrics of a training run (no step)")
    return lines


def _encode(line: dict[str, Any]) -> bytes:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }
    return (json.dumps(finite) + "\n").encode()
