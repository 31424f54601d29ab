# SPDX-License-Identifier: Apache-2.0
"""Float32 master weights for a drafter that computes in a lower precision.

An update of 1e-4 is lost in a bfloat16 weight, so the optimizer works on float32 copies and the
rounded result is published to the model after every step.
"""

from __future__ import annotations

import torch
from torch import nn


class MasterWeights:
    """The parameters the optimizer sees, by name; the model's own when it is float32 already."""

    def __init__(self, model: nn.Module) -> None:
        self._compute = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self._compute.items()
        }

    def collect_gradients(self) -> None:
        """Move the model's gradients to the masters; a parameter without one stays untouched."""
        for name, master in self.parameters.items():
            parameter = self._compute[name]
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        for name, master in self.parameters.items():
            if master is not self._compute[name]:
                self._compute[name].copy_(master)
