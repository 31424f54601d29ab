# SPDX-License-Identifier: Apache-2.0
"""`treespark serve` as users run it: a process, sockets, signals, OpenAI's own client."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.http_world import ServerProcess, events_of, serve_command, tiny
from tests.serving_world import byte_tokenizer

PROMPT = "one two three"
CHAT_IDS = list(f"[user]{PROMPT}[assistant]".encode())
LONG = {"prompt": "a", "max_tokens": 240, "ignore_eos": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(root):
    made = ServerProcess(root)
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture
def own_server(root, request):
    """A server that the test may end."""
    made = ServerProcess(root, name=request.node.name)
    try:
        yield made
    finally:
        made.kill()


def expected_text(max_tokens):
    ids = tiny().reference(CHAT_IDS, max_tokens, (256,))
    return byte_tokenizer().decode(ids, skip_special_tokens=True).rstrip("\ufffd")


def gauge(server, name):
    page = httpx.get(f"{server.url}/metrics").text
    (line,) = [line for line in page.splitlines() if line.startswith(name + "{")]
    return float(line.rpartition(" ")[2])


def wait_until(condition, seconds=20.0):
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "in vain"
        time.sleep(0.02)


def test_openais_client_completes_streams_and_sees_errors(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages = [{"role": "user", "content": PROMPT}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=20)
    assert answer.choices[0].message.content == expected_text(20)
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=20, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == expected_text(20)
    assert chunks[-1].usage == answer.usage
    plain = client.completions.create(model="tiny", prompt="a", max_tokens=3, logprobs=1)
    assert len(plain.choices[0].logprobs.tokens) == plain.usage.completion_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_openais_asynchronous_client_is_served(server):
    import asyncio

    openai = pytest.importorskip("openai")

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            messages = [{"role": "user", "content": PROMPT}]
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(model="tiny", messages=messages, max_tokens=20)
                    for _ in range(6)
                )
            )
            return {answer.choices[0].message.content for answer in answers}

    assert asyncio.run(ask()) == {expected_text(20)}


def test_a_connection_cut_in_mid_stream_frees_the_slot(server):
    aborted = gauge(server, "treespark:requests_aborted_total")
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}
    ) as reply:
        next(reply.iter_lines())
    wait_until(lambda: gauge(server, "treespark:requests_aborted_total") == aborted + 1)
    wait_until(lambda: gauge(server, "treespark:num_requests_running") == 0)


def test_clients_that_do_not_read_or_send_do_not_hold_up_others(server):
    body = json.dumps(LONG | {"stream": True, "n": 4}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for number in range(60):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stack.enter_context(client)
            client.connect(("127.0.0.1", server.port))
            if number < 2:
                client.sendall(head.encode() + body)
            elif number < 30:
                client.sendall(head.encode() + body[:10])
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 4}, timeout=60
        )
        assert answer.status_code == 200
    wait_until(lambda: gauge(server, "treespark:num_requests_running") == 0)


def test_raw_nonsense_on_the_socket_is_refused_and_the_server_lives(server):
    for nonsense in (
        b"\x80\x04\x95pickle.\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(nonsense)
            assert not client.recv(100).startswith(b"HTTP/1.1 200")
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_it_says_what_it_loads_and_then_where_it_serves(server):
    lines = server.log.read_text().splitlines()
    says = [i for i, line in enumerate(lines) if f"loading {tiny().target.path}" in line]
    (serves,) = [i for i, line in enumerate(lines) if f"serving tiny on {server.url}" in line]
    assert says == [0]
    assert serves > 0


def test_it_listens_on_the_loopback_address_only(server):
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    addresses = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    own = [address for address in addresses if address.endswith(f":{server.port:04X}")]
    assert own == [f"0100007F:{server.port:04X}"]


def test_a_port_in_use_is_named_before_anything_is_loaded(server, root):
    command = serve_command(root, "--port", str(server.port))
    start_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: --port {server.port}: already in use")
    assert time.monotonic() - start_s < 20
    assert "torch" not in done.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_lets_the_stream_finish_and_ends_with_zero(own_server, number):
    fields = LONG | {"stream": True}
    with httpx.stream("POST", f"{own_server.url}/v1/completions", json=fields, timeout=60) as reply:
        lines = reply.iter_lines()
        first = next(lines)
        own_server.child.send_signal(number)
        text = "\n".join([first, *lines]) + "\n"
    events = events_of(text.rstrip("\n") + "\n\n")
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert own_server.child.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{own_server.url}/health")


def test_an_error_before_the_first_byte_has_its_status_in_a_stream(server):
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": "a", "stream": True, "stop_token_ids": [999]},
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (400, "stop_token_ids")
    assert error["message"].startswith("stop_token_ids 999, allowed: 0..")


def test_options_that_cannot_be_are_refused_in_one_line(root):
    for options, words in (
        (["--speculative-config", "{"], "--speculative-config {: need a JSON object"),
        (["--override-generation-config", '{"top_p": 2}'], "top_p 2: allowed"),
        (["--metrics-compat", "sglang"], "--metrics-compat sglang: allowed: vllm, none"),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere"),
        (["--max-num-queued-reqs", "-1"], "--max-num-queued-reqs -1: need at least 0"),
    ):
        done = subprocess.run(
            serve_command(root, *options), capture_output=True, text=True, timeout=60,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert words in done.stderr.splitlines()[-1]
