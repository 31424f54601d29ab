# SPDX-License-Identifier: Apache-2.0
"""The losses need a fraction of the memory of the eager reference and give the same gradients."""

import dataclasses
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
from treespark.bench.flops import flop_counter

SMALL = Sizes(blocks=64, vocab=2048, hidden=16, rank=8, tree_anchors=16, tokens=160, chunk_rows=16)


def measured(method, keep_logits=False):
    inputs = given_blocks(SMALL)
    gc.collect()
    with LiveBytes() as live:
        loss, grads = gradients(*inputs, method, SMALL.objective(keep_logits))
    return live.peak, loss, grads


def test_losses_need_an_eighth_of_the_memory_of_the_eager_reference():
    assert measured("treespark")[0] < measured("eager")[0] / 8


def flops(method, sizes, keep_logits):
    """FLOPs of all matrix products of losses and gradients."""
    inputs = given_blocks(sizes)
    with flop_counter() as counted:
        gradients(*inputs, method, sizes.objective(keep_logits))
    return counted.get_total_flops()


# By the operator, and beyond its limits from logits of every parent.
@pytest.mark.parametrize("rank", [16, 8])
@pytest.mark.parametrize("keep_logits", [False, True])
def test_trees_cost_four_markov_products_and_no_product_with_the_head(keep_logits, rank):
    """One product chooses the children, three more have the gradients: anew, and two backwards."""
    sizes = dataclasses.replace(SMALL, rank=rank)
    more = flops("treespark", sizes, keep_logits) - flops("dspark", sizes, keep_logits)
    parents = sizes.tree_anchors * (1 + 6 * 4)
    markov = 2 * sizes.vocab * 4 * parents * rank
    # the teacher's logits, kept or computed again
    teacher = 2 * sizes.vocab * sizes.hidden * sizes.tree_anchors * sizes.depth * (not keep_logits)
    # logits of the 4 children and 4 covered tokens of each parent
    chosen = 2 * parents * 8 * (sizes.hidden + rank)
    assert more == markov + teacher + chosen


@pytest.mark.parametrize("keep_logits", [False, True])
def test_gradients_are_those_of_the_eager_reference(keep_logits):
    _, loss, grads = measured("treespark", keep_logits)
    _, expected_loss, expected = measured("eager")
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert largest_difference(grads, expected) < GRADIENT_AIM
