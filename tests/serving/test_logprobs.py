# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities are the target's own, one per output token, whatever was drafted or cut."""

import pytest
import torch

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
from treespark.serving.scheduler import Request, RequestOutput
from treespark.tree.policy import TreePolicy

PROMPTS = prompts(5, seed=6)
POLICY = TreePolicy(5, 4, 16)


def check_logprobs(output: RequestOutput, plain: torch.Tensor, num_top: int) -> None:
    """Compare with plain [n, V] of one forward; 1e-4: float32 sums in another order."""
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == output.metrics.num_output_tokens
    for entry, token, row in zip(output.logprobs, output.token_ids, plain, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.rank == int((row > row[token]).sum()) + 1
        values, ids = row.topk(num_top)
        assert [one for one, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def engines(answers: dict[str, list[int]]) -> dict[str, Engine]:
    """Decoding without drafts, with the drafter's trees, and with long accepted paths."""
    target = world().target
    return {
        "plain": Engine(target, max_num_seqs=3),
        "tree": Engine(target, drafter(target), POLICY, max_num_seqs=3, prefill_chunk=16),
        "oracle": Engine(
            target,
            policy=TreePolicy(8, budget=40),
            max_num_seqs=3,
            propose=Oracle(answers, VOCAB, 6, 2),
        ),
    }


@pytest.mark.parametrize("kind", ["plain", "tree", "oracle"])
def test_logprobs_are_those_of_one_plain_forward(kind):
    """Requests that ask for 0, 1, 5 and 20 alternatives, and one that asks for nothing."""
    answers = {str(i): world().reference(prompt, 20) for i, prompt in enumerate(PROMPTS)}
    asked = [0, 1, None, 5, 20]
    requests = [
        Request(str(i), prompt, SamplingParams(20, ignore_eos=True, logprobs=num_top))
        for i, (prompt, num_top) in enumerate(zip(PROMPTS, asked, strict=True))
    ]
    outputs = run(engines(answers)[kind], requests)
    for i, num_top in enumerate(asked):
        output = outputs[str(i)]
        assert output.token_ids == answers[str(i)]
        if num_top is None:
            assert output.logprobs is None
        else:
            check_logprobs(output, world().log_probs(PROMPTS[i], output.token_ids), num_top)


def test_logprobs_of_sampled_and_of_held_back_stops_are_raw():
    """Neither temperature nor top_k nor the ban on stops before min_tokens shows in them."""
    prompt = PROMPTS[0]
    answer = world().reference(prompt, 6)
    ways = {
        "sampled": {"temperature": 1.5, "top_k": 40, "seed": 3, "ignore_eos": True},
        "held": {"stop_token_ids": (answer[2],), "min_tokens": 8, "ignore_eos": True},
    }
    requests = [
        Request(name, prompt, SamplingParams(12, logprobs=2, **options))
        for name, options in ways.items()
    ]
    outputs = run(Engine(world().target), requests)
    for output in outputs.values():
        check_logprobs(output, world().log_probs(prompt, output.token_ids), 2)
    assert max(entry.rank for entry in outputs["sampled"].logprobs) > 1
    # Held back at the third token, which is therefore not the best one.
    assert outputs["held"].logprobs[2].rank == 2


def test_more_alternatives_than_tokens_are_all_tokens():
    small = world(vocab=6, eos=5)
    requests = requests_for([[1, 2]], 4, logprobs=20)
    output = run(Engine(small.target), requests)["0"]
    check_logprobs(output, small.log_probs([1, 2], output.token_ids), 6)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("propose", ["none", "chain"])
def test_a_stop_string_cuts_text_ids_logprobs_and_counts_together(propose, keep):
    """Every three characters of an answer in turn: at each place of an accepted path of eight."""
    text_world = world(vocab=TEXT_VOCAB, eos=256, seed=3)
    backend = text_world.target.tokenizer.backend_tokenizer
    prompt = list(b"hello")
    answer = text_world.reference(prompt, 24)
    whole = backend.decode(answer).rstrip("\ufffd")
    plain = text_world.log_probs(prompt, answer)
    starts = range(0, len(whole) - 3, 1 if propose == "chain" else 4)
    for stop in {whole[start : start + 3] for start in starts}:
        engine = Engine(
            text_world.target,
            policy=TreePolicy(7, budget=8),
            propose=true_chain({"0": answer}, 7) if propose == "chain" else None,
        )
        options = {"stop": stop, "include_stop_str_in_output": keep, "logprobs": 1}
        output = run(engine, requests_for([prompt], 24, **options))["0"]
        assert output.text == whole[: whole.index(stop) + (len(stop) if keep else 0)]
        assert output.token_ids == answer[: len(output.token_ids)]
        assert backend.decode(output.token_ids).startswith(output.text)
        # Not one token more than the text needs, but for bytes whose end the next token shows.
        if output.text and not output.text.endswith("\ufffd"):
            assert not backend.decode(output.token_ids[:-1]).startswith(output.text)
        check_logprobs(output, plain[: len(output.token_ids)], 1)
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        stats = engine.stats()
        assert stats.num_generation_tokens == len(output.token_ids)
        assert stats.num_accepted_tokens <= stats.num_committed_tokens <= len(output.token_ids)


def test_streamed_logprobs_grow_with_the_ids_and_are_never_taken_back():
    text_world = world(vocab=TEXT_VOCAB, eos=256, seed=3)
    engine = Engine(text_world.target, drafter(text_world.target), POLICY)
    (request,) = requests_for([list(b"hello")], 24, stop="absent", logprobs=1)
    engine.add(request)
    seen = []
    while engine.has_work:
        (output,) = engine.step()
        assert len(output.logprobs) == len(output.token_ids)
        assert output.logprobs[: len(seen)] == seen
        seen = output.logprobs
    assert len(seen) == 24
