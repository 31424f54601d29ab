# SPDX-License-Identifier: Apache-2.0
"""Simulated acceptance is the acceptance of really decoding."""

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


@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (drafter, CHAIN),
        (drafter, TreePolicy(5, 3, 30)),
        (drafter, TreePolicy(4, 4, 9)),
        (rnn_drafter, CHAIN),
        (eagle3_drafter, CHAIN),
    ],
)
def test_simulated_acceptance_equals_decoding(make, policy):
    import numpy as np

    # So few tokens that random chains are sometimes right. Trees are packed for the answer's end
    # when they are served, but not here, which shows where many nodes are accepted.
    small = policy == CHAIN
    target = (world(vocab=6, eos=5) if small else world()).target
    asked = prompts(6, vocab=target.vocab_size)
    target.set_taps([0, 2])
    model, params = make(target), SamplingParams(max_tokens=30, ignore_eos=True)
    plain = LLM(target).generate(asked, params)
    rows = [
        Row(str(i), np.array(p + o.token_ids), len(p))
        for i, (p, o) in enumerate(zip(asked, plain, strict=True))
    ]
    outputs = LLM(target, model, policy).generate(asked, params)
    real = acceptance_length([o.metrics for o in outputs])
    target.set_taps([0, 2])
    counts = simulated_acceptance(model, rows, OnlineFeatures(target), {"p": policy})
    committed, rounds = counts["p"]
    assert committed / rounds == real
    assert real > 1.05 or not small
