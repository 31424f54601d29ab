# SPDX-License-Identifier: Apache-2.0
"""The losses need a fraction of the memory of the eager reference and give the same gradients."""

import gc

import pytest

from tests.training.live_bytes import LiveBytes
from tools.bench_losses import (
    GRADIENT_AIM,
    Sizes,
    given_blocks,
    gradients,
    largest_difference,
)

SMALL = Sizes(blocks=64, vocab=2048, hidden=16, rank=8, tree_anchors=16, tokens=160, chunk_rows=16)


def measured(method, keep_logits=False):
    inputs = given_blocks(SMALL)
    gc.collect()
    with LiveBytes() as live:
        loss, grads = gradients(*inputs, method, SMALL.objective(keep_logits))
    return live.peak, loss, grads


def test_losses_need_an_eighth_of_the_memory_of_the_eager_reference():
    assert measured("treespark")[0] < measured("eager")[0] / 8


@pytest.mark.parametrize("keep_logits", [False, True])
def test_gradients_are_those_of_the_eager_reference(keep_logits):
    _, loss, grads = measured("treespark", keep_logits)
    _, expected_loss, expected = measured("eager")
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert largest_difference(grads, expected) < GRADIENT_AIM
