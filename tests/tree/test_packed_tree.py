# SPDX-License-Identifier: Apache-2.0
"""PackedTree's derived arrays agree with walking the parents."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tree.tree_oracle import path_to, random_tree
from treespark.tree import PackedTree


def _random_trees(seed, num_requests, max_nodes, max_depth):
    generator = torch.Generator().manual_seed(seed)
    trees = [
        random_tree(
            generator, int(torch.randint(max_nodes + 1, (), generator=generator)), max_depth, 9
        )
        for _ in range(num_requests)
    ]
    return [tokens for tokens, _ in trees], [parents for _, parents in trees]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    num_requests=st.integers(1, 4),
    max_nodes=st.integers(0, 40),
    max_depth=st.integers(1, 12),
    extra=st.integers(0, 2),
)
def test_mask_and_table_equal_walking_up(seed, num_requests, max_nodes, max_depth, extra):
    tokens, parents = _random_trees(seed, num_requests, max_nodes, max_depth)
    tree = PackedTree.from_parents(tokens, parents)
    tree.check()
    depth = int(tree.depths.max()) + extra
    mask, table = tree.ancestor_mask(), tree.retrieve_table(depth)
    num_slots = max(map(len, tokens))
    assert mask.shape == (num_requests, num_slots, num_slots)
    assert mask.dtype == torch.bool
    assert table.shape == (num_requests, num_slots, depth + 1)
    assert table.dtype == torch.int64
    assert tree.num_nodes.tolist() == [len(row) - 1 for row in tokens]
    for row, parent_row in enumerate(parents):
        for slot in range(num_slots):
            inside = slot < len(parent_row)
            path = path_to(parent_row, slot) if inside else []
            seen = mask[row, slot].nonzero().flatten().tolist()
            assert seen == (sorted(path) if inside else [0])
            assert table[row, slot].tolist() == path + [-1] * (depth + 1 - len(path))
            assert tree.depths[row, slot] == max(len(path) - 1, 0)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 7, 8, 9, 31, 32, 33])
def test_mask_reaches_the_anchor_along_a_full_chain(num_nodes):
    chain = list(range(-1, num_nodes))
    tree = PackedTree.from_parents([[0] * (num_nodes + 1)], [chain])
    expected = torch.ones(num_nodes + 1, num_nodes + 1).tril().bool()
    assert torch.equal(tree.ancestor_mask()[0], expected)


def test_nobody_sees_padding():
    tree = PackedTree.from_parents([[5, 6, 7, 8], [5]], [[-1, 0, 1, 0], [-1]])
    seen = tree.ancestor_mask()
    assert not seen[1, :, 1:].any()
    assert seen[:, :, 0].all()


def test_positions_are_the_prefix_plus_the_depth():
    tree = PackedTree.from_parents([[5, 6, 7, 8], [5, 1]], [[-1, 0, 1, 0], [-1, 0]])
    positions = tree.position_ids(torch.tensor([10, 3]))
    assert positions.tolist() == [[10, 11, 12, 11], [3, 4, 3, 3]]
    assert positions.dtype == torch.int64


def test_root_only_is_one_valid_slot_per_request():
    tree = PackedTree.root_only(torch.tensor([4, 9]))
    tree.check()
    assert tree.tokens.tolist() == [[4], [9]]
    assert tree.num_nodes.tolist() == [0, 0]
    assert tree.ancestor_mask().tolist() == [[[True]], [[True]]]
    assert tree.retrieve_table(3).tolist() == [[[0, -1, -1, -1]]] * 2


def test_all_ways_to_build_a_tree_give_the_same_dtypes():
    built = PackedTree.from_parents([[4, 1]], [[-1, 0]])
    empty = PackedTree.root_only(torch.tensor([4]))
    for tree in (built, empty):
        assert [getattr(tree, field.name).dtype for field in dataclasses.fields(tree)] == [
            torch.int64,
            torch.int32,
            torch.int32,
            torch.float32,
            torch.bool,
            torch.int64,
        ]


def test_padding_holds_neutral_values():
    tree = PackedTree.from_parents([[5, 6, 7], [5]], [[-1, 0, 1], [-1]])
    assert tree.tokens[1].tolist() == [5, 0, 0]
    assert tree.parents[1].tolist() == [-1, -1, -1]
    assert tree.depths[1].tolist() == [0, 0, 0]
    assert tree.scores[1].tolist() == [0.0, -torch.inf, -torch.inf]
    assert tree.valid[1].tolist() == [True, False, False]


@pytest.mark.parametrize("rows", [[0], [2], [1, 3], [3, 0], [0, 1, 2, 3]], ids=str)
def test_spread_trees_stand_among_anchors_alone(rows):
    tokens, parents = _random_trees(3, len(rows), 9, 4)
    anchors = torch.tensor([50, 51, 52, 53])
    for row, own in zip(rows, tokens, strict=True):
        anchors[row] = own[0]
    trees = PackedTree.from_parents(tokens, parents)
    spread = trees.spread(rows, anchors)
    spread.check()
    assert spread.tokens[:, 0].tolist() == anchors.tolist()
    sizes = [0] * 4
    for i, row in enumerate(rows):
        sizes[row] = int(trees.num_nodes[i])
        for field in dataclasses.fields(PackedTree):
            own, placed = getattr(trees, field.name)[i], getattr(spread, field.name)[row]
            assert torch.equal(own, placed)
    assert spread.num_nodes.tolist() == sizes


def test_no_requests_give_an_empty_batch():
    tree = PackedTree.from_parents([], [])
    tree.check()
    assert tree.ancestor_mask().shape == (0, 1, 1)
    assert tree.retrieve_table(2).shape == (0, 1, 3)


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([[]], [[]]),
        ([[1, 2]], [[-1]]),
        ([[1]], [[-1], [-1]]),
        ([[1, 2]], [[0, 0]]),
        ([[1, 2]], [[-1, 1]]),
        ([[1, 2]], [[-1, -1]]),
        ([[1, 2, 3]], [[-1, 2, 0]]),
    ],
)
def test_malformed_lists_are_refused(tokens, parents):
    with pytest.raises(ValueError, match="parent"):
        PackedTree.from_parents(tokens, parents)


@pytest.mark.parametrize(
    ("field", "slot", "value", "message"),
    [
        ("valid", 0, False, "anchor is valid"),
        ("valid", 1, False, "padding comes last"),
        ("parents", 0, 0, "have no parent"),
        ("parents", 4, 0, "have no parent"),
        ("depths", 0, 1, "depth 0"),
        ("depths", 4, 1, "depth 0"),
        ("pool_index", 4, 7, "no candidates"),
        ("parents", 1, 2, "parents come first"),
        ("parents", 1, -1, "parents come first"),
        ("depths", 3, 2, "one edge"),
        ("scores", 2, 1.0, "scores fall"),
        ("tokens", 4, 3, "token 0"),
        ("scores", 4, 0.0, "-inf"),
        ("tokens", 3, 6, "distinct"),
    ],
)
def test_check_finds_each_broken_invariant(field, slot, value, message):
    tree = PackedTree.from_parents([[5, 6, 6, 8], [5, 1, 2, 3, 4]], [[-1, 0, 1, 0], [-1] + [0] * 4])
    tree.check()
    getattr(tree, field)[0, slot] = value
    with pytest.raises(AssertionError, match=message):
        tree.check()
