# SPDX-License-Identifier: Apache-2.0
"""From gradients to new weights: what the loop needs of an optimizer, and the plain one.

The optimizer works on float32 copies of the weights ("masters"), because an update of 1e-4 is lost
in a bfloat16 weight; the rounded result goes back to the model after every step. The other
implementation, treespark.training.zero, lets DeepSpeed keep the masters and spread them.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

if TYPE_CHECKING:
    from collections.abc import Callable

    from treespark.recipe import OptimSection
    from treespark.training.ranks import Ranks

Tensors = dict[str, Tensor]


class Updates(Protocol):
    """Gradients in, weights out.

    A step is `num_micro_batches` times `backward`, then one `step`. Gradients are the mean over
    ranks and micro-batches, so a loss that is to be summed comes multiplied by both counts.
    """

    num_micro_batches: int

    def backward(self, loss: Callable[[], Tensor]) -> Tensor:
        """Compute a micro-batch's loss, add its gradients, return the loss detached."""

    def step(self, rate: float) -> float:
        """Update at this learning rate; return the gradients' norm before clipping.

        Where it is not finite nothing changes, on no rank. Gradients are gone afterwards.
        """

    def state(self) -> tuple[Tensors, Tensors]:
        """Return whole float32 weights and optimizer tensors ("key/name") on the CPU; collective.

        Only the first rank needs to get them.
        """

    def restore(
        self, weights: Tensors, optimizer: Tensors, first_loss: Callable[[], Tensor]
    ) -> None:
        """Continue from such a state.  first_loss: any loss of the coming micro-batches."""

    def whole_weights(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model holds its whole weights, for use outside `backward`."""


def adamw(parameters: list[nn.Parameter], optim: OptimSection) -> torch.optim.AdamW:
    """Return the optimizer that every implementation uses."""
    return torch.optim.AdamW(
        parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )


class PlainUpdates:
    """Every rank holds everything; gradients are averaged in float32."""

    def __init__(
        self, model: nn.Module, optim: OptimSection, ranks: Ranks, num_micro_batches: int
    ) -> None:
        self.num_micro_batches = num_micro_batches
        self._ranks, self._clip = ranks, optim.grad_clip
        self._compute = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self._compute.items()
        }
        self._optimizer = adamw(list(self._masters.values()), optim)

    def backward(self, loss: Callable[[], Tensor]) -> Tensor:
        """See Updates; gradients of micro-batches add up in float32."""
        value = loss()
        value.backward()
        for name, master in self._masters.items():
            parameter = self._compute[name]
            if master is not parameter and parameter.grad is not None:
                grad = parameter.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                parameter.grad = None
        return value.detach()

    def step(self, rate: float) -> float:
        """See Updates."""
        self._average()
        norm = float(clip_grad_norm_(self._masters.values(), self._clip))
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._publish()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _average(self) -> None:
        """Take the mean over ranks and micro-batches.

        A parameter without gradient counts as zero, on one rank as on all: then every parameter has
        taken equally many steps, as with optimizers that keep them in one flat tensor.
        """
        count = self._ranks.world_size * self.num_micro_batches
        for master in self._masters.values():
            grad = torch.zeros_like(master) if master.grad is None else master.grad
            master.grad = self._ranks.sum(grad).div_(count)

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the masters into the model."""
        for name, master in self._masters.items():
            if master is not self._compute[name]:
                self._compute[name].copy_(master)

    def state(self) -> tuple[Tensors, Tensors]:
        """See Updates."""
        optimizer = {
            f"{key}/{name}": torch.as_tensor(value).detach().cpu().clone()
            for name, master in self._masters.items()
            for key, value in self._optimizer.state.get(master, {}).items()
        }
        return {n: p.detach().cpu().contiguous() for n, p in self._masters.items()}, optimizer

    def restore(
        self, weights: Tensors, optimizer: Tensors, first_loss: Callable[[], Tensor]
    ) -> None:
        """See Updates."""
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(weights[name])
        for full_name, value in optimizer.items():
            key, name = full_name.split("/", 1)
            master = self._masters[name]
            where = torch.device("cpu") if key == "step" else master.device
            self._optimizer.state[master][key] = value.to(where)
        self._publish()

    def whole_weights(self) -> contextlib.AbstractContextManager[None]:
        """See Updates; they always are."""
        return contextlib.nullcontext()
