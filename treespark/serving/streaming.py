# SPDX-License-Identifier: Apache-2.0
"""Server-sent events of a streamed answer, and how much of it each event carries."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treespark.serving.answers import Piece, usage
from treespark.serving.api_error import ApiError
from treespark.serving.detokenize import TextStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tokenizers import Tokenizer

    from treespark.serving.answers import Call, Format
    from treespark.serving.async_engine import Submission
    from treespark.serving.scheduler import RequestOutput

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """Return one event; the JSON has no line break, so it is one line."""
    return b"data: " + json_bytes(body) + b"\n\n"


def json_bytes(body: Any) -> bytes:
    """Return compact UTF-8 JSON."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class Pieces:
    """Cuts one growing answer into the stretches that are sent.

    interval: 1 sends what there is as it comes, so the size of an event tells how much a round
    accepted. Above 1 every event but the last has exactly so many tokens.
    tokenizer: of the engine's own text, needed for an interval above 1.
    """

    def __init__(self, interval: int, tokenizer: Tokenizer | None) -> None:
        """Start with nothing sent."""
        self.num_tokens = 0
        self._num_chars = 0
        self._is_ended = False
        self._interval = interval
        self._text = TextStream(tokenizer)

    def of(self, output: RequestOutput) -> Iterator[Piece]:
        """Yield what of the answer has not been sent and is due now."""
        if self._interval > 1:
            while len(output.token_ids) - self.num_tokens >= self._interval:
                yield self._some(output, self.num_tokens + self._interval)
        is_whole = (self.num_tokens, self._num_chars) == (len(output.token_ids), len(output.text))
        if output.finish_reason is None:
            if self._interval == 1 and not is_whole:
                yield self._advance(output, len(output.token_ids), len(output.text))
        elif not (is_whole and self._is_ended):
            yield self._advance(output, len(output.token_ids), len(output.text))

    def _some(self, output: RequestOutput, end: int) -> Piece:
        """The next stretch, up to token `end`, with the text that these tokens spell."""
        for token in output.token_ids[self.num_tokens : end]:
            self._text.push(token)
        num_chars = min(len(self._text.text), len(output.text))
        return self._advance(output, end, max(num_chars, self._num_chars))

    def _advance(self, output: RequestOutput, num_tokens: int, num_chars: int) -> Piece:
        tokens, text = slice(self.num_tokens, num_tokens), slice(self._num_chars, num_chars)
        self.num_tokens, self._num_chars = num_tokens, num_chars
        piece = Piece.of(output, tokens, text)
        self._is_ended = piece.finish_reason is not None
        return piece


class EventStream:
    """The events of one HTTP call, in order: openings, pieces of all choices, usage, end.

    prefixes: per choice what `echo` puts in front.  make_pieces: makes the cutter of one choice.
    metrics: makes the `metrics` of the call once it has ended.
    """

    def __init__(
        self,
        call: Call,
        submission: Submission | None,
        spelling: Format,
        make_pieces: Callable[[], Pieces],
        *,
        prefixes: list[Piece | None],
        include_usage: bool,
        continuous_usage: bool,
        metrics: Callable[[], dict[str, Any] | None],
    ) -> None:
        """Nothing is sent yet; `submission` None is a call that generates nothing."""
        self.call, self.submission, self.spelling = call, submission, spelling
        self.pieces = [make_pieces() for _ in prefixes]
        self.prefixes, self.metrics = prefixes, metrics
        self.include_usage, self.continuous_usage = include_usage, continuous_usage
        self._started: set[int] = set()
        self._offsets = [0] * len(prefixes)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream, beginning with the first token.

        Raises ApiError while nothing has been sent; after that one event says what went wrong and
        nothing follows.
        """
        has_begun = False
        try:
            if self.submission is not None:
                async for index, output in self.submission.changes():
                    for choices in [] if has_begun else self._openings():
                        yield self._event([choices])
                    has_begun = True
                    for piece in self.pieces[index].of(output):
                        yield self._event([self._choice(index, piece)])
            else:
                for choices in self._openings():
                    yield self._event([choices])
                for index in range(len(self.prefixes)):
                    last = Piece("", [], finish_reason="length")
                    yield self._event([self._choice(index, last)])
        except ApiError as error:
            if not has_begun:
                raise
            yield event(error.body())
            return
        if self.include_usage:
            yield self._event([], is_last=True)
        yield DONE

    def _openings(self) -> Iterator[dict[str, Any]]:
        """What comes ahead of any token of the choices: the speaker, an echoed prompt."""
        for index, prefix in enumerate(self.prefixes):
            opening = self.spelling.opening(self.call, index)
            if opening is not None:
                yield opening
            if prefix is not None:
                yield self._choice(index, prefix)

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        piece = replace(piece, offset=self._offsets[index])
        spelled = (self.spelling.codec.token_text(entry.token_id) for entry in piece.logprobs)
        self._offsets[index] += sum(map(len, spelled))
        return self.spelling.chunk(self.call, index, piece, self._is_first(index))

    def _is_first(self, index: int) -> bool:
        is_first = index not in self._started
        self._started.add(index)
        return is_first

    def _event(self, choices: list[dict[str, Any]], is_last: bool = False) -> bytes:
        call = self.call
        body: dict[str, Any] = {
            "id": call.id,
            "object": self.spelling.chunk_name,
            "created": call.created,
            "model": call.model,
            "choices": choices,
        }
        if is_last or self.continuous_usage:
            body["usage"] = usage(call, sum(pieces.num_tokens for pieces in self.pieces))
        if is_last:
            body["metrics"] = self.metrics()
        return event(body)
