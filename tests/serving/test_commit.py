# SPDX-License-Identifier: Apache-2.0
"""`commit` ends a request where one-token decoding would, and counts exactly what it kept."""

import itertools

import pytest

from tests.serving_checks import check_counts
from tests.serving_world import VOCAB, drafter, prompts, requests_for, run, true_chain, world
from treespark.serving.commit import Proposal, commit
from treespark.serving.engine import Engine
from treespark.serving.records import RequestRecord, RoundRecord
from treespark.serving.scheduler import Request, SamplingParams
from treespark.tree.policy import TreePolicy

EOS, OTHER_EOS = 90, 91


def running(max_tokens: int = 100, output: tuple[int, ...] = (1,)) -> Request:
    """A request after prefill: a prompt of 4 tokens and one output token."""
    request = Request("r", [5, 6, 7, 8], SamplingParams(max_tokens))
    request.max_output_len = max_tokens
    request.stop_ids = frozenset({EOS, OTHER_EOS})
    request.record = RequestRecord(4, 0.0)
    for token in output:
        commit(request, [token], None, 1.0)
        request.record.num_prefill_tokens = len(request.output_token_ids)
    return request


def after_round(request: Request, path: list[int], bonus: int, depth: int = 7) -> RoundRecord:
    """Commit one round and return what it recorded."""
    commit(request, [*path, bonus], Proposal(len(path), 32, depth), 2.0)
    return request.record.rounds[-1]


@pytest.mark.parametrize(
    ("path", "bonus", "kept", "record"),
    [
        ([10, 11], 12, [10, 11, 12], RoundRecord(3, 2, 32, 7)),
        ([], 12, [12], RoundRecord(1, 0, 32, 7)),
        # In the path: no bonus, nothing behind it counts as proposed.
        ([10, EOS, 11], 12, [10, EOS], RoundRecord(2, 2, 32, 2)),
        ([EOS, 10], 12, [EOS], RoundRecord(1, 1, 32, 1)),
        # As the bonus.
        ([10, 11], EOS, [10, 11, EOS], RoundRecord(3, 2, 32, 7)),
        ([], EOS, [EOS], RoundRecord(1, 0, 32, 7)),
        # At the deepest depth.
        ([1, 2, 3, 4, 5, 6, EOS], 12, [1, 2, 3, 4, 5, 6, EOS], RoundRecord(7, 7, 32, 7)),
        # Two of them: the first ends it.
        ([10, OTHER_EOS, EOS], 12, [10, OTHER_EOS], RoundRecord(2, 2, 32, 2)),
        ([10, EOS, OTHER_EOS], EOS, [10, EOS], RoundRecord(2, 2, 32, 2)),
    ],
)
def test_stop_id_ends_the_round_where_it_stands(path, bonus, kept, record):
    request = running()
    assert after_round(request, path, bonus) == record
    assert request.output_token_ids == [1, *kept]
    ends = kept[-1] in (EOS, OTHER_EOS)
    assert request.finish_reason == ("stop" if ends else None)
    assert request.stop_reason == (kept[-1] if ends else None)
    assert (request.record.finished_s is not None) == ends


@pytest.mark.parametrize(
    ("remaining", "committed", "accepted"), [(1, 1, 1), (3, 3, 3), (4, 4, 3), (5, 4, 3)]
)
def test_token_limit_is_never_exceeded(remaining, committed, accepted):
    """A_g = 3 accepted tokens against a limit of 1, A_g, A_g + 1 and one more."""
    request = running(max_tokens=1 + remaining)
    record = after_round(request, [10, 11, 12], 13)
    assert (record.num_committed, record.num_accepted, record.proposed_depth) == (
        committed,
        accepted,
        7,
    )
    assert request.output_token_ids == [1, 10, 11, 12, 13][: 1 + remaining]
    assert request.finish_reason == ("length" if remaining < 5 else None)


def test_stop_id_on_the_last_allowed_token_is_a_stop():
    request = running(max_tokens=3)
    after_round(request, [10, EOS], 12)
    assert (request.finish_reason, request.stop_reason) == ("stop", EOS)


def test_prefill_token_is_output_but_no_round():
    request = running(output=(EOS,))
    assert (request.finish_reason, request.output_token_ids, request.record.rounds) == (
        "stop",
        [EOS],
        [],
    )
    assert request.record.num_output_tokens == request.record.num_prefill_tokens == 1
    request = running(max_tokens=1)
    assert request.finish_reason == "length"


