# SPDX-License-Identifier: Apache-2.0
"""Requests share slots and rounds fairly: prefill in chunks beside decoding, aborts, reuse."""

import pytest

from tests.serving_checks import record_prefills, record_trees
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
from treespark.serving.scheduler import Request, RequestState
from treespark.tree.policy import TreePolicy

POLICY = TreePolicy(5, 4, 16)
LIMITS = [9, 3, 14, 1, 20, 7, 12, 5]
PROMPTS = prompts(len(LIMITS), seed=8)
EXPECTED = {
    str(i): world().reference(prompt, limit)
    for i, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
}


@pytest.fixture
def prefills(monkeypatch):
    """Rows of each prefill forward of the shared target, as they happen."""
    return record_prefills(monkeypatch)


@pytest.mark.parametrize("chunk", [4, 9])
def test_a_step_prefills_at_most_one_chunk_and_every_running_request_grows(prefills, chunk):
    """Long prompts join in the middle; nobody who runs waits for more than one chunk of them."""
    target = world().target
    engine = Engine(target, drafter(target), POLICY, max_num_seqs=4, prefill_chunk=chunk)
    for request in requests_for(PROMPTS[:2], 60):
        engine.add(request)
    num_full = 0
    for step in range(200):
        if step == 6:
            for i in range(3):
                engine.add(Request(f"long{i}", [3 + i] * 40, SamplingParams(5, ignore_eos=True)))
        held = engine.scheduler.in_state(RequestState.RUNNING)
        before = {request: len(request.output_token_ids) for _, request in held}
        prefills.clear()
        engine.step()
        assert len(prefills) <= 1
        assert sum(sum(rows) for rows in prefills) <= chunk
        num_full += sum(sum(rows) for rows in prefills) == chunk
        assert all(len(request.output_token_ids) > size for request, size in before.items())
    assert not engine.has_work
    assert num_full >= 3 * 40 // chunk - 1


def test_prompts_that_fit_share_one_prefill_forward(prefills):
    engine = Engine(world().target, max_num_seqs=8, prefill_chunk=512)
    outputs = run(engine, requests_for(PROMPTS, LIMITS))
    assert prefills == [[len(prompt) for prompt in PROMPTS]]
    assert answers_of(outputs) == EXPECTED


def test_a_chunk_ends_inside_a_prompt_and_goes_on_there(prefills):
    engine = Engine(world().target, max_num_seqs=3, prefill_chunk=10)
    run(engine, requests_for([[5] * 6, [6] * 12, [7] * 3], 1))
    assert prefills == [[6, 4], [8, 2], [1]]


@pytest.mark.parametrize("abort_at", range(12))
def test_aborted_neighbours_alter_nobody_and_leak_no_slot(abort_at):
    """One abort before each step in turn: waiting, in the middle of prefill, or running."""
    target = world().target
    engine = Engine(target, drafter(target), POLICY, max_num_seqs=3, prefill_chunk=7)
    doomed = [
        Request(f"x{i}", prompt, SamplingParams(30, ignore_eos=True, temperature=0.7 * (i % 2)))
        for i, prompt in enumerate(PROMPTS)
    ]
    requests = requests_for(PROMPTS, LIMITS)
    for one, other in zip(doomed, requests, strict=True):
        engine.add(one)
        engine.add(other)
    finished = {}
    for step in range(400):
        if step >= abort_at and doomed:
            name = doomed.pop(0).request_id
            was_there = engine.scheduler.holds(name)
            assert engine.abort(name) == was_there
            assert not engine.abort(name)
        finished |= {o.request_id: o.token_ids for o in engine.step() if o.finish_reason}
        if not engine.has_work:
            break
    assert {name: ids for name, ids in finished.items() if name in EXPECTED} == EXPECTED
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_slots) == (0, 0, 3)


