# SPDX-License-Identifier: Apache-2.0
"""The budget that pays, on simulated devices: found, found again when things change, at what price.

A device reads its weights once a round and then pays for every row; requests accept drafts at some
rate per depth. The best fixed budget is known by trying all of them in the same simulation.
"""

import dataclasses
import random

import pytest

from treespark.serving.pricing import BudgetPricing

BUDGETS = (0, 3, 8, 16, 32)


class Device:
    """Seconds of a round: weights or rows, whichever takes longer, give or take some noise."""

    def __init__(self, weights_s, row_s, draft_s, *, noise=0.05, slow=0.01, seed=0):
        self.weights_s, self.row_s, self.draft_s = weights_s, row_s, draft_s
        self.noise, self.slow, self.draw = noise, slow, random.Random(seed)

    def seconds(self, num_drafting, num_plain, budget):
        rows = num_drafting * (budget + 1) + num_plain
        seconds = max(self.weights_s, rows * self.row_s) + self.draft_s * (budget > 0)
        slow = 8.0 if self.draw.random() < self.slow else 1.0
        return seconds * slow * self.draw.uniform(1 - self.noise, 1 + self.noise)


class Requests:
    """Accepted ranks of a round: each depth is accepted with `rate`, at a rank that grows fast."""

    def __init__(self, rate, seed=0):
        self.rate, self.draw = rate, random.Random(seed)

    def ranks(self, budget):
        ranks, rank = [], 0
        while self.draw.random() < self.rate and len(ranks) < 7:
            rank += 1 + int(self.draw.expovariate(0.4))
            ranks.append(rank)
        return [r for r in ranks if r <= budget]


def speed(choose, device, requests, rounds, num_drafting, num_plain=0, pricing=None):
    """Tokens per second of some rounds; `pricing` is told what they took and brought."""
    tokens = seconds = 0
    for _ in range(rounds):
        budget = choose(num_drafting, num_plain)
        took = device.seconds(num_drafting, num_plain, budget)
        ranks = [requests.ranks(budget) for _ in range(num_drafting)]
        if pricing is not None:
            pricing.note(num_drafting, num_plain, budget, took, ranks)
        tokens += num_drafting + num_plain + sum(map(len, ranks))
        seconds += took
    return tokens / seconds


def fixed_speeds(device, rate, rounds, *load):
    """Tokens per second of each budget alone."""
    return {
        budget: speed(lambda *_, fixed=budget: fixed, device, Requests(rate), rounds, *load)
        for budget in BUDGETS
    }


# A card with rows to spare, one with few, two cores of a CPU.
CARD = (20e-3, 0.02e-3, 2e-3)
SMALL_CARD = (20e-3, 0.3e-3, 2e-3)
CPU = (28e-3, 5e-3, 6e-3)


@pytest.mark.parametrize("rate", [0.15, 0.5, 0.8])
@pytest.mark.parametrize(("num_drafting", "num_plain"), [(1, 0), (5, 0), (12, 0), (2, 10)])
@pytest.mark.parametrize("sizes", [CARD, SMALL_CARD, CPU])
def test_it_is_nearly_as_fast_as_the_best_fixed_budget(sizes, num_drafting, num_plain, rate):
    device = Device(*sizes)
    fixed = fixed_speeds(device, rate, 1500, num_drafting, num_plain)
    pricing = BudgetPricing(BUDGETS)
    requests = Requests(rate, seed=1)
    speed(pricing.choose, device, requests, 50, num_drafting, num_plain, pricing)
    found = speed(pricing.choose, device, requests, 1500, num_drafting, num_plain, pricing)
    assert found > 0.94 * max(fixed.values())


def test_the_first_rounds_of_a_server_cost_little():
    """Of a CPU under full load, where large trees are much too dear: they are not even tried."""
    device, pricing, asked = Device(*CPU, slow=0), BudgetPricing(BUDGETS), []

    def choose(*load):
        asked.append(pricing.choose(*load))
        return asked[-1]

    found = speed(choose, device, Requests(0.4), 100, 12, pricing=pricing)
    assert found > 0.8 * fixed_speeds(device, 0.4, 1000, 12)[0]
    assert set(asked) <= {0, 3, 8}
    assert asked[:4] == [0, 0, 3, 3]


