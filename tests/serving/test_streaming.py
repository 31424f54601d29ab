# SPDX-License-Identifier: Apache-2.0
"""How a growing answer is cut into events, and what a slow reader gets."""

import asyncio
import json

import pytest

from tests.http_world import ScriptedEngine, serving
from tests.serving_world import byte_tokenizer
from treespark.serving.records import RequestRecord
from treespark.serving.scheduler import Request, RequestOutput, SamplingParams
from treespark.serving.streaming import Pieces, event

TEXT = "Grüße, 안녕 😀!"
IDS = list(TEXT.encode())


def answer(num_tokens, reason=None, text=None):
    """The answer after so many bytes of TEXT, whole characters only."""
    whole = bytes(IDS[:num_tokens]).decode(errors="ignore") if text is None else text
    return RequestOutput("r", [1], IDS[:num_tokens], whole, reason, None, RequestRecord(1, 0.0))


def cut(interval, lengths, **last):
    """All pieces of an answer that grows to these lengths."""
    pieces = Pieces(interval, byte_tokenizer().backend_tokenizer)
    found = [piece for n in lengths[:-1] for piece in pieces.of(answer(n))]
    return [*found, *pieces.of(answer(lengths[-1], "length", **last))]


@pytest.mark.parametrize("interval", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    "lengths", [[len(IDS)], [1, 2, 3, len(IDS)], [4, 4, 9, 11, len(IDS)], list(range(len(IDS) + 1))]
)
def test_pieces_add_up_to_the_answer_and_only_the_last_ends_it(interval, lengths):
    pieces = cut(interval, lengths)
    assert "".join(piece.text for piece in pieces) == TEXT
    assert [token for piece in pieces for token in piece.token_ids] == IDS
    reasons = [piece.finish_reason for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + ["length"]
    assert "\ufffd" not in "".join(piece.text for piece in pieces)


def test_with_an_interval_the_sizes_of_events_do_not_tell_the_sizes_of_rounds():
    sizes = {
        tuple(len(piece.token_ids) for piece in cut(4, lengths))
        for lengths in ([len(IDS)], [3, 8, 9, 16, len(IDS)], list(range(len(IDS) + 1)))
    }
    assert len(sizes) == 1


def test_an_answer_that_a_stop_string_emptied_still_ends():
    pieces = Pieces(1, byte_tokenizer().backend_tokenizer)
    (piece,) = pieces.of(answer(0, "stop"))
    assert (piece.text, piece.finish_reason) == ("", "stop")


def test_an_event_is_one_line_whatever_the_text():
    line = event({"text": "a\n\n\u2028b\r"})
    assert line.count(b"\n") == 2
    assert json.loads(line.removeprefix(b"data: ")) == {"text": "a\n\n\u2028b\r"}


def test_what_grew_while_the_reader_slept_comes_as_one():
    engine = ScriptedEngine()
    with serving(lambda: engine) as server:

        async def read_slowly(client):
            request = Request("r", [97], SamplingParams(max_tokens=60))
            submission = server.engine.submit([request])
            seen = []
            async for _, output in submission.changes():
                seen.append(len(output.token_ids))
                while engine.has_work:
                    await asyncio.sleep(0.005)
            return seen

        seen = server.run(read_slowly)
    # Two snapshots, not sixty: one before the sleep and one behind it.
    assert len(seen) <= 3
    assert seen[-1] == 60
