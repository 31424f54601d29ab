# SPDX-License-Identifier: Apache-2.0
"""How much is drafted changes the speed alone: modes, short drafters, and what a round costs."""

import dataclasses
import time

import pytest
import torch

from tests.serving_world import (
    VOCAB,
    Oracle,
    answers_of,
    drafter,
    prompts,
    requests_for,
    run,
    world,
)
from treespark import LLM
from treespark.drafter import growing as growing_module
from treespark.errors import UsageError
from treespark.serving import accept as accept_module
from treespark.serving.engine import Engine
from treespark.serving.params import SamplingParams
from treespark.serving.pricing import BudgetPricing
from treespark.serving.scheduler import Request
from treespark.serving.speculation import MODES, SpeculationControl
from treespark.tree import builder as builder_module
from treespark.tree.policy import TreePolicy, pack

LIMITS = [12, 20, 5, 9]
PROMPTS = prompts(len(LIMITS), seed=4)
EXPECTED = {
    str(i): world().reference(prompt, limit)
    for i, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
}


@pytest.mark.parametrize("mode", [None, "off", "chain", "15", "32"])
def test_every_mode_gives_the_same_text_and_its_own_trees(mode):
    target = world().target
    engine = Engine(target, drafter(target), TreePolicy(5, 4, 12), speculation=mode)
    outputs = run(engine, requests_for(PROMPTS, LIMITS))
    assert answers_of(outputs) == EXPECTED
    rounds = [round_ for output in outputs.values() for round_ in output.metrics.rounds]
    largest = {None: 12, "off": 0, "chain": 5, "15": 15, "32": 32}[mode]
    assert max(r.num_proposed for r in rounds) == engine.stats().tree_budget == largest
    if mode == "chain":
        assert all(r.num_proposed == r.proposed_depth for r in rounds)
    reasons = {output.metrics.plain_decoding for output in outputs.values()}
    assert reasons == ({"off"} if mode == "off" else {None})


def test_the_modes_of_the_tests_are_all_there_are():
    assert MODES == ("off", "chain", "15", "32", "auto")


@pytest.mark.parametrize("order", [(0, 12), (12, 3, 0, 8), (3, 0, 0, 12, 0), (0, 0, 0, 3)])
def test_budgets_that_change_from_round_to_round_change_no_text(monkeypatch, order):
    """Requests join late, one is sampled, and what was not drafted is context of later drafts."""
    asked = []

    def choose(pricing, num_drafting, num_plain):
        asked.append((num_drafting, num_plain))
        return order[len(asked) % len(order)]

    monkeypatch.setattr(BudgetPricing, "choose", choose)
    target = world().target
    engine = Engine(
        target, drafter(target), TreePolicy(5, 4, 12), speculation="auto", max_num_seqs=3
    )
    budgets = []
    engine.on_round = lambda batch, tree, accepted: budgets.append(
        (engine.stats().tree_budget, int(tree.num_nodes.max()))
    )
    requests = requests_for(PROMPTS, LIMITS)
    requests.append(Request("s", [4, 5], SamplingParams(9, temperature=1.0, ignore_eos=True)))
    outputs = run(engine, requests, arrivals=[0, 1, 4, 6, 2])
    assert {name: outputs[name].token_ids for name in EXPECTED} == EXPECTED
    assert all(nodes <= budget for budget, nodes in budgets)
    assert {budget for budget, _ in budgets} == set(order)
    assert max(nodes for _, nodes in budgets) == max(order)
    assert {1, 2} <= {num_drafting for num_drafting, _ in asked}
    assert {0, 1} <= {num_plain for _, num_plain in asked}
    assert [outputs[name].metrics.plain_decoding for name in EXPECTED] == [None] * len(EXPECTED)


def test_auto_is_told_what_rounds_took_and_brought(monkeypatch):
    notes, target = [], world().target

    def note(pricing, *values):
        notes.append(values)

    monkeypatch.setattr(BudgetPricing, "choose", lambda *load: 12)
    monkeypatch.setattr(BudgetPricing, "note", note)
    engine = Engine(target, drafter(target), TreePolicy(5, 4, 12), speculation="auto")
    seen = []
    engine.on_round = lambda batch, tree, accepted: seen.append((tree, accepted))
    # One request draws, one has room for a single token behind the first, where no draft fits.
    requests = requests_for(PROMPTS[:2], [30, 2])
    requests.append(Request("s", [4, 5], SamplingParams(9, temperature=1.0, ignore_eos=True)))
    run(engine, requests)
    # Nothing to learn where no request has room for a draft.
    seen = [(tree, accepted) for tree, accepted in seen if tree.tokens.shape[1] > 1]
    assert notes[0][:3] == (2, 1, 12)
    assert {values[:2] for values in notes[1:]} == {(1, 1), (1, 0)}
    assert all(0 < seconds < 60 for *_, seconds, _ in notes)
    for (tree, accepted), (*_, ranks) in zip(seen, notes, strict=True):
        slots = range(1, tree.scores.shape[1])
        order = sorted(slots, key=lambda slot: (-float(tree.scores[0, slot]), slot))
        places = [order.index(node) + 1 for node in accepted[0].nodes[1:]]
        assert [list(row) for row in ranks] == [places]
    assert any(row for *_, ranks in notes for row in ranks)


