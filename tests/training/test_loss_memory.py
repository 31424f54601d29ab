# SPDX-License-Identifier: Apache-2.0
"""The losses need a fraction of the memory of the eager reference and give the same gradients."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class HeadRows(TorchDispatchMode):
    """Counts the rows that are multiplied by the head, either way round."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        sizes = {SMALL.vocab, SMALL.hidden}
        if func is torch.ops.aten.mm.default and set(args[1].shape) == sizes:
            self.rows += args[0].shape[0]
        return func(*args, **(kwargs or {}))


def head_rows(method, keep_logits):
    inputs = given_blocks(SMALL)
    with HeadRows() as counted:
        gradients(*inputs, method, SMALL.objective(keep_logits))
    return counted.rows


def test_with_kept_logits_trees_multiply_next_to_nothing_by_the_head():
    plain = head_rows("dspark", keep_logits=True)
    assert plain > 2 * SMALL.blocks * SMALL.depth * 0.8
    # Only depths beyond the end of the row, which trees grow into and other losses leave out.
    assert head_rows("treespark", keep_logits=True) < 1.1 * plain
    assert head_rows("treespark", keep_logits=False) > 1.2 * head_rows("dspark", keep_logits=False)


@pytest.mark.parametrize("keep_logits", [False, True])
def test_gradients_are_those_of_the_eager_reference(keep_logits):
    _, loss, grads = measured("treespark", keep_logits)
    _, expected_loss, expected = measured("eager")
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert largest_difference(grads, expected) < GRADIENT_AIM