def test_a_slot_is_reused_without_a_trace_of_its_last_holder():
    """One slot, one request after the other, with draft rows and tree rows left behind."""
    target = world().target
    engine = Engine(target, drafter(target), POLICY, max_num_seqs=1)
    assert answers_of(run(engine, requests_for(PROMPTS, LIMITS))) == EXPECTED
    assert answers_of(run(engine, requests_for(PROMPTS, LIMITS))) == EXPECTED
    random_trees = Engine(
        target, policy=TreePolicy(budget=20), max_num_seqs=1, propose=RandomTrees(2, VOCAB, 20)
    )
    assert answers_of(run(random_trees, requests_for(PROMPTS, LIMITS))) == EXPECTED


def test_a_prompt_that_does_not_fit_stops_nobody():
    engine = Engine(world().target, max_model_len=64, max_num_seqs=2)
    engine.add(Request("good", [1, 2], SamplingParams(4, ignore_eos=True)))
    engine.step()
    for bad in ([1] * 64, [], [VOCAB], [-1], [2**40]):
        with pytest.raises(ValueError, match="request 'bad'"):
            engine.add(Request("bad", bad))
    engine.add(Request("next", [3], SamplingParams(4, ignore_eos=True)))
    outputs = run(engine, [])
    assert {name: len(output.token_ids) for name, output in outputs.items()} == {
        "good": 4,
        "next": 4,
    }


def test_sixteen_at_once_draft_and_accept_what_each_does_alone():
    target = world().target
    model, some, seen = drafter(target), prompts(16, seed=12, longest=24), []
    for num_slots in (1, 16):
        engine = Engine(target, model, POLICY, max_num_seqs=num_slots)
        trees = record_trees(engine)
        outputs = run(engine, requests_for(some, 12))
        seen.append((trees, {name: o.metrics.rounds for name, o in outputs.items()}))
    assert seen[0] == seen[1]


# ------------------------------------------------------------------ stats


def test_totals_never_fall_and_end_as_the_sum_of_the_records():
    target = world().target
    engine = Engine(target, drafter(target), POLICY, max_num_seqs=3, prefill_chunk=16)
    requests = requests_for(PROMPTS, LIMITS)
    requests.append(Request("s", [4, 5], SamplingParams(9, temperature=1.0, ignore_eos=True)))
    for request in requests:
        engine.add(request)
    outputs, before = {}, engine.stats()
    assert (before.num_waiting, before.num_running, before.kv_usage) == (len(requests), 0, 0)
    while engine.has_work:
        outputs |= {o.request_id: o for o in engine.step() if o.finish_reason}
        now = engine.stats()
        for name in ("prompt", "generation", "committed", "draft", "accepted"):
            field = f"num_{name}_tokens"
            assert getattr(now, field) >= getattr(before, field)
        assert now.num_running + now.num_free_slots == 3
        assert 0 <= now.kv_usage <= 1
        assert (now.kv_usage > 0) == (now.num_running > 0)
        before = now
    records = [output.metrics for output in outputs.values()]
    stats = engine.stats()
    assert stats.num_prompt_tokens == sum(r.num_prompt_tokens for r in records)
    assert stats.num_generation_tokens == sum(r.num_output_tokens for r in records)
    assert stats.num_rounds == sum(r.num_rounds for r in records)
    assert stats.num_committed_tokens == stats.num_generation_tokens - len(records)
    assert stats.num_drafts == sum(r.num_drafts for r in records) > 0
    assert stats.num_draft_tokens == sum(r.num_proposed for r in records)
    assert stats.num_accepted_tokens == sum(r.num_accepted for r in records) > 0
    assert sum(stats.num_accepted_per_position) == stats.num_accepted_tokens
    for depth, count in enumerate(stats.num_accepted_per_position):
        assert count == sum((r.accepted_per_depth + [0] * 5)[depth] for r in records)
    assert stats.tree_budget == 16


def test_a_snapshot_does_not_change_afterwards():
    engine = Engine(world().target, drafter(world().target), POLICY)
    early = engine.stats()
    run(engine, requests_for(PROMPTS, LIMITS))
    assert early.num_generation_tokens == sum(early.num_accepted_per_position) == 0
