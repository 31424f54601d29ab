# SPDX-License-Identifier: Apache-2.0
"""After any number of rounds both caches hold what a fresh pass over the same tokens would give."""

import pytest
import torch

from tests.serving_checks import check_trees_equal_a_full_recompute, record_trees
from tests.serving_world import (
    VOCAB,
    Oracle,
    RandomTrees,
    drafter,
    prompts,
    requests_for,
    run,
    world,
)
from treespark.serving.engine import Engine
from treespark.serving.scheduler import RequestState
from treespark.tree.policy import TreePolicy

PROMPTS = prompts(5, seed=3)


def oracle(target_world, noise: int = 2) -> Oracle:
    """Long accepted paths through scattered nodes."""
    answers = {str(i): target_world.reference(prompt, 60) for i, prompt in enumerate(PROMPTS)}
    return Oracle(answers, VOCAB, 6, noise)


def assert_caches_are_fresh(engine: Engine) -> None:
    """Compare every running request's cache rows with one prefill of its tokens."""
    for slot, request in engine.scheduler.in_state(RequestState.RUNNING):
        ids = torch.tensor((request.prompt_token_ids + request.output_token_ids)[:-1])
        assert slot.kv_length == request.length == len(ids)
        fresh = engine.target.new_cache(1, len(ids))
        features = engine.target.prefill(fresh, 0, 0, ids).features
        for ours, theirs in zip(
            engine.kv.keys + engine.kv.values, fresh.keys + fresh.values, strict=True
        ):
            torch.testing.assert_close(
                ours[slot.index, :, : len(ids)], theirs[0], atol=2e-5, rtol=1e-4
            )
        if engine.context is not None:
            assert slot.draft_length == len(ids)
            context = engine.drafter.new_cache(1, len(ids))
            engine.drafter.extend_context(context, 0, 0, features)
            pairs = zip(
                engine.context.keys + engine.context.values,
                context.keys + context.values,
                strict=True,
            )
            for ours, theirs in pairs:
                torch.testing.assert_close(
                    ours[slot.index, :, : len(ids)], theirs[0], atol=5e-5, rtol=1e-4
                )


@pytest.mark.parametrize("kind", ["oracle", "random", "drafter", "oracle+drafter"])
def test_caches_equal_a_fresh_pass_after_every_round(kind):
    target = world().target
    propose = {"oracle": oracle(world()), "random": RandomTrees(4, VOCAB, 20)}.get(
        kind.split("+")[0]
    )
    model = drafter(target) if "drafter" in kind else None
    policy = TreePolicy(5, 4, 40)
    engine = Engine(target, model, policy, max_num_seqs=3, prefill_chunk=20, propose=propose)
    for request in requests_for(PROMPTS, [50, 7, 33, 50, 21]):
        engine.add(request)
    num_rounds = 0
    while engine.has_work:
        engine.step()
        assert_caches_are_fresh(engine)
        num_rounds += 1
    assert num_rounds > 10


def test_a_lost_cache_row_stops_the_round():
    """The invariant is asserted: rows, features and anchor agree or the round fails."""
    target = world().target
    engine = Engine(target, drafter(target), TreePolicy(5, 4, 16))
    for request in requests_for(PROMPTS[:2], 30):
        engine.add(request)
    engine.step()
    engine.scheduler.slots[1].draft_length -= 1
    with pytest.raises(AssertionError, match="anchor"):
        engine.step()


def test_trees_do_not_depend_on_chunks_or_company():
    """Prefill in chunks of 1, 16 or whole; alone or among others; joining late: the same trees."""
    target = world("qwen3").target
    model, policy = drafter(target), TreePolicy(5, 4, 16)
    seen = []
    for chunk, slots, arrivals in [
        (1, 1, None),
        (16, 3, [0, 0, 2, 3, 9]),
        (512, 5, None),
        (512, 12, [4, 3, 2, 1, 0]),
    ]:
        engine = Engine(target, model, policy, max_num_seqs=slots, prefill_chunk=chunk)
        trees = record_trees(engine)
        outputs = run(engine, requests_for(PROMPTS, 25), arrivals)
        seen.append((trees, {name: o.metrics.rounds for name, o in outputs.items()}))
    assert all(trees == seen[0] for trees in seen)
    assert all(len(rows) > 3 for rows in seen[0][0].values())


def test_same_prompt_twice_gives_the_same_rounds():
    target = world().target
    engine = Engine(target, drafter(target), TreePolicy(5, 4, 16), max_num_seqs=2)
    rounds = [run(engine, requests_for([PROMPTS[1]], 20))["0"].metrics.rounds for _ in range(2)]
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize("prefill_chunk", [1, 7, 512])
def test_engine_trees_equal_trees_from_a_full_recompute(prefill_chunk):
    """Draft context grown row by row is the context of the whole text, at the right positions."""
    check_trees_equal_a_full_recompute(prefill_chunk)
