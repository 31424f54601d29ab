# SPDX-License-Identifier: Apache-2.0
"""Drawing one token from logits, as a pure function of the logits, the request and a number.

Shapes: V vocabulary.

A request's draws come from its own stream, a hash of its seed and the number of the token, so they
depend neither on what is decoded beside it nor on how often a round is repeated.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from treespark.tree.policy import ordered_topk

if TYPE_CHECKING:
    from torch import Tensor

    from treespark.serving.params import SamplingParams


def uniform(seed: int, number: int) -> float:
    """Return draw `number` of stream `seed`: one of 2**24 evenly spaced values in [0, 1).

    Each is a float32 exactly, and times any sum of probabilities it stays below that sum.
    """
    digest = blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 40) / 2**24


def sample_token(logits: Tensor, params: SamplingParams, draw: float) -> Tensor:
    """Return the token [] int64 at `draw` in [0, 1) of the distribution that `params` leaves.

    logits: [V] float32.  The temperature applies first, then min_p, then top_k, then top_p to what
    is left; equal tokens enter by id. The tokens then share [0, 1) by their probabilities. Does not
    wait for the device. A row with NaN yields some token. Source: order of vLLM's sampler.
    """
    # At most 0 before the division, so that no temperature overflows to +inf; what is colder than
    # the limit would be 0 in float32.
    scaled = (logits - logits.max()) / max(params.temperature, 1e-30)
    if params.min_p > 0:
        scaled = scaled.masked_fill(scaled < math.log(params.min_p), -torch.inf)
    ids = None
    if 0 < params.top_k < logits.shape[-1]:
        scaled, ids = ordered_topk(scaled, params.top_k)
    elif params.top_p < 1:
        scaled, ids = scaled.sort(descending=True, stable=True)
    probs = scaled.softmax(-1)
    if params.top_p < 1:
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= params.top_p, 0.0)
    ends = probs.cumsum(-1)
    at = (ends <= draw * ends[-1]).sum().clamp_max(ends.shape[-1] - 1)
    return at if ids is None else ids[at]
