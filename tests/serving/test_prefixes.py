# SPDX-License-Identifier: Apache-2.0
"""What a slot still holds of a prompt is not read again, and no answer, tree or round changes."""

import random

import pytest

from tests.serving_checks import record_prefills, record_trees
from tests.serving_world import answers_of, drafter, prompts, requests_for, run, world
from treespark.serving.engine import Engine
from treespark.serving.params import SamplingParams
from treespark.serving.scheduler import Request, common_length
from treespark.tree.policy import TreePolicy

POLICY = TreePolicy(5, 4, 16)
PROMPT = [n % 100 for n in range(7, 301, 7)]


@pytest.fixture
def prefills(monkeypatch):
    """Rows of each prefill forward of the shared target, as they happen."""
    return record_prefills(monkeypatch)


def engine_of(**options) -> Engine:
    """Three slots and a drafter."""
    target = world().target
    options = {"reuse_prefixes": True} | options
    return Engine(target, drafter(target), POLICY, max_num_seqs=3, **options)


def test_common_length_is_that_of_the_longest_equal_beginning():
    draw = random.Random(0)
    for _ in range(200):
        left = [draw.randrange(2) for _ in range(draw.randrange(9))]
        right = [draw.randrange(2) for _ in range(draw.randrange(9))]
        pairs = zip(left, right, strict=False)
        expected = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
        assert common_length(left, right) == expected


def test_the_next_turn_of_a_conversation_reads_only_what_is_new(prefills):
    engine = engine_of()
    (first,) = requests_for([PROMPT], 12)
    answer = run(engine, [first])["0"].token_ids
    follow = [*PROMPT, *answer, 5, 6, 7]
    prefills.clear()
    output = run(engine, requests_for([follow], 12))["0"]
    assert output.token_ids == world().reference(follow, 12)
    # The last answer's anchor, at least, has no row yet.
    assert 4 <= sum(map(sum, prefills)) <= 4 + 6
    assert engine.stats().num_cached_tokens == len(follow) - sum(map(sum, prefills))


@pytest.mark.parametrize("how", ["repeated", "at once"])
def test_a_prompt_is_read_once_for_all_who_ask_it(prefills, how):
    """Also for several at once: the others wait for the first, and for one row of their own."""
    engine = engine_of(prefill_chunk=16)
    requests = [
        Request(str(i), PROMPT, SamplingParams(9, ignore_eos=True, temperature=0.9 * (i == 1)))
        for i in (0, 2, 1)
    ]
    outputs = {}
    for batch in [[one] for one in requests] if how == "repeated" else [requests]:
        outputs |= run(engine, batch)
    assert sum(map(sum, prefills)) == len(PROMPT) + 2
    for name in ("0", "2"):
        assert outputs[name].token_ids == world().reference(PROMPT, 9)
    assert outputs["0"].metrics.rounds == outputs["2"].metrics.rounds


def test_rows_that_the_drafter_has_not_seen_are_read_again(prefills):
    """A sampled request leaves no draft context, so one that drafts cannot start from its rows."""
    engine = engine_of()
    drawn = SamplingParams(9, ignore_eos=True, temperature=0.9, seed=1)
    run(engine, [Request("s", PROMPT, drawn)])
    prefills.clear()
    outputs = run(engine, requests_for([PROMPT], 9))
    assert prefills == [[len(PROMPT)]]
    prefills.clear()
    outputs |= run(engine, [Request("s", PROMPT, drawn)])
    assert prefills == [[1]]
    assert outputs["0"].token_ids == world().reference(PROMPT, 9)


def test_the_first_asker_may_leave_while_the_others_wait(prefills):
    engine = engine_of(prefill_chunk=16)
    for request in requests_for([PROMPT] * 3, 9):
        engine.add(request)
    engine.step()
    assert engine.abort("0")
    outputs = run(engine, [])
    assert answers_of(outputs) == {name: world().reference(PROMPT, 9) for name in ("1", "2")}
    # The second goes on where the first stopped.
    assert sum(map(sum, prefills)) == len(PROMPT) + 1


def test_it_is_off_unless_asked_for(prefills):
    engine = Engine(world().target, max_num_seqs=3)
    for _ in range(2):
        run(engine, requests_for([PROMPT] * 2, 5))
    assert sum(map(sum, prefills)) == 4 * len(PROMPT)
    assert engine.stats().num_cached_tokens == 0


def test_short_common_beginnings_are_not_copied(prefills):
    engine = engine_of()
    run(engine, requests_for([PROMPT[:10] + [1] * 20, PROMPT[:10] + [2] * 20, PROMPT[:16]], 3))
    run(engine, requests_for([PROMPT[:16]], 3))
    assert engine.stats().num_cached_tokens == 0


def random_prompts(number: int) -> list[list[int]]:
    """Prompts that share beginnings of many lengths."""
    draw, trunk = random.Random(5), prompts(2, seed=9, longest=1)
    trunk = [[draw.randrange(100) for _ in range(60)] for _ in trunk]
    found = []
    for _ in range(number):
        if found and draw.random() < 0.3:
            found.append(list(draw.choice(found)))
            continue
        kept = draw.choice(trunk)[: draw.randrange(5, 60)]
        found.append([*kept, *[draw.randrange(100) for _ in range(draw.randrange(1, 12))]])
    return found


def test_answers_trees_and_rounds_are_those_of_an_engine_without_reuse():
    """Forty prompts of shared beginnings over three slots, with aborts and sampled ones between."""
    target, model, seen = world().target, drafter(world().target), []
    some = random_prompts(40)
    for reuse in (True, False):
        engine = Engine(
            target, model, POLICY, max_num_seqs=3, prefill_chunk=24, reuse_prefixes=reuse
        )
        trees, draw, finished = record_trees(engine), random.Random(3), {}
        for i, prompt in enumerate(some):
            temperature = 0.8 if i % 5 == 4 else 0.0
            options = {"temperature": temperature, "seed": i, "ignore_eos": True}
            engine.add(Request(str(i), prompt, SamplingParams(draw.randrange(1, 14), **options)))
        while engine.has_work:
            finished |= {o.request_id: o for o in engine.step() if o.finish_reason}
            for name in ("7", "19", "23"):
                # Aborted as soon as they hold a slot: in the middle of prefill or behind it.
                held = engine.scheduler.slots
                if any(slot.request and slot.request.request_id == name for slot in held):
                    engine.abort(name)
        greedy = {name: o for name, o in finished.items() if o.metrics.plain_decoding is None}
        seen.append(
            (
                answers_of(finished),
                {name: output.metrics.rounds for name, output in greedy.items()},
                {name: trees.get(name) for name in greedy},
            )
        )
        assert (engine.stats().num_cached_tokens > 300) == reuse
    assert seen[0] == seen[1]
    for name, ids in seen[0][0].items():
        if int(name) % 5 != 4:
            assert ids == world().reference(some[int(name)], len(ids))