@pytest.mark.parametrize("sizes", [SMALL_CARD, CPU])
def test_it_follows_the_load_and_the_requests(sizes):
    """Three hundred rounds of one request are few: single turns may be found out too slowly."""
    device, pricing, shares = Device(*sizes), BudgetPricing(BUDGETS), []
    for turn in range(6):
        for num_drafting, rate in ((1, 0.8), (12, 0.8), (1, 0.1), (12, 0.1)):
            requests = Requests(rate, seed=turn)
            speed(pricing.choose, device, requests, 60, num_drafting, pricing=pricing)
            found = speed(pricing.choose, device, requests, 300, num_drafting, pricing=pricing)
            best = max(fixed_speeds(device, rate, 1500, num_drafting).values())
            shares.append(found / best)
    assert min(shares) > 0.8
    assert sum(shares) / len(shares) > 0.95


def test_what_a_device_has_become_is_found_out():
    pricing = BudgetPricing(BUDGETS)
    for sizes in (CPU, CARD, CPU):
        device, requests = Device(*sizes), Requests(0.7)
        speed(pricing.choose, device, requests, 1500, 12, pricing=pricing)
        found = speed(pricing.choose, device, requests, 500, 12, pricing=pricing)
        assert found > 0.93 * max(fixed_speeds(device, 0.7, 1000, 12).values())


def test_a_slow_spell_of_one_budget_says_nothing_of_larger_ones():
    """The price of nothing is stale and high; 3 nodes are the best and stay it."""
    pricing = BudgetPricing((0, 3, 8))
    for _ in range(5):
        pricing.note(1, 0, 0, 0.2, [[]])
        pricing.note(1, 0, 3, 0.03, [[1]])
        pricing.note(1, 0, 8, 0.04, [[1]])
    assert pricing.choose(1, 0) == 3


def test_old_prices_are_asked_for_again():
    pricing = BudgetPricing((0, 3))
    for _ in range(3):
        pricing.note(1, 0, 0, 1.0, [[]])
        pricing.note(1, 0, 3, 9.0, [[1, 2]])
    asked = []
    for _ in range(1100):
        asked.append(pricing.choose(1, 0))
        # It has become cheap.
        pricing.note(1, 0, asked[-1], 1.1 if asked[-1] else 1.0, [[1, 2]] if asked[-1] else [[]])
    assert set(asked[:400]) == {0}
    # And so is the price of nothing, in turn.
    assert asked[600:].count(0) <= 4


def test_evidence_of_many_requests_is_outlived_like_that_of_one():
    pricing = BudgetPricing((0, 3))
    for _ in range(1000):
        pricing.choose(12, 0)
        pricing.note(12, 0, 3, 1.0, [[]] * 12)
    for _ in range(3):
        pricing.note(1, 0, 0, 1.0, [[]])
        pricing.note(1, 0, 3, 1.2, [[]])
    rounds = 0
    while pricing.choose(1, 0) == 0 or rounds < 20:
        pricing.note(1, 0, 3, 1.2, [[1]])
        rounds += 1
        assert rounds < 200


def test_what_was_seen_long_ago_is_unknown_again():
    pricing = BudgetPricing((0, 3))
    pricing.note(1, 0, 3, 1.0, [[1, 2]])
    for _ in range(200_000):
        pricing.choose(1, 0)
    (gain,) = pricing._gains
    assert (gain.weight, gain.total, gain.squares) == (0.0, 0.0, 0.0)


def test_rounds_without_anyone_who_drafts_teach_and_forget_nothing():
    pricing = BudgetPricing((0, 3))
    pricing.note(1, 0, 3, 1.0, [[1, 2]])
    before = dataclasses.astuple(pricing._gains[0])
    for _ in range(1000):
        assert pricing.choose(0, 5) == 0
    assert dataclasses.astuple(pricing._gains[0]) == before


def test_requests_that_cannot_draft_are_not_counted_on():
    pricing = BudgetPricing((0, 3))
    for budget, seconds in ((0, 1.0), (3, 1.4)):
        for _ in range(3):
            pricing.note(1, 9, budget, seconds, [[1, 2]] if budget else [[]])
            pricing.note(10, 0, budget, seconds, [[1, 2]] * 10 if budget else [[]] * 10)
    assert pricing.choose(1, 9) == 0
    assert pricing.choose(10, 0) == 3


def test_a_budget_of_nothing_is_the_only_choice():
    pricing = BudgetPricing((0,))
    assert pricing.choose(3, 1) == 0
    pricing.note(3, 1, 0, 1.0, [[], [], []])
    assert pricing.choose(3, 1) == 0


def test_equal_notes_give_equal_choices():
    chosen = []
    for _ in range(2):
        pricing, device, requests = BudgetPricing(BUDGETS), Device(*CPU), Requests(0.6)
        own = []
        for _ in range(200):
            own.append(pricing.choose(3, 0))
            ranks = [requests.ranks(own[-1]) for _ in range(3)]
            pricing.note(3, 0, own[-1], device.seconds(3, 0, own[-1]), ranks)
        chosen.append(own)
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 1
