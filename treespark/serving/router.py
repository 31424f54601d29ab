# SPDX-License-Identifier: Apache-2.0
"""The existing routers that stand in front of workers, and how each is told what to do.

Of the HAProxy file: `maxconn` is the worker's slots, so that requests beyond them wait at the door
and any free worker takes the next. `http-no-delay` keeps events of a stream from waiting for each
other: measured, 24 ms to the first token with it and 218 ms without. A request is tried again only
when the worker was not reached, closed without a single byte, or took none (503); that needs the
whole request, so HAProxy waits for the body and has 64 KiB for it. One refused connection marks a
worker down until it answers `/ready`: it would otherwise look like the least busy of all.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from treespark.errors import UsageError
from treespark.serving.api_error import ApiError
from treespark.serving.streaming import json_bytes

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("auto", "haproxy", "smg", "none")
INSTALL = {
    "haproxy": "apt-get install -y haproxy (or dnf install -y haproxy)",
    "smg": "pip install sglang-router",
}
# HAProxy waits so long for a byte of a worker: a full queue and a long answer that is not streamed.
_SERVER_S = 600
# What HAProxy itself has to say, when no worker does.
_OWN_ERRORS = {
    502: "the worker left before it answered",
    503: "no worker takes a request now; try again",
    504: "the worker did not answer in time",
}


@dataclass(frozen=True)
class Door:
    """Where clients connect and what stands behind it.

    slots: requests at a time per worker.  queue_timeout_s: how long a request waits for one.
    """

    host: str
    port: int
    urls: tuple[str, ...]
    slots: int
    queue_timeout_s: int


def choose_router(kind: str, is_checked: bool = True) -> str:
    """Return haproxy, smg or none; auto takes the first that is installed.

    is_checked: False takes haproxy for auto without looking. Raises UsageError with the command
    that installs what is missing.
    """
    if kind not in KINDS:
        raise UsageError(f"--router {kind}: allowed: {', '.join(KINDS)}")
    if not is_checked:
        return "haproxy" if kind == "auto" else kind
    there = {
        "haproxy": shutil.which("haproxy") is not None,
        "smg": importlib.util.find_spec("sglang_router") is not None,
        "none": True,
    }
    if kind != "auto":
        if not there[kind]:
            raise UsageError(f"--router {kind}: not installed: {INSTALL[kind]}")
        return kind
    found = [name for name in INSTALL if there[name]]
    if not found:
        ways = "; ".join(f"{name}: {command}" for name, command in INSTALL.items())
        raise UsageError(f"--router auto: none is installed: {ways}; or --router none")
    return found[0]


def router_command(kind: str, door: Door, config: Path) -> list[str]:
    """Return the command that runs a router in the foreground; `config` is HAProxy's file."""
    if kind == "haproxy":
        return ["haproxy", "-db", "-f", str(config)]
    # It refuses to choose between the two least loaded of one.
    policy = "power_of_two" if len(door.urls) > 1 else "round_robin"
    numbers = {
        "max-concurrent-requests": door.slots * len(door.urls),
        "queue-timeout-secs": door.queue_timeout_s,
        "request-timeout-secs": _SERVER_S,
        # Its defaults keep a worker that came back out for a minute.
        "worker-startup-check-interval": 1,
        "health-check-interval-secs": 5,
        "cb-timeout-duration-secs": 5,
    }
    return [
        *(sys.executable, "-m", "sglang_router.launch_router"),
        *("--host", door.host, "--port", str(door.port), "--policy", policy),
        *("--worker-urls", *door.urls, "--health-check-endpoint", "/ready"),
        # Its metrics would otherwise listen on every address.
        *("--prometheus-host", "127.0.0.1"),
        *(word for name, value in numbers.items() for word in (f"--{name}", str(value))),
    ]


def haproxy_config(door: Door) -> str:
    """Return the file for HAProxy 2.2 or newer."""
    servers = "\n".join(
        f"    server worker-{number} {urlsplit(url).netloc} maxconn {door.slots}"
        for number, url in enumerate(door.urls)
    )
    errors = "\n".join(_own_error(status, text) for status, text in _OWN_ERRORS.items())
    return _HAPROXY.format(
        errors=errors,
        host=f"[{door.host}]" if ":" in door.host else door.host,
        port=door.port,
        queue_s=door.queue_timeout_s,
        server_s=_SERVER_S,
        servers=servers,
    )


def _own_error(status: int, text: str) -> str:
    error = ApiError(status, text)
    body = json_bytes(error.body()).decode()
    headers = "".join(f" hdr {name} {value}" for name, value in error.headers().items())
    return f"    http-error status {status} content-type application/json string '{body}'{headers}"


_HAPROXY = """\
global
    maxconn 8192
    tune.bufsize 65536

defaults
    mode http
    option http-no-delay
    option http-buffer-request
    option redispatch 1
    retries 5
    retry-on conn-failure empty-response 503
    timeout connect 5s
    timeout http-request 10s
    timeout http-keep-alive 30s
    timeout client {server_s}s
    timeout server {server_s}s
    timeout queue {queue_s}s
{errors}

frontend door
    bind {host}:{port}
    default_backend workers

backend workers
    balance leastconn
    option httpchk GET /ready
    http-check expect status 200
    default-server check inter 1s fall 2 rise 1 observe layer4 error-limit 1 on-error mark-down
{servers}
"""
