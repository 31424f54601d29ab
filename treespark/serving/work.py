# SPDX-License-Identifier: Apache-2.0
"""One answer under way: its body or its events, and its end when the client leaves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treespark.serving.answers import ChatFormat, Piece, request_metrics, usage
from treespark.serving.api_error import ApiError
from treespark.serving.guard import send_json
from treespark.serving.streaming import EventStream, Pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from treespark.serving.answers import Call, Format
    from treespark.serving.async_engine import Submission
    from treespark.serving.guard import Receive, Send
    from treespark.serving.protocol import GenerationBody
    from treespark.serving.scheduler import RequestOutput


@dataclass(frozen=True)
class MetricsOptions:
    """Whether bodies have `metrics`; depth, branching and budget of the trees, None without."""

    is_wanted: bool = True
    tree: dict[str, int] | None = None


class Work:
    """The engine's requests of one call and how their answers are sent.

    submission: None if nothing is generated and `echo` alone is the answer.  prefixes: per choice
    what `echo` puts in front.
    """

    def __init__(
        self,
        body: GenerationBody,
        call: Call,
        spelling: Format,
        submission: Submission | None,
        prefixes: list[Piece | None],
        make_pieces: Callable[[], Pieces],
        metrics: MetricsOptions,
    ) -> None:
        self.body, self.call, self.spelling = body, call, spelling
        self.submission, self.prefixes = submission, prefixes
        self.make_pieces, self.metrics = make_pieces, metrics

    async def send(self, send: Send) -> None:
        """Send the response, whole or as events."""
        try:
            if not self.body.stream:
                await send_json(send, 200, await self._answer())
                return
            is_started = False
            async for event in self._stream().events():
                if not is_started:
                    await send(_EVENTS_START)
                    is_started = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except ApiError as error:
            await send_json(send, error.status, error.body(), **error.headers())

    def cancel(self) -> None:
        """Drop what has not ended."""
        if self.submission is not None:
            self.submission.cancel()

    async def _answer(self) -> dict[str, Any]:
        call, outputs = self.call, await self._outputs()
        if self.submission is None:
            pieces = [Piece("", [], finish_reason="length")] * len(self.prefixes)
        else:
            pieces = [Piece.whole(output) for output in outputs]
        choices = [
            self.spelling.choice(call, index, piece.behind(prefix))
            for index, (piece, prefix) in enumerate(zip(pieces, self.prefixes, strict=True))
        ]
        body: dict[str, Any] = {
            "id": call.id,
            "object": self.spelling.object_name,
            "created": call.created,
            "model": call.model,
            "choices": choices,
            "usage": usage(call, sum(len(piece.token_ids) for piece in pieces)),
            "metrics": self._metrics(),
        }
        if call.wants_token_ids and isinstance(self.spelling, ChatFormat):
            body["prompt_token_ids"] = call.prompts[0]
        return body

    async def _outputs(self) -> list[RequestOutput]:
        return [] if self.submission is None else await self.submission.finished()

    def _stream(self) -> EventStream:
        options = self.body.stream_options
        return EventStream(
            self.call,
            self.submission,
            self.spelling,
            self.make_pieces,
            prefixes=self.prefixes,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
            metrics=self._metrics,
        )

    def _metrics(self) -> dict[str, Any] | None:
        """What the body says of one answer; nothing for several, whose times overlap."""
        if not self.metrics.is_wanted or self.submission is None or len(self.prefixes) > 1:
            return None
        (output,) = self.submission.outputs
        return None if output is None else request_metrics(output.metrics, self.metrics.tree)


_EVENTS_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        # nginx would otherwise collect events.
        (b"x-accel-buffering", b"no"),
    ],
}


async def run_until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run a response to its end, or until the client leaves."""
    sending = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sending, watching):
            if not task.done():
                task.cancel()
        await asyncio.gather(sending, watching, return_exceptions=True)
    if not sending.cancelled():
        sending.result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
