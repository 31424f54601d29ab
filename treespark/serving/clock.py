# SPDX-License-Identifier: Apache-2.0
"""Where the time of a round goes: one running clock whose laps belong to named phases."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from treespark.device import synchronize

if TYPE_CHECKING:
    import torch

PHASES = ("prefill", "draft", "expand", "verify", "commit", "host")


class PhaseClock:
    """Laps of one thread, summed per phase; they leave no gap, so they add up to the whole.

    A disabled clock costs one comparison per mark. An enabled one waits for the device at every
    mark, so that queued work is charged to the phase that queued it.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        """Start with every phase at zero seconds."""
        self.enabled = enabled
        self._device = device
        self._last_s = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget all laps."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.num_rounds = 0
        self.num_rows = 0

    def start(self) -> None:
        """Begin the first lap now."""
        if self.enabled:
            synchronize(self._device)
            self._last_s = time.perf_counter()

    def mark(self, phase: str) -> None:
        """End the current lap, charge it to `phase` and begin the next one."""
        if self.enabled:
            synchronize(self._device)
            now_s = time.perf_counter()
            self.seconds[phase] += now_s - self._last_s
            self._last_s = now_s

    def count_round(self, num_rows: int) -> None:
        """Note one round of `num_rows` requests."""
        self.num_rounds += 1
        self.num_rows += num_rows
