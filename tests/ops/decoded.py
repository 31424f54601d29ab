# SPDX-License-Identifier: Apache-2.0
"""A small decode with a drafter whose sizes the operators take, weights prepacked."""

from tests.serving_world import drafter, prompts, requests_for, run, world
from treespark.serving.engine import Engine
from treespark.tree.policy import TreePolicy


def answers() -> dict[str, list[int]]:
    """Token ids by request."""
    target = world().target
    model = drafter(target, markov_rank=16)
    model.prepack()
    outputs = run(Engine(target, model, TreePolicy(5, 4, 12)), requests_for(prompts(3), 12))
    return {name: output.token_ids for name, output in outputs.items()}
