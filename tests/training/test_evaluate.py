# SPDX-License-Identifier: Apache-2.0
"""Simulated acceptance is the acceptance of really decoding."""

import dataclasses

import numpy as np
import pytest

from tests.serving_world import drafter, eagle3_drafter, prompts, world
from treespark.bench.metrics import acceptance_length
from treespark.data.batches import Row
from treespark.data.features import OnlineFeatures
from treespark.serving.llm import LLM, SamplingParams
from treespark.training.evaluate import simulated_acceptance
from treespark.tree.policy import TreePolicy

CHAIN = TreePolicy(5, 1, 5)


def rnn_drafter(target):
    return drafter(target, markov_head_type="rnn")


class Counting:
    """A drafter that remembers how many anchors each of its passes had."""

    def __init__(self, model):
        self.model, self.shapes = model, []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def training_blocks(self, input_ids, features, anchors, keep):
        self.shapes.append(tuple(anchors.shape))
        return self.model.training_blocks(input_ids, features, anchors, keep)


def rows_and_decoding(target, model, policy, limit, **params):
    """Rows of the target's own answers, and the acceptance length of decoding their prompts."""
    asked = prompts(8, vocab=target.vocab_size)
    options = SamplingParams(max_tokens=limit, **params)
    plain = LLM(target).generate(asked, options)
    rows = [
        Row(str(i), np.array(p + o.token_ids), len(p))
        for i, (p, o) in enumerate(zip(asked, plain, strict=True))
    ]
    outputs = LLM(target, model, policy).generate(asked, options)
    target.set_taps([0, 2])
    return rows, acceptance_length([o.metrics for o in outputs])


def simulated(target, model, policy, rows, **options):
    counts = simulated_acceptance(model, rows, OnlineFeatures(target), {"p": policy}, **options)
    committed, rounds = counts["p"]
    return committed / rounds


@pytest.mark.parametrize(
    ("make", "policy", "vocab"),
    [
        (drafter, CHAIN, 6),
        (drafter, TreePolicy(5, 3, 30), 128),
        # Few tokens, so that random drafts are often right, and few nodes, so that it matters
        # near the end of an answer which of them may still be used.
        (drafter, TreePolicy(5, 2, 5), 6),
        (drafter, TreePolicy(4, 3, 7), 6),
        (rnn_drafter, CHAIN, 6),
        (eagle3_drafter, CHAIN, 6),
    ],
)
@pytest.mark.parametrize("limit", [7, 30])
def test_simulated_acceptance_equals_decoding(make, policy, vocab, limit):
    target = world(vocab=vocab, eos=vocab - 1).target
    target.set_taps([0, 2])
    model = make(target)
    rows, real = rows_and_decoding(target, model, policy, limit, ignore_eos=True)
    assert simulated(target, model, policy, rows, max_tokens=limit) == real
    # A row that the limit ended says by its length what the limit was.
    assert simulated(target, model, policy, rows, max_tokens=96) == real
    assert real > 1.05 or vocab > 6 or limit < 30


def test_an_answer_that_stopped_by_itself_was_not_limited_by_its_length():
    target = world(vocab=6, eos=5).target
    target.set_taps([0, 2])
    policy, model = TreePolicy(5, 2, 5), drafter(target, seed=3)
    rows, real = rows_and_decoding(target, model, policy, 30)
    lengths = {len(row.token_ids) - row.prompt_len for row in rows if row.token_ids[-1] == 5}
    assert len(lengths) > 2
    assert max(lengths) < 30
    assert simulated(target, model, policy, rows, max_tokens=30, stop_ids={5}) == real
    assert simulated(target, model, policy, rows, max_tokens=30) != real


def test_ranks_make_equally_many_passes_and_count_every_row_once():
    target = world().target
    target.set_taps([0, 2])
    policy, model = TreePolicy(5, 3, 30), drafter(target)
    rows, _ = rows_and_decoding(target, model, policy, 40, ignore_eos=True)
    # Two ranks: three long rows and one short one; three ranks: one of them has no row.
    for count, world_size in ((4, 2), (2, 3)):
        short = dataclasses.replace(rows[3], token_ids=rows[3].token_ids[:-30])
        some = [*rows[: count - 1], short]
        whole = simulated_acceptance(model, some, OnlineFeatures(target), {"p": policy})["p"]
        calls, found = [], []
        for rank in range(world_size):
            seen = Counting(model)
            calls.append(seen.shapes)
            share = {"rank": rank, "world_size": world_size}
            counts = simulated_acceptance(
                seen, some, OnlineFeatures(target), {"p": policy}, **share
            )
            found.append(counts["p"])
        assert [len(shapes) for shapes in calls] == [len(calls[0])] * world_size
        assert len({shape for shapes in calls for shape in shapes}) == 1
        assert tuple(map(sum, zip(*found, strict=True))) == whole
