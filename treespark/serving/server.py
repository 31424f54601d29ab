# SPDX-License-Identifier: Apache-2.0
"""The routes of the server and the process that serves them; the only file with web packages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

import treespark
from treespark.errors import UsageError
from treespark.serving.api_error import ApiError, internal_error
from treespark.serving.guard import REQUEST_ID, Guard
from treespark.serving.limits import MAX_HEADER_BYTES, parse_body, refusal_of
from treespark.serving.protocol import BODIES
from treespark.serving.work import Work, run_until_disconnect

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence

    from treespark.serving.async_engine import AsyncEngine
    from treespark.serving.guard import App
    from treespark.serving.service import Service

logger = logging.getLogger(__name__)

# How long a connection may take for its first headers, and may idle between two requests.
_HEADERS_S, _KEEP_ALIVE_S = 10, 30
# After a drain: what responses that are complete may still need to be read.
_LINGER_S = 5


def create_app(service: Service, keys: Sequence[str] = ()) -> App:
    """Return the ASGI application: guard in front, routes behind. keys: see `Guard`."""
    app = FastAPI(
        title="treespark",
        version=treespark.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_errors(app)
    _add_generation(app, service)
    _add_text(app, service)
    _add_state(app, service)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return Guard(app, keys)


class _Live(Response):
    """The response of an answer under way; it ends the answer when the client leaves."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await run_until_disconnect(self.work.send(send), receive)
        finally:
            self.work.cancel()


def _add_generation(app: FastAPI, service: Service) -> None:
    """Completions and chat completions."""

    @app.post("/v1/completions", **_takes("CompletionBody", streams=True))
    async def completions(request: Request) -> Response:
        return _Live(await service.complete(await _fields(request)))

    @app.post("/v1/chat/completions", **_takes("ChatBody", streams=True))
    async def chat_completions(request: Request) -> Response:
        return _Live(await service.chat(await _fields(request)))


def _add_text(app: FastAPI, service: Service) -> None:
    """Text to ids and back."""

    @app.post("/tokenize", **_takes("TokenizeBody"))
    async def tokenize(request: Request) -> Response:
        return JSONResponse(await service.tokenize(await _fields(request)))

    @app.post("/detokenize", **_takes("DetokenizeBody"))
    async def detokenize(request: Request) -> Response:
        return JSONResponse(await service.detokenize(await _fields(request)))


def _add_state(app: FastAPI, service: Service) -> None:
    """What the server is and how it does."""
    engine = service.engine

    @app.get("/health", **_PROBE)
    async def health() -> Response:
        return Response(status_code=200 if engine.failure is None else 503)

    @app.get("/ready", **_PROBE)
    async def ready() -> Response:
        return Response(status_code=200 if engine.is_ready else 503)

    @app.get("/version", **_ANSWERS)
    async def version() -> Response:
        return JSONResponse({"version": treespark.__version__})

    @app.get("/metrics", **_ANSWERS, response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.telemetry.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", **_ANSWERS)
    async def models() -> Response:
        return JSONResponse(service.models())

    @app.get("/model_info", **_ANSWERS)
    async def model_info() -> Response:
        return JSONResponse(service.model_info())

    @app.get("/server_info", **_ANSWERS)
    async def server_info() -> Response:
        return JSONResponse(service.server_info())


# ------------------------------------------------------------------ schema and errors

_ERROR = {"$ref": "#/components/schemas/Error"}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
    for status, text in (
        (400, "The request cannot be served."),
        (401, "The API key is missing or wrong."),
        (404, "Another model is served."),
        (408, "The body did not arrive in time."),
        (411, "The body has no length."),
        (413, "The body is too large."),
        (415, "The body is not JSON by its Content-Type."),
        (431, "The headers are too large."),
        (500, "The server failed."),
        (503, "No request is taken now."),
    )
}
_ANSWERS: dict[str, Any] = {
    "response_model": None,
    "responses": {status: _RESPONSES[status] for status in (401, 431, 503)},
}
# An empty body, whatever the status.
_PROBE: dict[str, Any] = {
    "response_model": None,
    "response_class": Response,
    "responses": {431: _RESPONSES[431], 503: {"description": "Not now."}},
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}


def _takes(name: str, streams: bool = False) -> dict[str, Any]:
    """Return the route options of an endpoint whose JSON body is the model `name`."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    answers: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        answers["text/event-stream"] = {}
    return {
        "response_model": None,
        "responses": {200: {"description": "The answer.", "content": answers}, **_RESPONSES},
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the schema with the bodies, which the routes read themselves."""
    if app.openapi_schema is None:
        schema = FastAPI.openapi(app)
        template = "#/components/schemas/{model}"
        kinds = [(body, "validation") for body in BODIES]
        _, definitions = models_json_schema(kinds, ref_template=template)  # type: ignore[arg-type]
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        components |= definitions["$defs"] | {"Error": _ERROR_SCHEMA}
        app.openapi_schema = schema
    return app.openapi_schema


async def _fields(request: Request) -> dict[str, Any]:
    return parse_body(await request.body())


def _add_errors(app: FastAPI) -> None:
    """Give every refusal the one error body."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers())

    @app.exception_handler(UsageError)
    async def misused(request: Request, error: UsageError) -> Response:
        return await refused(request, refusal_of(error))

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> Response:
        answer = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(answer.body(), answer.status, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        # The guard logs it with this id.
        return await refused(request, internal_error(request.scope[REQUEST_ID]))


# ------------------------------------------------------------------ the process


class _Connection(H11Protocol):
    """One client; a connection that takes its time over the headers of a request does not stay."""

    def connection_made(self, transport: Any) -> None:
        """Give the client some seconds for its first headers."""
        super().connection_made(transport)
        self._headers_due: asyncio.TimerHandle | None = None
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the headers of a later request have as long, from their first byte on."""
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the client."""
        super().connection_lost(error)
        self._stop_watching()

    def _watch_headers(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._headers_due is None:
            self._headers_due = self.loop.call_later(_HEADERS_S, self.transport.close)

    def _stop_watching(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


class _Server(uvicorn.Server):
    """Drains at the first SIGTERM or SIGINT, leaves at the second."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, drain_s: float) -> None:
        super().__init__(config)
        self._engine, self._drain_s = engine, drain_s
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals of the whole run; unlike uvicorn's own, do not raise them again."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        yield

    def _on_signal(self) -> None:
        if self._draining is None:
            logger.info("shutting down: %d requests to finish", self._engine.num_live)
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self._engine.drain(self._drain_s)
        self.should_exit = True


def run_server(service: Service, sock: socket.socket, keys: Sequence[str], drain_s: float) -> None:
    """Serve on a bound socket until a signal; returns when every request has ended.

    drain_s: seconds that running requests get after the signal.
    """
    asyncio.run(make_server(service, keys, drain_s).serve(sockets=[sock]))


def make_server(service: Service, keys: Sequence[str], drain_s: float) -> uvicorn.Server:
    """Return the server of `run_server`, for the running event loop."""
    config = uvicorn.Config(
        create_app(service, keys),  # type: ignore[arg-type]
        http=_Connection,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LINGER_S,
        h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
    )
    return _Server(config, service.engine, drain_s)
