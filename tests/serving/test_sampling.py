# SPDX-License-Identifier: Apache-2.0
"""Sampling follows the target's distribution, by the request's seed alone, beside greedy others."""

import math
from collections import Counter

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.serving_checks import record_trees
from tests.serving_world import (
    VOCAB,
    RandomTrees,
    answers_of,
    drafter,
    prompts,
    requests_for,
    run,
    world,
)
from treespark.serving.engine import Engine
from treespark.serving.params import SamplingParams
from treespark.serving.sampling import sample_token, uniform
from treespark.serving.scheduler import Request
from treespark.tree.policy import TreePolicy

POLICY = TreePolicy(5, 4, 16)
PROMPTS = prompts(6, seed=2)
DRAW = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True}


def critical_chi_square(degrees: int) -> float:
    """The value that chance exceeds once in 1,000 (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


def chi_square(counts: dict, probs: dict, total: int) -> tuple[float, int]:
    """Statistic and degrees of freedom; outcomes expected fewer than 5 times are put together."""
    cells = [(counts.get(key, 0), total * p) for key, p in probs.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if rare:
        cells.append((sum(seen for seen, _ in rare), sum(due for _, due in rare)))
    return sum((seen - due) ** 2 / max(due, 1e-9) for seen, due in cells), len(cells) - 1


def filtered_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers' own warpers leave, in the order that is documented."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits[None])
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.4},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 99},
        {"temperature": 1.0, "top_k": -1},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_shares_of_the_unit_interval_are_the_filtered_probabilities(options):
    """Evenly spaced draws: each token gets its probability, to the width of the grid."""
    logits = 2 * torch.randn(16, generator=torch.Generator().manual_seed(4))
    params, size = SamplingParams(**options), 2048
    counts = Counter(int(sample_token(logits, params, (k + 0.5) / size)) for k in range(size))
    expected = filtered_probs(logits, params)
    for token in range(16):
        # A share begins and ends anywhere between two draws.
        assert abs(counts[token] / size - float(expected[token])) <= 1 / size + 1e-5
        assert expected[token] > 0 or not counts[token]


def test_equal_tokens_enter_by_id_and_impossible_ones_never():
    logits = torch.tensor([0.0, -torch.inf, 0.0, 0.0])
    params = SamplingParams(temperature=1.0, top_k=2)
    assert {int(sample_token(logits, params, u / 8)) for u in range(8)} == {0, 2}
    plain = SamplingParams(temperature=1.0)
    draws = [0.0, 1 / 3, 0.5, 1 - 2**-24]
    assert 1 not in {int(sample_token(logits, plain, draw)) for draw in draws}
    assert int(sample_token(logits, plain, 0.0)) == 0
    assert int(sample_token(logits, plain, 1 - 2**-24)) == 3


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-4])
def test_the_coldest_temperatures_are_greedy(temperature):
    logits = torch.tensor([1.0, 3.0, 2.9, -1e30])
    params = SamplingParams(temperature=temperature)
    assert {int(sample_token(logits, params, draw)) for draw in (0.0, 0.5, 1 - 2**-24)} == {1}


@pytest.mark.parametrize("row", [[math.nan] * 4, [1.0, math.nan, 0.0, 2.0], [-math.inf] * 4])
def test_logits_that_are_no_numbers_still_give_a_token(row):
    for options in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
        params = SamplingParams(temperature=1.0, **options)
        assert 0 <= int(sample_token(torch.tensor(row), params, 0.7)) < 4


def test_draws_of_a_seed_are_even_and_repeatable():
    draws = [uniform(123, number) for number in range(20000)]
    assert draws == [uniform(123, number) for number in range(20000)]
    assert draws[:5] != [uniform(124, number) for number in range(5)]
    assert all(0 <= draw < 1 for draw in draws)
    value, degrees = chi_square(
        Counter(int(16 * draw) for draw in draws), dict.fromkeys(range(16), 1 / 16), len(draws)
    )
    assert value < critical_chi_square(degrees)


def test_two_sampled_tokens_in_a_row_follow_the_target():
    """Jointly, through the engine: 800 seeds against the exact probabilities of all pairs."""
    small, prompt, total = world(vocab=6, eos=5), [1, 4, 2], 800
    params = {"temperature": 2.0, "ignore_eos": True}
    requests = [Request(str(i), prompt, SamplingParams(2, seed=i, **params)) for i in range(total)]
    engine = Engine(small.target, drafter(small.target), POLICY, max_num_seqs=12)
    counts = Counter(tuple(o.token_ids) for o in run(engine, requests).values())
    logits = small.log_probs(prompt, [0])
    first = (logits[0] / 2).softmax(-1)
    probs = {
        (a, b): float(first[a] * p)
        for a in range(6)
        for b, p in enumerate((small.log_probs([*prompt, a], [0])[0] / 2).softmax(-1))
    }
    value, degrees = chi_square(counts, probs, total)
    assert degrees > 5
    assert value < critical_chi_square(degrees)


# ------------------------------------------------------------------ in company


def sampled_requests(**options) -> list[Request]:
    """One sampled request per prompt, each with a seed of its own."""
    return [
        Request(f"s{i}", prompt, SamplingParams(14, seed=40 + i, **(DRAW | options)))
        for i, prompt in enumerate(PROMPTS)
    ]


def alone(request: Request) -> list[int]:
    """Its answer in an engine without a drafter and of one slot."""
    outputs = run(Engine(world().target, max_num_seqs=1), [request])
    return outputs[request.request_id].token_ids


@pytest.mark.parametrize("num_slots", [2, 5, 12])
def test_a_seed_gives_the_same_tokens_alone_and_in_company(num_slots):
    target = world().target
    expected = {request.request_id: alone(request) for request in sampled_requests()}
    assert len({tuple(ids) for ids in expected.values()}) == len(PROMPTS)
    mixed = [*requests_for(PROMPTS, [3, 20, 9, 14, 1, 30]), *sampled_requests()]
    arrivals = [0, 2, 4, 6, 8, 10, 0, 1, 5, 5, 9, 20]
    engine = Engine(target, drafter(target), POLICY, max_num_seqs=num_slots, prefill_chunk=16)
    outputs = run(engine, mixed, arrivals)
    assert {name: outputs[name].token_ids for name in expected} == expected
    for name in expected:
        record = outputs[name].metrics
        assert record.plain_decoding == "sampling"
        assert record.num_proposed == record.num_accepted == 0
        assert record.num_rounds == 13


def test_greedy_requests_are_untouched_by_sampled_neighbours():
    """The same ids as transformers, the same trees and rounds as without the neighbours."""
    target = world().target
    model, seen = drafter(target), []
    for neighbours in ([], sampled_requests(), sampled_requests(temperature=2.0)):
        engine = Engine(target, model, POLICY, max_num_seqs=12)
        trees = record_trees(engine)
        outputs = run(engine, [*requests_for(PROMPTS, 20), *neighbours])
        greedy = {name: outputs[name] for name in map(str, range(len(PROMPTS)))}
        rounds = {name: output.metrics.rounds for name, output in greedy.items()}
        seen.append((answers_of(greedy), rounds, {name: trees[name] for name in greedy}))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == {str(i): world().reference(p, 20) for i, p in enumerate(PROMPTS)}


def test_a_proposer_is_not_asked_about_sampled_requests():
    """Whatever would be drafted for them, a sampled token needs the draw and not the best token."""
    asked = set()

    class Spy(RandomTrees):
        def __call__(self, batch):
            asked.update(request.request_id for request in batch.requests)
            return super().__call__(batch)

    engine = Engine(world().target, policy=TreePolicy(budget=20), propose=Spy(1, VOCAB, 20))
    outputs = run(engine, [*requests_for(PROMPTS[:3], 20), *sampled_requests()])
    assert asked == {"0", "1", "2"}
    for request in sampled_requests():
        assert outputs[request.request_id].token_ids == alone(request)


def test_without_a_seed_every_answer_is_another():
    params = SamplingParams(14, temperature=1.5, ignore_eos=True)
    requests = [Request(str(i), PROMPTS[0], params) for i in range(4)]
    outputs = run(Engine(world().target), requests)
    assert len({tuple(o.token_ids) for o in outputs.values()}) == 4


def test_a_cold_sampled_request_writes_the_greedy_text():
    for request in sampled_requests(temperature=1e-6, top_p=1.0):
        assert alone(request) == world().reference(request.prompt_token_ids, 14)
