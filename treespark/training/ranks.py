# SPDX-License-Identifier: Apache-2.0
"""The processes of one training run: which of them this is, and sums over all of them."""

from __future__ import annotations

import contextlib
import datetime
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed

from treespark import device as devices
from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# Long enough for a slow disk to write a checkpoint while the others wait.
_TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True)
class Ranks:
    """This process is `rank` of `world_size`; every method but the properties is collective."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True for the one that writes files and shows progress."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return `values` summed over all ranks; the argument stays as it is."""
        if self.world_size == 1:
            return values
        total = values.detach().clone()
        distributed.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Return True if any rank says so."""
        if self.world_size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def wait(self) -> None:
        """Return when all ranks are here."""
        if self.world_size > 1:
            distributed.barrier()


@contextlib.contextmanager
def join(device: torch.device) -> Iterator[Ranks]:
    """Join the run that torchrun's environment describes; without one, be the only process.

    Raises UsageError for an environment that is incomplete.
    """
    if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1:
        yield Ranks(0, 1, device)
        return
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise UsageError(f"{missing[0]}: not set beside WORLD_SIZE; start with torchrun")
    started = not distributed.is_initialized()
    if started:
        distributed.init_process_group(devices.dist_backend(device), timeout=_TIMEOUT)
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size(), device)
    finally:
        if started:
            distributed.destroy_process_group()
