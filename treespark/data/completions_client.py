# SPDX-License-Identifier: Apache-2.0
"""Talks to an OpenAI-compatible server: which model it serves, completions with retries."""

import asyncio
import email.utils
import importlib.util
import logging
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treespark.data.jsonl import parse_object
from treespark.errors import UsageError
from treespark.target.template import check_utf8

if TYPE_CHECKING:
    import httpx

DEFAULT_KEY = "OPENAI_API_KEY"
# First pause before a retry, doubled by each, and the longest; also how long Retry-After may ask.
_BACKOFF_S, _LONGEST_BACKOFF_S, _LONGEST_ASKED_S = 0.5, 60.0, 600.0
# A long answer behind a long queue takes minutes; a server that is there accepts within seconds.
_ANSWER_S, _CONNECT_S = 1800.0, 10.0


class RowError(Exception):
    """Why one prompt got no answer."""


@dataclass(frozen=True)
class Server:
    """Where to ask; retries: of one request, after connection errors, 429 and 5xx.

    option: the flag that named the address, for messages.
    """

    url: str
    headers: dict[str, str]
    retries: int
    option: str = "--server"

    def open(self, num_connections: int) -> "httpx.AsyncClient":
        """Return a client that keeps so many connections open, to be used as a context."""
        import httpx

        return httpx.AsyncClient(
            headers=self.headers,
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            limits=httpx.Limits(
                max_connections=num_connections, max_keepalive_connections=num_connections
            ),
        )

    async def complete(self, client: "httpx.AsyncClient", request: dict[str, Any]) -> bytes:
        """Return the body of the server's answer; raises RowError when there is none."""
        import httpx

        for attempt in range(self.retries + 1):
            asked_s = None
            try:
                response = await client.post(f"{self.url}/completions", json=request)
            except httpx.RequestError as error:
                problem = _reason(error)
            else:
                if response.is_success:
                    return response.content
                problem = f"HTTP {response.status_code}: {_message(response.content)}"
                if response.status_code != 429 and response.status_code < 500:
                    break
                asked_s = _asked_pause_s(response.headers)
            if attempt < self.retries:
                await asyncio.sleep(_backoff_s(attempt) if asked_s is None else asked_s)
        raise RowError(problem)


def _backoff_s(attempt: int) -> float:
    """Return a pause that doubles with each attempt, cut by up to half so that rows spread out."""
    longest = min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2.0 ** min(attempt, 30))
    return longest * random.uniform(0.5, 1.0)


def _asked_pause_s(headers: Mapping[str, str]) -> float | None:
    """Return how long Retry-After asks to wait, in seconds or as a date; None without it."""
    value = headers.get("retry-after", "").strip()
    # As many digits as any pause needs; Python refuses to read thousands of them.
    if value.isascii() and value.isdigit() and len(value) < 10:
        return min(float(value), _LONGEST_ASKED_S)
    try:
        then = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    return min(max(0.0, then.timestamp() - time.time()), _LONGEST_ASKED_S)


def check_httpx(option: str = "--server", extra: str = "train") -> None:
    """Raise UsageError without httpx; keep it from logging a line a request over the progress."""
    if importlib.util.find_spec("httpx") is None:
        raise UsageError(f"{option}: needs httpx: pip install 'treespark[{extra}]'")
    logging.getLogger("httpx").setLevel(logging.WARNING)


def server_address(
    server: str, option: str = "--server", example: str = "http://host:8000/v1"
) -> str:
    """Return the server's address without a last slash; raises UsageError for no such address."""
    import httpx

    check_utf8(option, server)
    allowed = f"need an address as {example}"
    try:
        url = httpx.URL(server)
    except httpx.InvalidURL as error:
        raise UsageError(f"{option} {server}: {error}; {allowed}") from None
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise UsageError(f"{option} {server}: {allowed}")
    return server.rstrip("/")


def key_header(api_key_env: str) -> dict[str, str]:
    """Return the header with the key of that variable, none when the default one is not set."""
    key = os.environ.get(api_key_env)
    if not key and api_key_env == DEFAULT_KEY:
        return {}
    if not key or not all("!" <= character <= "~" for character in key):
        problem = "is not set" if not key else "holds something other than printable ASCII"
        raise UsageError(f"--api-key-env {api_key_env}: this variable {problem}")
    return {"Authorization": f"Bearer {key}"}


def model_name(server: Server, model: str | None) -> str:
    """Return the name of the model to ask; raises UsageError when the server does not serve it."""
    import httpx

    url, option = server.url, server.option
    check_utf8("--model", model or "")
    try:
        response = httpx.get(f"{url}/models", headers=server.headers, timeout=_CONNECT_S)
    except httpx.RequestError as error:
        raise UsageError(f"{option} {url}: cannot be reached: {_reason(error)}") from None
    status = response.status_code
    # Some gateways list nothing; with a name given only a refused key has to end the run.
    if status in (401, 403) or (model is None and not response.is_success):
        message = _message(response.content)
        raise UsageError(f"{option} {url}: HTTP {status} for the list of models: {message}")
    names = _names(response.content) if response.is_success else []
    listed = ", ".join(names) or "none"
    if model is None and len(names) != 1:
        raise UsageError(f"--model: needed, as {url} does not list exactly one; listed: {listed}")
    if model is not None and names and model not in names:
        raise UsageError(f"--model {model}: not served by {url}; listed: {listed}")
    return names[0] if model is None else model


def parsed(content: bytes) -> dict[str, Any]:
    """Return the object of an answer's body; raises UsageError for anything else."""
    return parse_object(content, "the server's answer") or {}


def _names(content: bytes) -> list[str]:
    try:
        data = parsed(content).get("data")
    except UsageError:
        return []
    found = [row.get("id") for row in data if isinstance(row, dict)] if type(data) is list else []
    return [name for name in found if isinstance(name, str)]


def _message(content: bytes) -> str:
    """Return what the server says of an error, on one line of at most 200 characters."""
    text: Any = content.decode("utf-8", "replace")
    try:
        body = parsed(content)
    except UsageError:
        body = {}
    error = body.get("error", body)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or text
    text = error or text
    return " ".join(str(text).split())[:200]


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
