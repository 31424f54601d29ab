# SPDX-License-Identifier: Apache-2.0
"""Text is whole characters, ends before the first stop string, and agrees with ids and counts."""

import itertools
import random

import pytest

from tests.serving_world import TEXT_VOCAB, byte_tokenizer, requests_for, run, world
from treespark.serving.commit import Proposal, commit
from treespark.serving.detokenize import TextStream
from treespark.serving.engine import Engine
from treespark.serving.records import RequestRecord
from treespark.serving.scheduler import Request, RequestOutput, SamplingParams

TOKENIZER = byte_tokenizer().backend_tokenizer
EOS = 256


def ids_of(text: str) -> list[int]:
    """One token per byte."""
    return list(text.encode())


def serve(
    ids: list[int], run_lengths, stop=(), max_tokens: int = 1000, stop_token_ids=()
) -> tuple[Request, list]:
    """Commit `ids` in runs as rounds would; return the request and every output on the way."""
    request = Request("r", [1], SamplingParams(max_tokens, stop, stop_token_ids))
    request.text = TextStream(TOKENIZER, request.params.stop)
    request.stop_ids = frozenset({EOS, *stop_token_ids})
    request.max_output_len = max_tokens
    request.record = RequestRecord(1, 0.0)
    outputs, at, proposal = [], 0, None
    lengths = iter(run_lengths)
    while at < len(ids) and request.finish_reason is None:
        size = next(lengths) if proposal else 1
        part = ids[at : at + size]
        commit(request, part, proposal, 0.0)
        outputs.append(RequestOutput.of(request))
        at, proposal = at + size, Proposal(size - 1, 32, 7)
    return request, outputs


def runs(seed: int | None):
    """Run lengths: all 1 (None), or random 1..8."""
    draw = random.Random(seed)
    while True:
        yield 1 if seed is None else draw.randint(1, 8)


TEXT = "So he said ha ha and 안녕 🙂🙂, then nothing. ha"


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (" ha ha", "So he said"),
        ("ha", "So he said "),
        ("S", ""),
        ("녕", "So he said ha ha and 안"),
        ("🙂,", "So he said ha ha and 안녕 🙂"),
        (("nothing.", "then", "said ha ha"), "So he "),
        (("ha and", "ha ha and"), "So he said "),
        ("absent", None),
        (". ha", "So he said ha ha and 안녕 🙂🙂, then nothing"),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [None, *range(12)])
def test_stop_string_cuts_text_ids_and_counts_together(stop, kept, seed):
    request, _outputs = serve(ids_of(TEXT), runs(seed), stop)
    ids = request.output_token_ids
    assert request.record.num_output_tokens == len(ids)
    assert all(0 <= r.num_accepted <= r.num_committed for r in request.record.rounds)
    if kept is None:
        assert request.finish_reason is None
        assert request.text.text == TEXT
        return
    assert (request.finish_reason, request.text.text) == ("stop", kept)
    assert request.stop_reason in ([stop] if isinstance(stop, str) else stop)
    # One token per byte: the ids are exactly the text's.
    assert ids == ids_of(kept)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_stop_string_that_begins_inside_a_token_keeps_that_token(seed):
    """Token 257 is "ha"; the stop "a!" begins in its middle."""
    request, _ = serve([*ids_of("oh "), 257, *ids_of("! more")], runs(seed), "a!")
    assert request.text.text == "oh h"
    assert request.output_token_ids == [*ids_of("oh "), 257]


@pytest.mark.parametrize("stop", [(), " ha ha", ("nothing", "🙂 🙂")], ids=str)
@pytest.mark.parametrize("seed", [None, *range(8)])
def test_emitted_text_is_never_taken_back_and_never_broken(stop, seed):
    _request, outputs = serve(ids_of(TEXT), runs(seed), stop)
    for before, after in itertools.pairwise(outputs):
        assert after.text.startswith(before.text)
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
    for output in outputs:
        assert "\ufffd" not in output.text
        assert TOKENIZER.decode(output.token_ids).startswith(output.text)
    assert TEXT.startswith(outputs[-1].text)


@pytest.mark.parametrize("max_tokens", range(1, len(ids_of(TEXT)) + 1))
def test_limit_inside_a_character_leaves_no_half_of_it(max_tokens):
    request, outputs = serve(ids_of(TEXT), runs(max_tokens), max_tokens=max_tokens)
    assert request.output_token_ids == ids_of(TEXT)[:max_tokens]
    assert outputs[-1].text == ids_to_text(ids_of(TEXT)[:max_tokens])
    assert outputs[-1].finish_reason == "length"


def ids_to_text(ids: list[int]) -> str:
    """Text of one-byte tokens without an unfinished character."""
    return bytes(ids).decode("utf-8", errors="ignore")


def test_random_bytes_stream_like_a_decode_of_the_whole():
    draw = random.Random(0)
    for _ in range(300):
        ids = [
            draw.choice([draw.randrange(256), *ids_of("é🙂")]) for _ in range(draw.randint(1, 30))
        ]
        request, _ = serve(ids, runs(1), max_tokens=len(ids))
        assert request.text.text == TOKENIZER.decode(ids).rstrip("\ufffd")


def test_stop_ids_and_special_tokens_print_nothing():
    request, _ = serve([*ids_of("one"), EOS], runs(1))
    assert (request.text.text, request.output_token_ids[-1]) == ("one", EOS)
    request, _ = serve(ids_of("one.two"), runs(1), stop_token_ids=(ord("."),))
    assert (request.text.text, request.output_token_ids) == ("one", ids_of("one."))
    assert request.stop_reason == ord(".")


def test_held_back_character_is_complete_before_a_stop_id():
    """An unfinished character in front of a stop id is dropped, not printed as a replacement."""
    request, _ = serve([*ids_of("ok"), *ids_of("🙂")[:2], EOS], runs(1))
    assert request.text.text == "ok"


@pytest.mark.parametrize("propose", ["none", "chain"])
def test_stop_strings_of_a_real_answer(propose):
    """Every substring of the target's own text as stop, through the engine."""
    from tests.serving_world import true_chain
    from treespark.tree.policy import TreePolicy

    text_world = world(vocab=TEXT_VOCAB, eos=EOS, seed=3)
    prompt = ids_of("hello")
    answer = text_world.reference(prompt, 24)
    whole = text_world.target.tokenizer.backend_tokenizer.decode(answer).rstrip("\ufffd")
    for start in range(0, len(whole) - 3, 2):
        stop = whole[start : start + 3]
        oracle = true_chain({"0": answer}, 7) if propose == "chain" else None
        engine = Engine(text_world.target, policy=TreePolicy(7, budget=8), propose=oracle)
        output = run(engine, requests_for([prompt], 24, stop=stop))["0"]
        assert output.text == whole[: whole.index(stop)]
        assert output.metrics.num_output_tokens == len(output.token_ids)
        assert answer[: len(output.token_ids)] == output.token_ids
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
