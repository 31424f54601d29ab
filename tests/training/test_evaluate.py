# SPDX-License-Identifier: Apache-2.0
"""Simulated acceptance is the acceptance of really decoding."""

import pytest

from tests.serving_world import drafter, prompts, world
from treespark.bench.metrics import acceptance_length
from treespark.data.batches import Row
from treespark.data.features import OnlineFeatures
from treespark.serving.llm import LLM, SamplingParams
from treespark.training.evaluate import simulated_acceptance
from treespark.tree.policy import TreePolicy


@pytest.mark.parametrize("policy", [TreePolicy(5, 1, 5), TreePolicy(5, 3, 30), TreePolicy(4, 4, 9)])
def test_simulated_acceptance_equals_decoding(policy):
    import numpy as np

    target, asked = world().target, prompts(6)
    target.set_taps([0, 2])
    model, params = drafter(target), SamplingParams(max_tokens=30, ignore_eos=True)
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
