# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weight is stored once in the blocked order that oneDNN's matrix product
reads.

With a plain weight oneDNN reorders or strides over it in every call, which costs most of the time
of a forward of few rows. Measured on 2 Zen 4 cores with SmolLM2-135M's 210 layers and head,
products only: 9 rows 75 -> 25 ms in float32 and 30 -> 16 ms in bfloat16, 1 row 24 -> 14 ms in
bfloat16, 33 rows 113 -> 56 and 47 -> 32 ms. A row's result also no longer depends on how many rows
share the call, which plain float32 products do not promise. Inference only: there is no gradient,
and the plain weight is given up unless somebody else holds it.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from treespark.device import has_bfloat16_products

logger = logging.getLogger(__name__)

# The order that is best for about this many rows is also good for 1 and for 512.
_ROWS_HINT = 16


class PrepackedLinear(nn.Module):
    """An inference-only nn.Linear [in] -> [out] with a prepacked weight; input [..., in], same
    dtype as the weight.

    Raises RuntimeError or NotImplementedError where oneDNN cannot pack this weight.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Not a buffer: an opaque tensor can be neither copied to a device nor saved.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self._product(x, self._packed, self._bias, "none", [], "")

    @property
    def packed(self) -> Tensor:
        """The weight [out, in] in its blocked order: opaque but for shape, dtype and device."""
        return self._packed

    def extra_repr(self) -> str:
        """Sizes, as nn.Linear prints them."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def can_prepack(weight: Tensor) -> str | None:
    """None when weights like this one can be prepacked here, else the reason."""
    if weight.device.type != "cpu":
        return f"weights are on {weight.device.type}"
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return "this torch has no oneDNN, or it is switched off"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {weight.dtype}"
    if weight.dtype == torch.bfloat16 and not has_bfloat16_products():
        return "this processor has no bfloat16 instructions oneDNN could use"
    return None


def prepack_linears(module: nn.Module) -> int:
    """Replace every nn.Linear inside `module` by a PrepackedLinear and return how many were
    replaced.

    Where that is not possible nothing changes, the reason is logged, and 0 is returned.
    """
    names = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
    ]
    linears = [(parent, name, child) for parent, name, child in names if type(child) is nn.Linear]
    if not linears:
        return 0
    reason = can_prepack(linears[0][2].weight)
    if reason is None:
        try:
            PrepackedLinear(linears[0][2])
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            reason = str(error).splitlines()[0]
    if reason is not None:
        logger.info("linear layers stay as they are: %s", reason)
        return 0
    for parent, name, child in linears:
        setattr(parent, name, PrepackedLinear(child))
    return len(linears)