def test_drafts_behind_a_stop_brought_nothing(monkeypatch):
    """The whole vocabulary is drafted, so all five depths are accepted wherever there is room."""
    noted = []
    monkeypatch.setattr(BudgetPricing, "choose", lambda *load: 155)
    monkeypatch.setattr(BudgetPricing, "note", lambda pricing, *values: noted.append(values[-1]))
    small = world(vocab=5)
    prompt, target = [1, 3], small.target
    truth = small.reference(prompt, 12)
    # The first token comes before the first round, and each fourth one behind it is a bonus.
    at = next(i for i, token in enumerate(truth) if truth.index(token) == i and i % 4)
    stop = truth[at]
    policy = TreePolicy(3, 5, 155, 25)
    engine = Engine(target, drafter(target, block_size=3), policy, speculation="auto")
    params = SamplingParams(12, ignore_eos=True, stop_token_ids=[stop])
    engine.add(Request("0", prompt, params))
    while engine.has_work:
        outputs = engine.step()
    assert outputs[0].token_ids == truth[: at + 1]
    rounds = outputs[0].metrics.rounds
    assert [len(row) for (row,) in noted] == [r.num_accepted for r in rounds][: len(noted)]
    assert rounds[-1].num_accepted == rounds[-1].num_committed == at % 4


def test_what_reads_prompts_is_not_charged_to_the_round(monkeypatch):
    """Each forward of prompts takes a third of a second longer here."""
    seconds, target = [], world().target
    read = target.forward_rows

    def slow(*args, **options):
        # Verification asks for the logits of all rows.
        if not options:
            time.sleep(0.3)
        return read(*args, **options)

    monkeypatch.setattr(target, "forward_rows", slow)
    monkeypatch.setattr(BudgetPricing, "note", lambda pricing, *values: seconds.append(values[3]))
    engine = Engine(target, drafter(target), speculation="auto", max_num_seqs=1)
    run(engine, requests_for(PROMPTS[:3], 4))
    assert len(seconds) >= 3
    assert min(seconds) < 0.3


def test_a_stand_in_for_the_drafter_cannot_follow_choices():
    target = world().target
    with pytest.raises(UsageError, match="speculation auto: `propose` cannot follow"):
        Engine(target, drafter(target), speculation="auto", propose=Oracle(EXPECTED, VOCAB, 5, 2))


@pytest.mark.parametrize(
    ("policy", "budgets"),
    [
        (TreePolicy(7, 4, 32), [0, 3, 8, 16, 32]),
        (TreePolicy(7, 4, 20), [0, 3, 8, 16, 20]),
        (TreePolicy(7, 4, 64), [0, 3, 8, 16, 32, 64]),
        (TreePolicy(7, 1, 7), [0, 3, 7]),
        (TreePolicy(7, 1, 32), [0, 3, 7]),
        (TreePolicy(1, 4, 32), [0, 3, 4]),
        (TreePolicy(2, 4, 32), [0, 3, 8, 16, 20]),
        (TreePolicy(7, 4, 2), [0, 2]),
        (TreePolicy(7, 4, 0), [0]),
    ],
)
def test_auto_stays_within_the_policy(monkeypatch, policy, budgets):
    made = []
    monkeypatch.setattr(
        "treespark.serving.speculation.BudgetPricing", lambda given: made.append(list(given))
    )
    control = SpeculationControl(policy, "auto")
    assert made == [budgets]
    assert control.largest == dataclasses.replace(policy, budget=budgets[-1])


def test_a_drafter_that_is_off_keeps_no_context():
    target = world().target
    engine = Engine(target, drafter(target), speculation="off")
    assert engine.context is engine.drafter is None
    run(engine, requests_for(PROMPTS, LIMITS))
    assert target.target_layer_ids == []


def test_decoding_without_a_drafter_is_plain_and_says_so():
    outputs = run(Engine(world().target), requests_for(PROMPTS, LIMITS))
    assert {output.metrics.plain_decoding for output in outputs.values()} == {"off"}


