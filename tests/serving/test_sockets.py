# SPDX-License-Identifier: Apache-2.0
"""Clients that misbehave on real sockets: slow, silent, many, or with too much to say."""

import asyncio
import json
import re
import resource
import socket
import time
from pathlib import Path

import pytest

from tests.http_world import ScriptedEngine, serving
from treespark.serving import server as server_module
from treespark.serving.limits import MAX_BODY_BYTES
from treespark.serving.serve import bound_socket

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "a", "max_tokens": 3}'
NUM_IDLE = 2000


def on_sockets(test, **options):
    """Run `test(port)` against a server of a scripted engine on a real socket."""

    async def main(service):
        with bound_socket("127.0.0.1", 0) as sock:
            made = server_module.make_server(service, (), 1)
            running = asyncio.ensure_future(made.serve(sockets=[sock]))
            try:
                await asyncio.wait_for(test(sock.getsockname()[1]), 60)
            finally:
                made.should_exit = True
                await running

    with serving(ScriptedEngine, **options) as server:
        asyncio.run(main(server.service))


async def exchange(port, *parts, pause_s=0.0):
    """Send the parts with pauses; return all that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def request(body=BODY, close=True):
    connection = b"Connection: close\r\n" if close else b""
    return HEAD + connection + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def assert_serves(port):
    answer = await exchange(port, request())
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"text":"abc"' in answer


@pytest.mark.parametrize("before", [b"", request(close=False)], ids=["first", "second"])
def test_headers_that_trickle_end_the_connection_also_after_a_request(monkeypatch, before):
    monkeypatch.setattr(server_module, "_HEADERS_S", 0.3)

    async def test(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if before:
            writer.write(before)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
        start_s = time.monotonic()
        try:
            for byte in HEAD:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.05)
                if reader.at_eof():
                    break
            assert await reader.read() == b""
        except ConnectionError:
            pass
        assert time.monotonic() - start_s < len(HEAD) * 0.05
        writer.close()
        await assert_serves(port)

    on_sockets(test)


def test_a_connection_stays_for_a_second_request_and_a_slow_answer(monkeypatch):
    monkeypatch.setattr(server_module, "_HEADERS_S", 0.3)

    async def test(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        # The second comes later than headers may take: a client may keep a connection.
        for body in (BODY, b'{"prompt": "a", "max_tokens": 60}', BODY):
            writer.write(request(body, close=False))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
            await asyncio.sleep(0.5)
        writer.close()

    on_sockets(test)


def test_two_thousand_idle_connections_cost_little_and_keep_nobody_out():
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 3 * NUM_IDLE:
        pytest.skip(f"ulimit -n is {soft}")

    def resident_kib():
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1])

    async def test(port):
        await assert_serves(port)
        before = resident_kib()
        idle = []
        try:
            for number in range(NUM_IDLE):
                idle.append(socket.create_connection(("127.0.0.1", port)))
                if number % 100 == 0:
                    # The server lives in this event loop.
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            start_s = time.monotonic()
            await assert_serves(port)
            assert time.monotonic() - start_s < 5
            assert (resident_kib() - before) / NUM_IDLE < 50
        finally:
            for one in idle:
                one.close()

    on_sockets(test)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"X-Many: 1\r\n" * 200, b"431"),
        (b"X-Long: " + b"a" * 70_000 + b"\r\n", b"431"),
        (b"X-Endless: " + b"a" * 1_000_000 + b"\r\n", b"400"),
    ],
    ids=["many", "long", "endless"],
)
def test_a_flood_of_headers_is_refused(headers, status):
    async def test(port):
        answer = await exchange(port, HEAD + headers + b"Content-Length: 2\r\n\r\n{}")
        # A connection that is closed with bytes unread may lose the answer on its way.
        assert answer == b"" or answer.startswith(b"HTTP/1.1 " + status)
        await assert_serves(port)

    on_sockets(test)


def test_a_body_over_four_megabytes_is_refused_before_and_while_it_comes():
    async def test(port):
        told = HEAD + b"Content-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1)
        # Not a byte of the body is waited for.
        answer = await exchange(port, told)
        assert answer.startswith(b"HTTP/1.1 413")
        assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["code"] == 413
        chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        untold = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
        answer = await exchange(port, untold, *[chunk] * 6)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 413")
        largest = b'{"prompt": "a", "max_tokens": 3, "user": "'
        largest += b"x" * (MAX_BODY_BYTES - len(largest) - 2) + b'"}'
        answer = await exchange(port, request(largest))
        assert answer.startswith(b"HTTP/1.1 200")

    on_sockets(test)
