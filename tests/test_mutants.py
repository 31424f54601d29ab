# SPDX-License-Identifier: Apache-2.0
"""Seeded mutants: each plants one well-known bug and a named check has to notice it."""

import dataclasses
import random

import pytest
import torch

from tests.serving_checks import (
    check_logprobs_are_the_targets_own,
    check_output_is_the_targets_own,
    check_reused_beginnings_change_no_answer,
    check_seeds_alone_decide_the_draws,
    check_ties_go_to_the_lowest_id,
    check_trees_equal_a_full_recompute,
)
from treespark.drafter.modeling import TreeSparkDrafter
from treespark.serving import accept as accept_module
from treespark.serving import commit as commit_module
from treespark.serving import prefixes
from treespark.serving.engine import Engine
from treespark.target.kv_cache import KVCache
from treespark.tree import policy as tree_policy
from treespark.tree import verify as tree_verify
from treespark.tree.packed import PackedTree

CHECKS = [
    check_logprobs_are_the_targets_own,
    check_output_is_the_targets_own,
    check_reused_beginnings_change_no_answer,
    check_seeds_alone_decide_the_draws,
    check_ties_go_to_the_lowest_id,
    check_trees_equal_a_full_recompute,
]


@pytest.mark.parametrize("check", CHECKS)
def test_check_passes_without_a_mutant(check):
    check()


def highest_id_first(patch):
    """Tie rule of proposals: equal values go to the higher index."""
    original = tree_policy.ordered_topk

    def flipped(values, k):
        best, index = original(values.flip(-1), k)
        return type(original(values, k))(best, values.shape[-1] - 1 - index)

    patch.setattr(tree_policy, "ordered_topk", flipped)


def highest_id_chosen(patch):
    """Tie rule of verification: equal logits go to the higher id."""

    def flipped(tree, logits, depth):
        tokens = logits.shape[-1] - 1 - logits.flip(-1).argmax(-1)
        return tree_verify.accept_tokens(tree, tokens, depth)

    patch.setattr(tree_verify, "accept_greedy", flipped)


def siblings_see_each_other(patch):
    """Mask: a node also sees the other children of its parent that come before it."""
    original = PackedTree.ancestor_mask

    def leaky(self):
        siblings = (self.parents[:, :, None] == self.parents[:, None]) & (self.parents >= 0)[
            :, None
        ]
        earlier = torch.ones_like(siblings).tril()
        return original(self) | (siblings & earlier & self.valid[..., None])

    patch.setattr(PackedTree, "ancestor_mask", leaky)


def mask_is_causal(patch):
    """Mask: every node sees all nodes before it, as in a chain."""
    patch.setattr(
        PackedTree,
        "ancestor_mask",
        lambda self: (self.valid[:, :, None] & self.valid[:, None]).tril() | original_column(self),
    )


def original_column(tree):
    """Column 0, which padding sees."""
    return (torch.arange(tree.valid.shape[1]) == 0).expand(*tree.valid.shape, -1)


def positions_one_late(patch):
    """Positions: every node one further than its depth says."""
    original = PackedTree.position_ids
    patch.setattr(PackedTree, "position_ids", lambda self, lens: original(self, lens) + 1)


def positions_by_slot(patch):
    """Positions: the packed index in place of the depth."""
    patch.setattr(
        PackedTree,
        "position_ids",
        lambda self, lens: lens[:, None] + torch.arange(self.tokens.shape[1]),
    )


def bonus_counted_twice(patch):
    """Accounting: the bonus counts once with the path and once for itself."""
    original = commit_module._round

    def generous(request, num_walked, proposal):
        record = original(request, num_walked, proposal)
        return dataclasses.replace(record, num_committed=record.num_committed + 1)

    patch.setattr(commit_module, "_round", generous)


def bonus_output_twice(patch):
    """Output: the bonus is committed, and committed again as the next round's first token."""
    original = Engine._accept

    def generous(self, *round_):
        return [a._replace(tokens=[*a.tokens, a.tokens[-1]]) for a in original(self, *round_)]

    patch.setattr(Engine, "_accept", generous)


