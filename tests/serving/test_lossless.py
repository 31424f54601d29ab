# SPDX-License-Identifier: Apache-2.0
"""Whatever is drafted, the output is the target's own greedy text, token for token."""

import functools

import pytest

from tests.serving_world import (
    VOCAB,
    AntiTarget,
    Oracle,
    RandomTrees,
    answers_of,
    drafter,
    prompts,
    requests_for,
    run,
    true_chain,
    whole_vocabulary,
    world,
)
from treespark.bench.metrics import acceptance_length
from treespark.serving.engine import Engine
from treespark.tree.policy import TreePolicy

LIMITS = [1, 2, 3, 5, 8, 13, 21, 30, 24, 17, 9, 4]
PROMPTS = prompts(12)


@functools.cache
def reference(family: str = "llama") -> dict[str, list[int]]:
    """What transformers' generate answers to PROMPTS, 40 tokens each."""
    return {str(i): world(family).reference(prompt, 40) for i, prompt in enumerate(PROMPTS)}


def expected(family: str = "llama") -> dict[str, list[int]]:
    """The reference cut at each request's own limit."""
    return {str(i): reference(family)[str(i)][:limit] for i, limit in enumerate(LIMITS)}


@pytest.mark.parametrize("num_slots", [1, 3, 6, 12])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_autoregressive_rounds_equal_generate(family, num_slots):
    engine = Engine(world(family).target, max_num_seqs=num_slots)
    assert answers_of(run(engine, requests_for(PROMPTS, LIMITS))) == expected(family)


PROPOSERS = {
    "random": lambda answers: RandomTrees(1, VOCAB, 20),
    "anti": lambda answers: AntiTarget(answers, VOCAB, 4, 5),
    "oracle": lambda answers: Oracle(answers, VOCAB, 8, 2),
    "chain": lambda answers: true_chain(answers, 7),
}


@pytest.mark.parametrize("num_slots", [1, 3, 12])
@pytest.mark.parametrize("name", PROPOSERS)
def test_any_injected_tree_equals_generate(name, num_slots):
    engine = Engine(
        world().target,
        policy=TreePolicy(depth=8, budget=60),
        max_num_seqs=num_slots,
        propose=PROPOSERS[name](reference()),
    )
    assert answers_of(run(engine, requests_for(PROMPTS, LIMITS))) == expected()


@pytest.mark.parametrize("seed", range(8))
def test_random_trees_of_every_size_equal_generate(seed):
    small = world("qwen3", vocab=12, eos=11, seed=seed)
    some = prompts(4, vocab=12, seed=seed, longest=9)
    answers = {str(i): small.reference(prompt, 40) for i, prompt in enumerate(some)}
    # In so small a vocabulary random trees are right often enough to be accepted.
    propose = RandomTrees(seed, 12, 48)
    engine = Engine(small.target, policy=TreePolicy(budget=48), max_num_seqs=3, propose=propose)
    outputs = run(engine, requests_for(some, 40))
    assert answers_of(outputs) == answers
    assert acceptance_length([output.metrics for output in outputs.values()]) > 1.1


def test_proposers_reach_the_accepted_lengths_they_are_meant_to():
    """Guards the tests above: the oracle's long paths and the anti-target's refusals do happen."""
    lengths = {}
    for name, make in PROPOSERS.items():
        policy = TreePolicy(depth=8, budget=60)
        engine = Engine(world().target, policy=policy, propose=make(reference()))
        outputs = run(engine, requests_for(PROMPTS, 40))
        lengths[name] = acceptance_length([o.metrics for o in outputs.values()])
    assert lengths["anti"] == 1
    assert lengths["chain"] > 6
    assert 3 < lengths["oracle"] < 7


@pytest.mark.parametrize("branching", [1, 2, 4, 7])
@pytest.mark.parametrize("budget", [0, 1, 2, 5, 16, 32])
def test_any_budget_and_branching_equal_generate(budget, branching):
    target = world().target
    policy = TreePolicy(depth=5, branching=branching, budget=budget)
    engine = Engine(target, drafter(target), policy, max_num_seqs=5)
    assert answers_of(run(engine, requests_for(PROMPTS, LIMITS))) == expected()


