# SPDX-License-Identifier: Apache-2.0
"""What a user can get wrong is refused before anything runs, with value and limit in one line."""

import pytest

from tests.serving_world import TEXT_VOCAB, drafter, requests_for, run, world
from treespark import LLM
from treespark.errors import UsageError
from treespark.serving.engine import Engine
from treespark.serving.scheduler import Request, SamplingParams
from treespark.tree.policy import TreePolicy


def refusal(call) -> str:
    """Message of the UsageError that `call` raises, which must be one line."""
    with pytest.raises(UsageError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def add(prompt, name="r", **params):
    """Add one request to a fresh engine of 64 positions."""
    Engine(world().target, max_model_len=64).add(Request(name, prompt, SamplingParams(**params)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: add([]), ["empty"]),
        (lambda: add([1] * 64), ["64 tokens", "at most 63", "--max-model-len"]),
        (lambda: add([1, 128]), ["128", "0..127"]),
        (lambda: add([-1]), ["-1", "0..127"]),
        (lambda: add([1], stop="x"), ["tokenizer"]),
        (lambda: add([1], stop_token_ids=(5, 128)), ["stop_token_ids 128", "0..127"]),
        (lambda: Engine(world().target, max_num_seqs=0), ["--max-num-seqs 0", "1..4096"]),
        (lambda: Engine(world().target, max_num_seqs=10**7), ["--max-num-seqs 10000000"]),
        (lambda: Engine(world().target, prefill_chunk=0), ["prefill_chunk 0"]),
        (lambda: Engine(world().target, max_model_len=257), ["257", "2..256"]),
        (lambda: Engine(world().target, max_model_len=1), ["1", "2..256"]),
        (
            lambda: Engine(world().target, drafter(world().target), TreePolicy(depth=6)),
            ["--depth 6", "1..5", "block_size"],
        ),
        (
            lambda: Engine(
                world().target, drafter(world().target, markov_head_type="rnn"), TreePolicy(5, 2)
            ),
            ["--branching 2", "rnn"],
        ),
        (
            lambda: Engine(world().target, drafter(world(vocab=TEXT_VOCAB, eos=256).target)),
            ["vocab_size", str(TEXT_VOCAB), "128"],
        ),
        (lambda: TreePolicy(branching=0), ["branching", "0"]),
        (lambda: LLM(world().target).generate("bad \udcff"), ["\\udcff", "UTF-8"]),
    ],
)
def test_mistakes_are_named_with_value_and_limit(call, words):
    message = refusal(call)
    assert all(word in message for word in words), message


def test_an_id_in_use_is_refused_until_its_request_ends():
    engine = Engine(world().target, max_num_seqs=1)
    engine.add(Request("a", [1], SamplingParams(3, ignore_eos=True)))
    engine.add(Request("b", [1], SamplingParams(3, ignore_eos=True)))
    engine.step()
    for name in ("a", "b"):
        assert repr(name) in refusal(lambda name=name: engine.add(Request(name, [1])))
    run(engine, [])
    engine.add(Request("a", [1]))


def test_a_refused_request_leaves_no_trace():
    engine = Engine(world().target, max_model_len=64)
    refusal(lambda: engine.add(Request("r", [1] * 80)))
    assert not engine.has_work
    assert set(run(engine, requests_for([[1, 2]], 4))) == {"0"}


def test_longest_possible_prompt_is_served():
    engine = Engine(world().target, max_model_len=64)
    output = run(engine, requests_for([[1] * 63], 10))["0"]
    assert len(output.token_ids) == 1
    assert output.finish_reason == "length"