def target_rows_stay_scattered(patch):
    """Target K/V: the first rows of the tree are kept in place of the accepted ones."""
    patch.setattr(KVCache, "commit", lambda self, slots, lengths, paths: None)


def stale_draft_rows(patch):
    """Draft K/V: after prefill the context only counts up, no row is written."""
    original = TreeSparkDrafter.extend_contexts

    def stale(self, cache, slots, starts, counts, features, token_ids=None):
        # Prefill feeds one slot at a time; only it may start at row 0 or continue a prompt.
        if len(slots) == 1 and counts[0] > 1:
            original(self, cache, slots, starts, counts, features)

    patch.setattr(TreeSparkDrafter, "extend_contexts", stale)


def draft_rows_of_the_wrong_nodes(patch):
    """Draft K/V: features of the first nodes of the tree in place of the accepted path's."""
    original = Engine._keep_rows

    def first_nodes(self, running, accepted, tree, features):
        spread = torch.zeros_like(features)
        for i, item in enumerate(accepted):
            spread[i, item.nodes] = features[i, : len(item.nodes)]
        original(self, running, accepted, tree, spread)

    patch.setattr(Engine, "_keep_rows", first_nodes)


def only_the_last_chunk_feeds_the_drafter(patch):
    """Draft K/V: the features of all but the newest prefill chunk are zero."""
    original = TreeSparkDrafter.extend_contexts

    def forgetful(self, cache, slots, starts, counts, features, token_ids=None):
        for slot, start in zip(slots, starts, strict=True):
            for rows in (*cache.keys, *cache.values):
                rows[slot, :, :start] = 0
        original(self, cache, slots, starts, counts, features)

    patch.setattr(TreeSparkDrafter, "extend_contexts", forgetful)


def logprobs_of_the_anchors_row(patch):
    """Log-probabilities: all of a round from the row of its anchor."""
    original = accept_module.path_logprobs

    def rooted(logits, path, rows, num_top):
        at_root = dataclasses.replace(path, retrieve_indices=path.retrieve_indices.clamp_max(0))
        return original(logits, at_root, rows, num_top)

    patch.setattr(accept_module, "path_logprobs", rooted)


def a_reused_row_too_many(patch):
    """Prefixes: the first row that differs is taken over, too."""
    original = prefixes.reusable_length

    def generous(*looked_up):
        length = original(*looked_up)
        return length + 1 if length else 0

    patch.setattr(prefixes, "reusable_length", generous)


def draws_from_one_stream_for_all(patch):
    """Sampling: one random stream that all requests of the engine take from by turns."""
    stream = random.Random(0)
    patch.setattr(accept_module, "uniform", lambda seed, number: stream.random())


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (logprobs_of_the_anchors_row, check_logprobs_are_the_targets_own),
        (draws_from_one_stream_for_all, check_seeds_alone_decide_the_draws),
        (a_reused_row_too_many, check_reused_beginnings_change_no_answer),
        (highest_id_first, check_ties_go_to_the_lowest_id),
        (highest_id_chosen, check_ties_go_to_the_lowest_id),
        (siblings_see_each_other, check_output_is_the_targets_own),
        (mask_is_causal, check_output_is_the_targets_own),
        (positions_one_late, check_output_is_the_targets_own),
        (positions_by_slot, check_output_is_the_targets_own),
        (bonus_counted_twice, check_output_is_the_targets_own),
        (bonus_output_twice, check_output_is_the_targets_own),
        (target_rows_stay_scattered, check_output_is_the_targets_own),
        (stale_draft_rows, check_trees_equal_a_full_recompute),
        (draft_rows_of_the_wrong_nodes, check_trees_equal_a_full_recompute),
        (only_the_last_chunk_feeds_the_drafter, check_trees_equal_a_full_recompute),
    ],
    ids=lambda function: function.__name__,
)
def test_mutant_is_noticed(mutant, check, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