@pytest.mark.parametrize(
    ("model", "mode", "word"),
    [
        (True, "16", "--speculation 16: allowed: off, chain, 15, 32, auto"),
        (False, "32", "a drafter"),
        (False, "auto", "a drafter"),
    ],
)
def test_a_mode_that_cannot_work_is_refused(model, mode, word):
    target = world().target
    with pytest.raises(UsageError, match=word):
        Engine(target, drafter(target) if model else None, speculation=mode)
    assert LLM(target, speculation="off").engine.stats().tree_budget == 0


def test_a_drafter_with_a_shorter_context_stops_drafting_for_that_request_alone():
    """One grows beyond the drafter's 40 positions, one begins there, one never gets so far."""
    target = world().target
    model = drafter(target, max_position_embeddings=40)
    some, limits = [[5] * 20, [6] * 50, [7] * 3], [60, 30, 25]
    engine = Engine(target, model, TreePolicy(5, 4, 16), max_num_seqs=3, prefill_chunk=16)
    outputs = run(engine, requests_for(some, limits))
    for i, (prompt, limit) in enumerate(zip(some, limits, strict=True)):
        assert outputs[str(i)].token_ids == world().reference(prompt, limit)
    assert engine.context.max_len == 40
    records = [outputs[str(i)].metrics for i in range(3)]
    assert [r.plain_decoding for r in records] == ["drafter_context", "drafter_context", None]
    assert [r.num_drafts > 0 for r in records] == [True, False, True]
    position = 20
    for round_ in records[0].rounds:
        # A block of five stands behind the anchor.
        assert (round_.num_proposed > 0) == (position + 5 < 40)
        position += round_.num_committed


@pytest.mark.parametrize(("propose", "mode"), [(False, None), (True, None), (False, "auto")])
def test_computed_padding_changes_nothing(monkeypatch, propose, mode):
    """The layout of accelerators: every tree as wide as the widest, its pads run like nodes."""
    target = world().target
    monkeypatch.setattr(target, "runs_padding", True)
    engine = Engine(
        target,
        None if propose else drafter(target),
        TreePolicy(5, 4, 24),
        max_num_seqs=3,
        propose=Oracle(EXPECTED, VOCAB, 5, 2) if propose else None,
        speculation=mode,
    )
    requests = requests_for(PROMPTS, LIMITS)
    requests.append(Request("s", [4, 5], SamplingParams(9, temperature=1.0, ignore_eos=True)))
    outputs = run(engine, requests)
    assert {name: outputs[name].token_ids for name in EXPECTED} == EXPECTED


@pytest.mark.parametrize("mode", [None, "auto"])
def test_a_round_fetches_from_the_device_once(monkeypatch, mode):
    """Counted where a tensor becomes Python numbers; prefill's first tokens are one more fetch."""
    target = world().target
    # As on an accelerator.
    monkeypatch.setattr(target, "runs_padding", True)
    monkeypatch.setattr(growing_module, "is_host", lambda device: False)
    monkeypatch.setattr(BudgetPricing, "choose", lambda *load: 16)
    engine = Engine(target, drafter(target), TreePolicy(5, 4, 16), speculation=mode)
    for i, prompt in enumerate(PROMPTS):
        options = {"logprobs": i, "temperature": 0.5 * (i == 1), "min_tokens": 6 * (i == 2)}
        engine.add(Request(str(i), prompt, SamplingParams(40, ignore_eos=True, **options)))
    engine.step()
    fetches, elsewhere, inside = [], [], []
    fetch = accept_module.to_host

    def counted_fetch(tensors):
        fetches.append(len(tensors))
        inside.append(1)
        try:
            return fetch(tensors)
        finally:
            inside.clear()

    def counted(name):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, **options):
            if not inside:
                elsewhere.append(name)
            return original(self, *args, **options)

        return spy

    def pack_on_cpu(*args):
        # The CPU's form of pack_tree works in numpy, where nothing moves; kernels do not.
        inside.append(1)
        try:
            return pack(*args)
        finally:
            inside.clear()

    monkeypatch.setattr(accept_module, "to_host", counted_fetch)
    monkeypatch.setattr(builder_module, "pack", pack_on_cpu)
    names = ["tolist", "item", "cpu", "numpy", "nonzero", "unique"]
    names += ["__bool__", "__int__", "__float__", "__index__"]
    for name in names:
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    for _ in range(3):
        engine.step()
    assert fetches == [5 if mode is None else 6] * 3
    assert elsewhere == []
