# SPDX-License-Identifier: Apache-2.0
"""What stands in front of every route: key, sizes, times, and the last word on errors.

A plain ASGI application around another one, outside of any framework's routing: a path that no
route knows needs the key as well.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

from treespark.serving.api_error import ApiError, internal_error
from treespark.serving.limits import MAX_BODY_BYTES, MAX_HEADER_BYTES, MAX_HEADERS
from treespark.serving.streaming import json_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Message = dict[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[Message, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

# Asked by routers and orchestrators, which have no key.
OPEN_PATHS = ("/health", "/ready")
# A body that takes longer is a client that holds a connection for its own sake.
_BODY_S = 30.0
# How long a client may leave a full buffer unread.
_STALL_S = 60.0
REQUEST_ID = "treespark.request_id"


class Guard:
    """Refuses what no route should see, and answers for what a route did not catch.

    keys: any of them opens; none at all means no key is needed.
    """

    def __init__(
        self,
        app: App,
        keys: Sequence[str] = (),
        body_s: float = _BODY_S,
        stall_s: float = _STALL_S,
    ) -> None:
        """Stand in front of `app`; body_s, stall_s: seconds for a body and for an unread buffer."""
        self._app, self._body_s, self._stall_s = app, body_s, stall_s
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection event of ASGI."""
        if scope["type"] != "http":
            return
        scope[REQUEST_ID] = request_id = uuid.uuid4().hex
        reply = _Reply(send, request_id, self._stall_s)
        try:
            self._check_headers(scope)
            body = await self._body(scope, receive)
            await self._app(scope, _replay(body, receive), reply.send)
        except ApiError as error:
            await reply.fail(error)
        except _ClientLeftError:
            logger.debug("request %s: the client left before its body was read", request_id)
        # The last line of defence: whatever a route did not foresee becomes a 500 without details.
        except Exception:
            logger.exception("request %s failed", request_id)
            if not reply.is_complete:
                await reply.fail(internal_error(request_id))

    def _check_headers(self, scope: Message) -> None:
        """Raise ApiError for a wrong key and for headers that are too many, too long or at odds."""
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            allowed = f"at most {MAX_HEADERS} with {MAX_HEADER_BYTES} bytes"
            raise ApiError(431, f"headers: {len(headers)} with {size} bytes, allowed: {allowed}")
        if self._keys and scope["path"] not in OPEN_PATHS:
            given = [value for name, value in headers if name == b"authorization"]
            kind, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
            # Compare with every key, whichever fits, so that the time tells nothing.
            fits = [hmac.compare_digest(key.strip(), known) for known in self._keys]
            if kind.lower() != b"bearer" or not any(fits):
                raise ApiError(401, "missing or wrong API key: send Authorization: Bearer KEY")
        names = [name for name, _ in headers]
        if b"content-length" in names and b"transfer-encoding" in names:
            raise ApiError(400, "headers: both Content-Length and Transfer-Encoding")
        has_length = b"content-length" in names or b"transfer-encoding" in names
        if scope["method"] == "POST" and not has_length:
            raise ApiError(411, "headers: a POST needs Content-Length or Transfer-Encoding")
        # Other types reach a server on loopback from any web page, without a preflight request.
        kinds = [value for name, value in headers if name == b"content-type"]
        kind = kinds[0].partition(b";")[0].strip().lower() if len(kinds) == 1 else b""
        if scope["method"] == "POST" and kind != b"application/json":
            raise ApiError(415, "headers: Content-Type must be application/json")

    async def _body(self, scope: Message, receive: Receive) -> bytes:
        """Return the whole body. Raises ApiError when it is too large or too slow."""
        for name, value in scope["headers"]:
            if name != b"content-length":
                continue
            if not value.isdigit():
                shown = value[:30].decode("latin-1")
                raise ApiError(400, f"headers: Content-Length {shown}: need a whole number")
            if len(value) > 12 or int(value) > MAX_BODY_BYTES:
                raise _too_large()
        try:
            return await _within(self._body_s, _read(receive))
        except TimeoutError:
            raise ApiError(408, f"request body: not complete after {self._body_s:g} s") from None


class _ClientLeftError(Exception):
    """The client left while its body was read."""


class _Reply:
    """The sending half of one request: adds the request id, knows how far the response got."""

    def __init__(self, send: Send, request_id: str, stall_s: float) -> None:
        self._send, self._request_id, self._stall_s = send, request_id, stall_s
        self._is_started = False
        self.is_complete = False

    async def send(self, message: Message) -> None:
        """Pass a message on; raises TimeoutError when the client does not read."""
        if message["type"] == "http.response.start":
            self._is_started = True
            headers = [*message.get("headers", ()), (b"x-request-id", self._request_id.encode())]
            message = {**message, "headers": headers}
        await _within(self._stall_s, self._send(message))
        is_body = message["type"] == "http.response.body"
        self.is_complete = is_body and not message.get("more_body", False)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error; raises it when the response has begun, to close the connection."""
        if self._is_started:
            raise error
        await send_json(self.send, error.status, error.body(), close=True, **error.headers())


async def _within(seconds: float, awaitable: Awaitable[Result]) -> Result:
    """Await; raises TimeoutError when it takes longer.

    As `asyncio.timeout` of Python 3.11. `asyncio.wait_for` of 3.10 makes a task each time, which an
    event of a stream is too small for.
    """
    task, is_late = asyncio.current_task(), False
    assert task is not None

    def give_up() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, give_up)
    try:
        return await awaitable
    except asyncio.CancelledError:
        if is_late:
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()


async def send_json(
    send: Send, status: int, body: Any, *, close: bool = False, **headers: str
) -> None:
    """Send one JSON response; close: the connection ends with it, its request may be unread."""
    content = json_bytes(body)
    lines = {"content-type": "application/json", "content-length": str(len(content)), **headers}
    if close:
        lines["connection"] = "close"
    raw = [(name.lower().encode(), value.encode()) for name, value in lines.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content})


def _too_large() -> ApiError:
    return ApiError(413, f"request body: too large, allowed: {MAX_BODY_BYTES} bytes")


async def _read(receive: Receive) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeftError
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Hand out the body as one message, and after it what the connection says."""
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay
