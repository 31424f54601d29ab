# SPDX-License-Identifier: Apache-2.0
"""Verification by the operator tree_attention, as on a device with a kernel of it.

Here the operator's CPU form stands in for the kernel: what is checked is everything around it.
"""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import npu_ops
from tests.target.conftest import make_pair
from tests.target.test_tree_rounds import path_to, random_tree
from treespark.target.kv_cache import KVCache
from treespark.target.model import KERNEL_BLOCK
from treespark.tree.packed import PackedTree


class Calls(TorchDispatchMode):
    """Counts calls of tree_attention."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.treespark.tree_attention.default
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def wide(tiny_models, tmp_path_factory):
    """A tiny target whose heads have a size that the operator takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models.FAMILIES["qwen3"], "head_dim", 64)
        return make_pair(tiny_models, "qwen3", tmp_path_factory.mktemp("wide"))


@pytest.fixture
def with_kernel(monkeypatch):
    """Caches made from now on are those for a kernel."""
    monkeypatch.setattr(npu_ops, "has_kernel", lambda *_: True)


def caches(wide, monkeypatch, num_slots=3, max_len=150):
    """One cache as on a CPU and one as for a kernel, rows of both NaN until they are written."""
    plain = wide.ours.new_cache(num_slots, max_len)
    with monkeypatch.context() as patch:
        patch.setattr(npu_ops, "has_kernel", lambda *_: True)
        blocked = wide.ours.new_cache(num_slots, max_len)
    assert (plain.block_size, blocked.block_size) == (0, KERNEL_BLOCK)
    for cache in (plain, blocked):
        for rows in (*cache.keys, *cache.values):
            rows.fill_(float("nan"))
    return plain, blocked


def test_rounds_by_the_operator_equal_those_without(wide, monkeypatch, random_ids, close):
    both = caches(wide, monkeypatch)
    rng, slots, texts = random.Random(3), [2, 0], [random_ids(9, seed=5), random_ids(70, seed=6)]
    for cache in both:
        for slot, text in zip(slots, texts, strict=True):
            wide.ours.prefill(cache, slot, 0, torch.tensor(text))
    lengths = [len(text) for text in texts]
    for _ in range(6):
        trees = [random_tree(rng.choice([0, 3, 8, 20]), rng) for _ in texts]
        batch = PackedTree.from_parents([t for t, _ in trees], [p for _, p in trees])
        with Calls() as plain_calls:
            expected = wide.ours.verify(batch, both[0], slots, lengths)
        with Calls() as calls:
            found = wide.ours.verify(batch, both[1], slots, lengths)
        assert (plain_calls.number, calls.number) == (0, wide.ours.num_layers)
        close(found.logits, expected.logits)
        close(found.features, expected.features)
        assert not found.logits[~batch.valid].any()
        assert not found.features[~batch.valid].any()
        paths = [path_to(rng.randrange(len(tokens)), parents) for tokens, parents in trees]
        for cache in both:
            wide.ours.commit(cache, slots, lengths, paths)
        lengths = [n + len(path) for n, path in zip(lengths, paths, strict=True)]


def test_a_round_of_anchors_alone_is_a_round_too(wide, monkeypatch, random_ids, close):
    plain, blocked = caches(wide, monkeypatch)
    for cache in (plain, blocked):
        wide.ours.prefill(cache, 1, 0, torch.tensor(random_ids(12)))
    tree = PackedTree.root_only(torch.tensor([65]))
    found = wide.ours.verify(tree, blocked, [1], [12])
    close(found.logits, wide.ours.verify(tree, plain, [1], [12]).logits)


def test_a_tree_beyond_the_operators_rows_is_verified_all_the_same(
    wide, monkeypatch, random_ids, close
):
    plain, blocked = caches(wide, monkeypatch, max_len=200)
    for cache in (plain, blocked):
        wide.ours.prefill(cache, 0, 0, torch.tensor(random_ids(7)))
    tokens, parents = random_tree(130, random.Random(1))
    tree = PackedTree.from_parents([tokens], [parents])
    with Calls() as calls:
        found = wide.ours.verify(tree, blocked, [0], [7])
    assert calls.number == 0
    close(found.logits, wide.ours.verify(tree, plain, [0], [7]).logits)


def test_trees_that_do_not_fit_behind_the_prefix_are_our_own_bug(wide, with_kernel, random_ids):
    cache = wide.ours.new_cache(1, 16)
    wide.ours.prefill(cache, 0, 0, torch.tensor(random_ids(10)))
    tree = PackedTree.from_parents([random_ids(10)], [[-1, *range(9)]])
    with pytest.raises(AssertionError):
        wide.ours.verify(tree, cache, [0], [10])


@pytest.mark.parametrize("block_size", [16, 128])
def test_blocks_are_views_of_the_slots_rows(block_size):
    cache = KVCache(2, 3, 2, 40, 4, dtype=torch.float32, device="cpu", block_size=block_size)
    keys = torch.randn(1, 2, 5, 4)
    cache.write(1, 2, 17, keys, keys + 1)
    blocks, values = cache.blocks(1)
    table = cache.block_table([2])
    rows = blocks[table[0].long()].flatten(0, 1)
    assert torch.equal(rows[17:22].transpose(0, 1), keys[0])
    rows = values[table[0].long()].flatten(0, 1)
    assert torch.equal(rows[17:22].transpose(0, 1), keys[0] + 1)
    assert blocks.data_ptr() == cache.keys[1].data_ptr()


def test_a_cache_without_a_kernel_has_no_blocks(wide):
    assert wide.ours.new_cache(1, 8).block_size == 0