@pytest.mark.parametrize(
    "options",
    [
        {"markov_rank": 0, "enable_confidence_head": False},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn"},
        # Ranks that the operator markov_topk takes.
        {"markov_rank": 16},
        {"markov_rank": 32, "markov_head_type": "gated"},
        {"anchor_predicts_next": False},
        {"block_size": 1},
        {"block_size": 8},
    ],
    ids=str,
)
def test_every_kind_of_drafter_equals_generate(options):
    target = world("qwen3").target
    model = drafter(target, **options)
    branching = 1 if options.get("markov_head_type") == "rnn" else 3
    policy = TreePolicy(model.config.block_size, branching, budget=12)
    engine = Engine(target, model, policy, max_num_seqs=4)
    assert answers_of(run(engine, requests_for(PROMPTS, LIMITS))) == expected("qwen3")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_whole_vocabulary_tree_accepts_every_depth(depth):
    small = world(vocab=6, eos=5)
    answers = {str(i): small.reference(p, 25) for i, p in enumerate(prompts(4, vocab=6))}
    engine = Engine(small.target, drafter(small.target), whole_vocabulary(6, depth))
    outputs = run(engine, requests_for(prompts(4, vocab=6), 25))
    assert answers_of(outputs) == answers
    for output in outputs.values():
        # Only the last round may be clipped by the limit.
        assert all(r.num_accepted == depth for r in output.metrics.rounds[:-1])


@pytest.mark.parametrize("chunk", [1, 16, 512])
def test_requests_joining_and_leaving_do_not_alter_others(chunk):
    target = world().target
    arrivals = [0, 0, 1, 1, 4, 5, 5, 9, 9, 12, 30, 31]
    for propose in (None, Oracle(reference(), VOCAB, 6, 1)):
        engine = Engine(
            target,
            drafter(target) if propose is None else None,
            TreePolicy(depth=5, budget=24),
            max_num_seqs=3,
            prefill_chunk=chunk,
            propose=propose,
        )
        outputs = run(engine, requests_for(PROMPTS, LIMITS), arrivals)
        assert answers_of(outputs) == expected()


def test_aborting_one_request_does_not_alter_others():
    target = world().target
    engine = Engine(target, drafter(target), TreePolicy(depth=5, budget=12), max_num_seqs=3)
    for request in requests_for(PROMPTS, LIMITS):
        engine.add(request)
    finished = {}
    for step in range(500):
        if step == 2:
            assert engine.abort("5")
            assert engine.abort("7")
            assert not engine.abort("99")
        finished |= {o.request_id: o.token_ids for o in engine.step() if o.finish_reason}
    assert finished == {name: ids for name, ids in expected().items() if name not in ("5", "7")}


def test_two_engines_share_a_target_with_different_taps():
    target = world().target
    engines = [
        Engine(target, drafter(target, target_layer_ids=taps), TreePolicy(5, 3, 12), max_num_seqs=2)
        for taps in ([0, 2], [1])
    ] + [Engine(target)]
    for engine in engines:
        for request in requests_for(PROMPTS[:4], LIMITS[4:8]):
            engine.add(request)
    answers: list[dict[str, list[int]]] = [{}, {}, {}]
    while any(engine.has_work for engine in engines):
        for engine, answer in zip(engines, answers, strict=True):
            answer |= {o.request_id: o.token_ids for o in engine.step() if o.finish_reason}
    cut = {str(i): reference()[str(i)][:limit] for i, limit in enumerate(LIMITS[4:8])}
    assert answers == [cut, cut, cut]


@pytest.mark.parametrize("with_drafter", [False, True])
def test_decoding_reaches_the_very_end_of_the_context(with_drafter):
    small = world("llama", max_context=48)
    for length in (1, 20, 41, 46, 47):
        prompt = prompts(1, seed=length, longest=1)[0] * length
        model = drafter(small.target) if with_drafter else None
        policy = TreePolicy(5, 4, 32) if with_drafter else None
        engine = Engine(small.target, model, policy, max_num_seqs=2)
        output = run(engine, requests_for([prompt], 500))["0"]
        assert output.token_ids == small.reference(prompt, 48 - length)
        assert output.finish_reason == "length"
        assert len(output.token_ids) == 48 - length


def test_oracle_path_to_the_end_of_the_context():
    small = world("llama", max_context=48)
    prompt = [7] * 9
    answer = small.reference(prompt, 39)
    policy = TreePolicy(depth=8, budget=40)
    engine = Engine(small.target, policy=policy, propose=Oracle({"0": answer}, VOCAB, 8, 2))
    assert run(engine, requests_for([prompt], 500))["0"].token_ids == answer


def test_drafter_with_a_shorter_context_only_stops_drafting():
    small = world("llama", max_context=48)
    model = drafter(small.target, max_position_embeddings=24)
    engine = Engine(small.target, model, TreePolicy(5, 4, 16))
    output = run(engine, requests_for([[5] * 10], 500))["0"]
    assert output.token_ids == small.reference([5] * 10, 38)
    proposed = [r.num_proposed for r in output.metrics.rounds]
    assert proposed[0] == 16
    assert proposed[-1] == 0
