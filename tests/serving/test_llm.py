# SPDX-License-Identifier: Apache-2.0
"""LLM.generate: any kind of prompt, answers in order, and a clean state after an interruption."""

import itertools

import pytest

from tests.serving_world import TEXT_VOCAB, drafter, prompts, world
from treespark import LLM, SamplingParams, TreePolicy
from treespark.errors import UsageError


@pytest.fixture(scope="module")
def text_world():
    """A target with a tokenizer of one token per byte."""
    return world(vocab=TEXT_VOCAB, eos=256, seed=3)


def llm(text_world, **options) -> LLM:
    """An LLM of two slots that drafts."""
    target = text_world.target
    return LLM(target, drafter(target), TreePolicy(5, 3, 12), max_num_seqs=2, **options)


def test_answers_keep_the_order_of_prompts(text_world):
    some = prompts(7, vocab=256)
    params = [SamplingParams(n, ignore_eos=True) for n in (20, 1, 5, 9, 2, 14, 3)]
    outputs = llm(text_world).generate(some, params)
    assert [o.prompt_token_ids for o in outputs] == some
    assert [len(o.token_ids) for o in outputs] == [20, 1, 5, 9, 2, 14, 3]
    for prompt, output in zip(some, outputs, strict=True):
        assert output.token_ids == text_world.reference(prompt, len(output.token_ids))


def test_text_ids_and_chat_messages_are_prompts(text_world):
    chat = [{"role": "user", "content": "hi"}]
    spelled = "[user]hi[assistant]"
    model, params = llm(text_world), SamplingParams(6)
    mixed = model.generate([spelled, list(spelled.encode()), chat], params)
    assert len({tuple(o.token_ids) for o in mixed}) == 1
    assert {tuple(o.prompt_token_ids) for o in mixed} == {tuple(spelled.encode())}
    for alone in (spelled, list(spelled.encode()), chat):
        (output,) = model.generate(alone, params)
        assert output.token_ids == mixed[0].token_ids


def test_no_prompts_give_no_answers(text_world):
    assert llm(text_world).generate([]) == []


@pytest.mark.parametrize(
    ("some", "params", "word"),
    [
        (["a", ""], None, "empty"),
        (["a", []], None, "empty"),
        (["a", [1, "b"]], None, "int, str"),
        (["a", "b"], [SamplingParams()], "1 given for 2"),
        (["a", [1] * 256], None, "256 tokens"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(text_world, some, params, word):
    model = llm(text_world)
    with pytest.raises(UsageError, match=word):
        model.generate(some, params)
    assert not model.engine.has_work
    assert len(model.generate(["fine"], SamplingParams(2, ignore_eos=True))[0].token_ids) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["draft_block", "extend_contexts"])
def test_an_interrupted_run_leaves_the_llm_usable(text_world, monkeypatch, error, where):
    model, some, params = (
        llm(text_world),
        prompts(5, vocab=256),
        SamplingParams(15, ignore_eos=True),
    )
    expected = [o.token_ids for o in model.generate(some, params)]
    original, calls = getattr(model.engine.drafter, where), []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 7:
            raise error
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(model.engine.drafter, where, interrupted)
        with pytest.raises(error):
            model.generate(some, params)
    assert not model.engine.has_work
    assert [o.token_ids for o in model.generate(some, params)] == expected


def test_a_stream_grows_to_the_answer_of_generate(text_world):
    model, params = llm(text_world), SamplingParams(12, ignore_eos=True)
    (whole,) = model.generate("hello", params)
    seen = [(o.text, len(o.token_ids), o.finish_reason) for o in model.stream("hello", params)]
    assert seen[-1] == (whole.text, 12, "length")
    assert all(later[0].startswith(earlier[0]) for earlier, later in itertools.pairwise(seen))
    assert [reason for _, _, reason in seen[:-1]] == [None] * (len(seen) - 1)


def test_a_stream_that_is_left_drops_its_request(text_world):
    model, params = llm(text_world), SamplingParams(12, ignore_eos=True)
    stream = model.stream("hello", params)
    next(stream)
    assert model.engine.has_work
    stream.close()
    assert not model.engine.has_work
    with pytest.raises(UsageError, match="empty"):
        next(model.stream("", params))
    assert len(list(model.stream("hello", params))) > 0


def test_progress_bar_counts_requests(text_world, capsys):
    llm(text_world).generate(["a", "b", "c"], SamplingParams(2), progress=True)
    assert "3/3" in capsys.readouterr().err
    llm(text_world).generate(["a"], SamplingParams(2))
    assert capsys.readouterr().err == ""


def test_folders_load_like_objects(text_world, tmp_path):
    target = text_world.target
    model = drafter(target, target_fingerprint=target.fingerprint)
    model.save_pretrained(tmp_path / "drafter")
    loaded = LLM(target.path, tmp_path / "drafter", dtype="float32", device="cpu")
    # The policy is the one in the drafter's config.
    assert loaded.engine.policy == TreePolicy(5, 4, 32)
    params = SamplingParams(12, ignore_eos=True)
    some = prompts(3, vocab=256)
    outputs = loaded.generate(some, params)
    assert [o.token_ids for o in outputs] == [text_world.reference(prompt, 12) for prompt in some]
    assert any(r.num_proposed == 32 for o in outputs for r in o.metrics.rounds)


def test_times_of_a_request_are_in_order_and_of_the_phases_add_up(text_world):
    model = llm(text_world, profile=True)
    for output in model.generate(prompts(3, vocab=256), SamplingParams(9, ignore_eos=True)):
        m = output.metrics
        assert m.arrival_s <= m.admitted_s <= m.first_token_s <= m.finished_s
    clock = model.engine.clock
    assert clock.num_rounds > 0
    assert clock.num_rows >= clock.num_rounds
    assert all(clock.seconds[phase] > 0 for phase in clock.seconds)
    clock.reset()
    assert sum(clock.seconds.values()) == clock.num_rounds == 0


def test_a_clock_that_is_off_records_nothing(text_world):
    model = llm(text_world)
    model.generate(["a"], SamplingParams(5))
    assert sum(model.engine.clock.seconds.values()) == 0
