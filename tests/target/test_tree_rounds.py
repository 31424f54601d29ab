# SPDX-License-Identifier: Apache-2.0
"""Tree rounds: what a node sees, where it sits, and what commit leaves behind."""

import random

import pytest
import torch

from treespark.target.kv_cache import KVCache
from treespark.target.model import Segment
from treespark.tree.packed import PackedTree

# Node 0 is the anchor; two nodes share token and depth under different parents (4 and 6).
PARENTS = [-1, 0, 0, 1, 1, 2, 2, 3, 5, 5]
PROMPT_LEN = 13


def random_tree(num_nodes: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Tokens and parents in packed order (by depth), siblings with distinct tokens."""
    depths, parents = [0], [-1]
    for node in range(1, num_nodes + 1):
        # The parents of a depth-ordered tree never lie before those of earlier nodes.
        low = max(parents[-1], 0)
        parents.append(rng.randrange(low, min(node, low + 3)))
        depths.append(depths[parents[-1]] + 1)
    tokens = [rng.randrange(256)]
    for node in range(1, num_nodes + 1):
        taken = {tokens[i] for i in range(1, node) if parents[i] == parents[node]}
        tokens.append(rng.choice([t for t in range(256) if t not in taken]))
    return tokens, parents


def path_to(node: int, parents: list[int]) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def prefilled(pair, new_cache, ids, num_slots=1, slot=0, max_len=128):
    cache = new_cache(pair.ours, num_slots, max_len)
    pair.ours.prefill(cache, slot, 0, torch.tensor(ids))
    return cache


def test_node_logits_and_features_equal_its_unrolled_path(pair, poisoned, random_ids, close):
    prompt, tokens = random_ids(PROMPT_LEN), random_ids(len(PARENTS), seed=1)
    tokens[6] = tokens[4]
    cache = prefilled(pair, poisoned, prompt)
    tree = PackedTree.from_parents([tokens], [PARENTS])
    out = pair.ours.verify(tree, cache, [0], [PROMPT_LEN])
    for node in range(len(PARENTS)):
        unrolled = prompt + [tokens[i] for i in path_to(node, PARENTS)]
        close(out.logits[0, node], pair.logits(unrolled)[-1])
        close(out.features[0, node], pair.features(unrolled)[-1])


def test_node_position_is_prefix_plus_depth(qwen3, poisoned, random_ids, monkeypatch):
    cache, seen = prefilled(qwen3, poisoned, random_ids(PROMPT_LEN)), []
    run = qwen3.ours._run
    monkeypatch.setattr(
        qwen3.ours,
        "_run",
        lambda ids, positions, plan: (seen.append(positions), run(ids, positions, plan))[1],
    )
    tree = PackedTree.from_parents([random_ids(len(PARENTS))], [PARENTS])
    qwen3.ours.verify(tree, cache, [0], [PROMPT_LEN])
    depths = [len(path_to(node, PARENTS)) - 1 for node in range(len(PARENTS))]
    assert seen[0].tolist() == [PROMPT_LEN + depth for depth in depths]


def test_other_branches_do_not_change_a_node(pair, poisoned, random_ids):
    cache, tokens = prefilled(pair, poisoned, random_ids(PROMPT_LEN)), random_ids(10, seed=2)
    before = pair.ours.verify(
        PackedTree.from_parents([tokens], [PARENTS]), cache, [0], [PROMPT_LEN]
    )
    for node in range(1, len(PARENTS)):
        changed = list(tokens)
        changed[node] = (tokens[node] + 1) % 256
        tree = PackedTree.from_parents([changed], [PARENTS])
        after = pair.ours.verify(tree, cache, [0], [PROMPT_LEN])
        for other in range(len(PARENTS)):
            is_below = node in path_to(other, PARENTS)
            same = torch.equal(before.logits[0, other], after.logits[0, other])
            assert same != is_below, (node, other)


def test_trees_of_different_size_in_a_batch_equal_single_rounds(pair, poisoned, random_ids, close):
    sizes, lengths, slots = [4, 0, 9, 32], [3, 20, 1, 11], [2, 0, 3, 1]
    rng, cache = random.Random(4), poisoned(pair.ours, 4, 60)
    trees = [random_tree(size, rng) for size in sizes]
    prompts = [random_ids(n, seed=n) for n in lengths]
    for slot, prompt in zip(slots, prompts, strict=True):
        pair.ours.prefill(cache, slot, 0, torch.tensor(prompt))
    batch = PackedTree.from_parents([t for t, _ in trees], [p for _, p in trees])
    out = pair.ours.verify(batch, cache, slots, lengths)
    assert out.logits.shape == (4, 33, pair.ours.vocab_size)
    for i, (tokens, parents) in enumerate(trees):
        num_rows = len(tokens)
        for node in range(num_rows):
            logits = pair.logits(prompts[i] + [tokens[j] for j in path_to(node, parents)])[-1]
            close(out.logits[i, node], logits)
            assert out.logits[i, node].argmax() == logits.argmax()
        assert not out.logits[i, num_rows:].any()
        assert not out.features[i, num_rows:].any()


@pytest.mark.parametrize("num_columns", [8, 256])
def test_a_rectangle_of_trees_equals_trees_one_by_one(
    pair, random_ids, close, monkeypatch, num_columns
):
    """Accelerators' layout: same logits, features and cache rows, whatever stale rows hold."""
    sizes, lengths, slots = [4, 0, 9, 20], [3, 20, 1, 11], [2, 0, 3, 1]
    rng, outs, caches = random.Random(4), [], []
    trees = [random_tree(size, rng) for size in sizes]
    batch = PackedTree.from_parents([t for t, _ in trees], [p for _, p in trees])
    monkeypatch.setattr("treespark.target.padded._COLUMNS", num_columns)
    for runs_padding in (False, True):
        monkeypatch.setattr(pair.ours, "runs_padding", runs_padding)
        cache = pair.ours.new_cache(5, 50)
        for rows in (*cache.keys, *cache.values):
            rows.fill_(1e3)
        for slot, length in zip(slots, lengths, strict=True):
            pair.ours.prefill(cache, slot, 0, torch.tensor(random_ids(length, seed=length)))
        outs.append(pair.ours.verify(batch, cache, slots, lengths))
        caches.append(cache)
    for i, size in enumerate(sizes):
        close(outs[1].logits[i, : size + 1], outs[0].logits[i, : size + 1])
        close(outs[1].features[i, : size + 1], outs[0].features[i, : size + 1])
        for loop, rectangle in zip(
            (*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True
        ):
            end = lengths[i] + size + 1
            close(rectangle[slots[i], :, :end], loop[slots[i], :, :end])
    assert outs[1].logits.isfinite().all()
    # A slot that took no part is as it was.
    assert (caches[1].keys[0][4] == 1e3).all()


def test_root_only_tree_is_a_plain_decode_step(pair, poisoned, random_ids, close):
    prompt = random_ids(PROMPT_LEN)
    cache = prefilled(pair, poisoned, prompt)
    tree = PackedTree.root_only(torch.tensor([65]))
    out = pair.ours.verify(tree, cache, [0], [PROMPT_LEN])
    close(out.logits[0, 0], pair.logits([*prompt, 65])[-1])


@pytest.mark.parametrize("path", [[0, 5, 19], [1], [], [3, 7, 12, 20], [0, 1, 2], [0], [0, 1, 5]])
def test_commit_moves_exactly_the_path(path):
    cache = KVCache(3, 4, 2, 40, 5, dtype=torch.float32, device="cpu")
    for rows in (*cache.keys, *cache.values):
        rows.normal_()
    before = [rows.clone() for rows in (*cache.keys, *cache.values)]
    cache.commit([2], [11], [path])
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        expected = old.clone()
        for j, node in enumerate(path):
            expected[2, :, 11 + j] = old[2, :, 11 + node]
        # Rows behind the committed ones are free: only those before and the path are promised.
        end = 11 + len(path)
        assert torch.equal(new[2, :, :end], expected[2, :, :end])
        assert torch.equal(new[[0, 1, 3]], old[[0, 1, 3]])


def test_commit_of_a_batch_equals_commits_one_by_one():
    paths, slots, lengths = [[0, 5, 19], [], [0], [0, 3, 7, 12, 20]], [3, 1, 0, 2], [4, 0, 9, 1]
    caches = [KVCache(2, 4, 2, 32, 3, dtype=torch.float32, device="cpu") for _ in range(2)]
    for rows in zip(
        (*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True
    ):
        rows[0].normal_()
        rows[1].copy_(rows[0])
    caches[0].commit(slots, lengths, paths)
    for i in range(4):
        caches[1].commit(slots[i : i + 1], lengths[i : i + 1], paths[i : i + 1])
    pairs = zip(
        (*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("path", [[0, 5, 5], [0, 7, 3], [-1, 2]])
def test_commit_of_a_path_out_of_order_is_our_own_bug(path):
    cache = KVCache(1, 1, 1, 16, 2, dtype=torch.float32, device="cpu")
    with pytest.raises(AssertionError):
        cache.commit([0], [2], [path])


class BitmapCache(KVCache):
    """The oracle: nothing is ever moved. Rows get new places; a map says which are committed."""

    def __init__(self, target, num_slots: int, max_len: int) -> None:
        model = target.new_cache(1, 1)
        _, num_heads, _, head_dim = model.keys[0].shape
        super().__init__(
            len(model.keys),
            num_slots,
            num_heads,
            max_len,
            head_dim,
            dtype=target.dtype,
            device="cpu",
        )
        self.places: list[list[int]] = [[] for _ in range(num_slots)]
        self.end = [0] * num_slots

    def write(self, layer, slot, start, keys, values):
        """Rows behind `start` committed ones, at places never used before."""
        num_rows, end = keys.shape[2], self.end[slot]
        assert start <= len(self.places[slot])
        super().write(layer, slot, end, keys, values)
        visible = self.places[slot][:start] + list(range(end, end + num_rows))
        if layer == len(self.keys) - 1:
            self.tentative = getattr(self, "tentative", {})
            self.tentative[slot] = list(range(end, end + num_rows))
            self.end[slot] += num_rows
        return self.keys[layer][slot : slot + 1, :, visible], self.values[layer][
            slot : slot + 1, :, visible
        ]

    def commit(self, slots, lengths, paths):
        for slot, length, path in zip(slots, lengths, paths, strict=True):
            assert length == len(self.places[slot])
            self.places[slot] += [self.tentative[slot][node] for node in path]


def test_many_rounds_equal_sequential_decoding_and_the_bitmap_oracle(
    pair, poisoned, random_ids, close
):
    rng, slots, prompts = random.Random(7), [1, 0], [random_ids(9, seed=5), random_ids(4, seed=6)]
    texts = [list(p) for p in prompts]
    moved, marked = poisoned(pair.ours, 2, 256), BitmapCache(pair.ours, 2, 512)
    for cache in (moved, marked):
        for slot, prompt in zip(slots, prompts, strict=True):
            pair.ours.prefill(cache, slot, 0, torch.tensor(prompt))
        # A prompt is committed as a whole: its rows are the path 0, 1, 2, ...
        if cache is marked:
            cache.commit(slots, [0, 0], [list(range(len(p))) for p in prompts])
    for _ in range(25):
        lengths = [len(text) for text in texts]
        trees = [random_tree(rng.choice([0, 3, 8, 20]), rng) for _ in texts]
        batch = PackedTree.from_parents([t for t, _ in trees], [p for _, p in trees])
        out = pair.ours.verify(batch, moved, slots, lengths)
        close(pair.ours.verify(batch, marked, slots, lengths).logits, out.logits)
        paths = [path_to(rng.randrange(len(tokens)), parents) for tokens, parents in trees]
        for cache in (moved, marked):
            pair.ours.commit(cache, slots, lengths, paths)
        for text, (tokens, _), path in zip(texts, trees, paths, strict=True):
            text += [tokens[node] for node in path]
    sequential = poisoned(pair.ours, 2, 256)
    for i, (slot, text) in enumerate(zip(slots, texts, strict=True)):
        for at, token in enumerate(text):
            segment = Segment(slot, at, torch.tensor([token]), torch.tensor([at]))
            pair.ours.forward_rows([segment], sequential, logits="none")
        for ours, theirs in zip(
            (*moved.keys, *moved.values), (*sequential.keys, *sequential.values), strict=True
        ):
            close(ours[slot, :, : len(text)], theirs[slot, :, : len(text)])
        probe = Segment(slot, len(text), torch.tensor([i]), torch.tensor([len(text)]))
        close(pair.ours.forward_rows([probe], moved).logits[0], pair.logits([*text, i])[-1])


def test_tree_over_max_len_is_caught_before_it_writes(qwen3, random_ids):
    cache = qwen3.ours.new_cache(1, 16)
    qwen3.ours.prefill(cache, 0, 0, torch.tensor(random_ids(10)))
    tree = PackedTree.from_parents([random_ids(10)], [PARENTS])
    with pytest.raises(AssertionError):
        qwen3.ours.verify(tree, cache, [0], [10])