def test_length_is_the_anchors_position():
    request = running()
    assert request.length == 4
    after_round(request, [10, 11], 12)
    assert request.length == 7


def test_nothing_is_committed_after_the_end():
    request = running(output=(EOS,))
    with pytest.raises(AssertionError, match="finished"):
        commit(request, [3], None, 3.0)


# ------------------------------------------------------------------ through the engine


def first_repeat_free(answer: list[int], index: int) -> bool:
    """Whether the token at `index` appears there for the first time."""
    return answer.index(answer[index]) == index


@pytest.mark.parametrize("how", ["autoregressive", "tree", "chain7"])
@pytest.mark.parametrize("field", ["eos", "stop_token_ids"])
def test_declaring_any_output_token_a_stop_ends_there(how, field, monkeypatch):
    """Every position of the answer in turn: as prefill token, in a path, as bonus, at depth B."""
    target = world().target
    seen_depths = set()
    for prompt in prompts(3, seed=5):
        answer = world().reference(prompt, 24)
        for index in (i for i in range(24) if first_repeat_free(answer, i)):
            stop = answer[index]
            params = (
                {"stop_token_ids": (stop,)} if field == "stop_token_ids" else {"ignore_eos": False}
            )
            if field == "eos":
                monkeypatch.setattr(target, "eos_token_ids", {stop, VOCAB + 1})
            propose = true_chain({"0": answer}, 7) if how == "chain7" else None
            model = drafter(target) if how == "tree" else None
            policy = TreePolicy(7 if propose else 5, 4, 16)
            engine = Engine(target, model, policy, propose=propose)
            output = run(engine, requests_for([prompt], 24, **params))["0"]
            assert output.token_ids == answer[: index + 1]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)
            check_counts(output)
            if how == "chain7" and output.metrics.rounds:
                seen_depths.add(output.metrics.rounds[-1].num_committed)
    if how == "chain7":
        assert seen_depths == {1, 2, 3, 4, 5, 6, 7, 8}


@pytest.mark.parametrize("max_tokens", range(1, 21))
def test_counts_match_ids_for_every_limit(max_tokens):
    target = world().target
    prompt = prompts(1, seed=9)[0]
    answer = world().reference(prompt, 30)
    policy = TreePolicy(7, budget=16)
    engines = [
        Engine(target, drafter(target), TreePolicy(5, 4, 16)),
        # Proposes beyond the limit: the commit has to cut.
        Engine(target, policy=policy, propose=true_chain({"0": answer}, 7)),
    ]
    for engine in engines:
        output = run(engine, requests_for([prompt], max_tokens))["0"]
        assert output.token_ids == answer[:max_tokens]
        assert output.finish_reason == "length"
        check_counts(output)


def test_ignore_eos_goes_on_to_the_limit(monkeypatch):
    prompt = prompts(1, seed=9)[0]
    answer = world().reference(prompt, 12)
    monkeypatch.setattr(world().target, "eos_token_ids", set(answer))
    engine = Engine(world().target)
    outputs = run(engine, requests_for([prompt], 12, ignore_eos=True))
    assert outputs["0"].token_ids == answer
    outputs = run(engine, requests_for([prompt], 12, ignore_eos=False))
    assert outputs["0"].token_ids == answer[:1]


def test_trees_are_clipped_before_the_limit():
    """The bonus is the last token: a draft deeper than the rest of the output is wasted."""
    target = world().target
    engine = Engine(target, drafter(target), TreePolicy(5, 4, 32))
    slack = []
    for max_tokens in (2, 3, 6, 9):
        for output in run(engine, requests_for(prompts(4), max_tokens)).values():
            left = max_tokens - 1
            for round_ in output.metrics.rounds:
                slack.append(left - 1 - round_.proposed_depth)
                left -= round_.num_committed
            assert left == 0
    assert min(slack) == 0


def test_stop_position_and_limit_together_never_overcount():
    prompt = prompts(1, seed=11)[0]
    answer = world().reference(prompt, 16)
    target = world().target
    stops = [i for i in range(16) if first_repeat_free(answer, i)]
    for index, max_tokens in itertools.product(stops[::3], range(1, 17)):
        propose = true_chain({"0": answer}, 5)
        engine = Engine(target, policy=TreePolicy(5, budget=8), propose=propose)
        params = {"stop_token_ids": (answer[index],)}
        output = run(engine, requests_for([prompt], max_tokens, **params))["0"]
        assert output.token_ids == answer[: min(index + 1, max_tokens)]
        check_counts(output)
