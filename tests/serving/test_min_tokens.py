# SPDX-License-Identifier: Apache-2.0
"""min_tokens holds every kind of stop back, at every depth of a tree; then stops work again."""

import pytest

from tests.serving_checks import check_counts
from tests.serving_world import (
    TEXT_VOCAB,
    VOCAB,
    Oracle,
    drafter,
    prompts,
    requests_for,
    run,
    true_chain,
    world,
)
from treespark.serving.engine import Engine
from treespark.serving.params import SamplingParams
from treespark.serving.scheduler import Request
from treespark.tree.policy import TreePolicy

PROMPTS = prompts(4, seed=7, longest=20)


@pytest.mark.parametrize("min_tokens", [1, 5, 10, 16])
@pytest.mark.parametrize("how", ["plain", "tree", "oracle"])
def test_a_held_back_stop_id_equals_generate(how, min_tokens):
    """The model wants to stop at each of its first tokens in turn; transformers is the judge."""
    target = world().target
    for prompt in PROMPTS[:2]:
        free = world().reference(prompt, 16)
        for index in (0, 3):
            stops = (free[index], free[min(index + 4, 15)])
            expected = world().reference(prompt, 16, stops, min_tokens)
            propose = Oracle({"0": expected}, VOCAB, 6, 2) if how == "oracle" else None
            model = drafter(target) if how == "tree" else None
            engine = Engine(target, model, TreePolicy(5, 4, 16), propose=propose)
            options = {"stop_token_ids": stops, "min_tokens": min_tokens}
            output = run(engine, requests_for([prompt], 16, **options))["0"]
            assert output.token_ids == expected
            assert not set(stops) & set(output.token_ids[:min_tokens])
            check_counts(output)


def test_the_targets_own_end_is_held_back_too(monkeypatch):
    prompt = PROMPTS[0]
    free = world().reference(prompt, 20)
    monkeypatch.setattr(world().target, "eos_token_ids", {free[2], VOCAB + 5})
    propose = true_chain({"0": free}, 7)
    engine = Engine(world().target, policy=TreePolicy(7, budget=8), propose=propose)
    options = {"min_tokens": 10, "ignore_eos": False}
    output = run(engine, requests_for([prompt], 20, **options))["0"]
    assert len(output.token_ids) >= 10
    assert free[2] not in output.token_ids[:10]
    assert output.token_ids == world().reference(prompt, 20, (free[2],), 10)


def test_a_sampled_request_cannot_draw_a_held_back_stop():
    small = world(vocab=6, eos=5)
    requests = [
        Request(str(seed), [1, 2], SamplingParams(12, temperature=2.0, seed=seed, min_tokens=8))
        for seed in range(20)
    ]
    outputs = run(Engine(small.target), requests)
    assert all(5 not in output.token_ids[:8] for output in outputs.values())
    lengths = {len(output.token_ids) for output in outputs.values()}
    assert min(lengths) >= 8
    assert any(output.finish_reason == "stop" for output in outputs.values())


def test_only_the_requests_that_ask_are_held():
    target = world().target
    answers = {str(i): world().reference(prompt, 14) for i, prompt in enumerate(PROMPTS)}
    requests = [
        Request(
            name,
            PROMPTS[int(name)],
            SamplingParams(
                14,
                stop_token_ids=(ids[3],),
                ignore_eos=True,
                min_tokens=9 if int(name) % 2 else 0,
            ),
        )
        for name, ids in answers.items()
    ]
    outputs = run(Engine(target, drafter(target), TreePolicy(5, 4, 16)), requests)
    for name, ids in answers.items():
        held = 9 if int(name) % 2 else 0
        expected = world().reference(PROMPTS[int(name)], 14, (ids[3],), held)
        assert outputs[name].token_ids == expected


@pytest.mark.parametrize("propose", ["none", "chain"])
def test_a_stop_string_counts_once_min_tokens_are_there(propose):
    """One that is complete earlier is let pass; its next occurrence ends the text."""
    text_world = world(vocab=TEXT_VOCAB, eos=256, seed=3)
    prompt = list(b"hello")
    answer = text_world.reference(prompt, 24)
    backend = text_world.target.tokenizer.backend_tokenizer
    whole = backend.decode(answer).rstrip("\ufffd")
    stops = (whole[2:4], whole[-4:-2])
    for min_tokens in range(1, 24, 3):
        held = backend.decode(answer[:min_tokens]).rstrip("\ufffd")
        ends = [
            at
            for stop in stops
            for at in range(len(whole))
            if whole.startswith(stop, at) and at + len(stop) > len(held)
        ]
        oracle = true_chain({"0": answer}, 7) if propose == "chain" else None
        engine = Engine(text_world.target, policy=TreePolicy(7, budget=8), propose=oracle)
        options = {"stop": stops, "min_tokens": min_tokens}
        output = run(engine, requests_for([prompt], 24, **options))["0"]
        assert output.text == whole[: min(ends, default=len(whole))]
