# SPDX-License-Identifier: Apache-2.0
"""What goes wrong has a status, vLLM's error body and no consequence for the next request."""

import asyncio
import json

import pytest

from tests.http_world import CONTEXT, ScriptedEngine, serving
from tests.serving_world import TEXT_VOCAB
from treespark.serving.guard import Guard
from treespark.serving.limits import MAX_BODY_BYTES, MAX_HEADERS

JSON = {"content-type": "application/json"}
ROUTES = [
    ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/model_info"),
    ("GET", "/server_info"), ("GET", "/openapi.json"), ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/no-such-path"), ("GET", "//v1/models"), ("GET", "/v1/../v1/models"),
    ("GET", "/%2e/v1/models"), ("GET", "/health/"), ("GET", "/Health"),
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with serving(ScriptedEngine) as made:
        yield made


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert not any(word in answer.text for word in ("0x", "Traceback", "/home", ".py"))
    return error


def assert_serves(server):
    assert server.complete("a", max_tokens=3)["choices"][0]["text"] == "abc"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"model": "tiny\n\x1b[31m" + "x" * 200}, 404, "model"),
        ({"prompt": [TEXT_VOCAB]}, 400, "prompt"),
        ({"prompt": [2**31]}, 400, "prompt"),
        ({"prompt": [2**70]}, 400, "prompt"),
        ({"prompt": [10**400]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": "x" * CONTEXT}, 400, "prompt"),
        ({"prompt": "x" * 1_000_000}, 400, "prompt"),
        ({"prompt": [1] * 500_000}, 400, "prompt"),
        ({"max_tokens": CONTEXT}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"stream": True, "n": 0}, 400, "n"),
        ({"min_tokens": 5, "max_tokens": 3}, 400, "min_tokens"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_the_next_one_served(
    server, fields, status, param
):
    error = error_of(server.post("/v1/completions", {"prompt": "a"} | fields), status)
    assert error["param"] == param
    assert "\n" not in error["message"]
    assert "\x1b" not in error["message"]
    assert_serves(server)


def test_a_prompt_of_the_whole_context_but_one_is_served(server):
    body = server.complete("x" * (CONTEXT - 1), max_tokens=1)
    assert body["usage"]["total_tokens"] == CONTEXT


def test_a_body_that_is_no_json_is_refused(server):
    for content in (b"", b"{", b"null", b"[]", b"[" * 20_000, b'{"prompt": NaN}'):
        error_of(server.post("/v1/completions", content=content, headers=JSON), 400)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("TRACE", "/health", 405),
     ("DELETE", "/v1/models", 405), ("BREW", "/health", 405)],
)  # fmt: skip
def test_an_unknown_path_or_method_has_the_error_body(server, method, path, status):
    error_of(server.run(lambda client: client.request(method, path)), status)


def test_too_many_or_too_long_headers_are_refused(server):
    many = [(f"x-{i}", "a") for i in range(MAX_HEADERS + 1)]
    error_of(server.get("/health", headers=many), 431)
    error_of(server.get("/health", headers={"x": "a" * 70_000}), 431)


def test_a_body_over_the_limit_is_refused_with_or_without_its_length(server):
    error_of(server.post("/tokenize", content=b"x" * (MAX_BODY_BYTES + 1), headers=JSON), 413)

    async def parts():
        for _ in range(70):
            yield b"x" * 65_536

    error_of(server.post("/tokenize", content=parts(), headers=JSON), 413)


@pytest.mark.parametrize("kind", [None, "text/plain", "multipart/form-data", "application/jsonl"])
def test_a_body_of_another_type_is_refused_as_any_web_page_may_send_it(server, kind):
    headers = {} if kind is None else {"content-type": kind}
    content = b'{"prompt": "a"}'
    error_of(server.post("/v1/completions", content=content, headers=headers), 415)
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    body = server.post("/v1/completions", content=content, headers=headers)
    assert body.status_code == 200


def test_a_post_without_length_and_one_with_both_lengths_are_refused():
    def status_of(headers):
        sent = []

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "http.request", "body": b"{}"}

        scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": headers}
        asyncio.run(Guard(None)(scope, receive, send))
        return sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]

    length, chunked = (b"content-length", b"2"), (b"transfer-encoding", b"chunked")
    assert status_of([]) == (411, 411)
    assert status_of([length, chunked]) == (400, 400)
    kind = (b"content-type", b"application/json")
    assert status_of([kind, (b"content-length", b"two")]) == (400, 400)


def test_a_body_that_does_not_come_is_given_up():
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        await asyncio.sleep(60)

    headers = [(b"content-length", b"2"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    asyncio.run(Guard(None, body_s=0.05)(scope, receive, send))
    assert sent[0]["status"] == 408


def test_a_reader_that_stops_reading_is_given_up():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})

    sent = []

    async def send(message):
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    async def receive():
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    # The exception makes the web server close the connection.
    with pytest.raises(Exception, match="internal error"):
        asyncio.run(Guard(app, stall_s=0.05)(scope, receive, send))
    assert sent == ["http.response.start", "http.response.body"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_path_but_the_probes_needs_the_key(method, path):
    with serving(ScriptedEngine, keys=("secret", "second")) as server:

        def status(**headers):
            async def ask(client):
                return await client.request(method, path, headers=headers, content=b"{}")

            return server.run(ask)

        error = error_of(status(), 401)
        assert error["type"] == "AuthenticationError"
        for value in ("secret", "Basic secret", "Bearer", "Bearer secre", "Bearer secrets"):
            error_of(status(authorization=value), 401)
        for key in ("secret", "second"):
            assert status(authorization=f"Bearer {key}").status_code != 401


def test_probes_need_no_key():
    with serving(ScriptedEngine, keys=("secret",)) as server:
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 200


def test_an_answer_carries_its_request_id(server):
    ids = {server.get("/version").headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2


def test_a_full_queue_asks_to_come_back_and_serves_again_later():
    engine = ScriptedEngine(num_slots=1)
    with serving(lambda: engine, max_queued=2) as server:

        async def burst(client):
            engine.hold.set()
            body = {"prompt": "a", "max_tokens": 2}
            tasks = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(5)
            ]
            while sum(task.done() for task in tasks) < 2:
                await asyncio.sleep(0.01)
            engine.hold.clear()
            return await asyncio.gather(*tasks)

        answers = server.run(burst)
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 503, 503]
        refused = [answer for answer in answers if answer.status_code == 503]
        assert all(answer.headers["retry-after"] for answer in refused)
        assert "queue is full" in error_of(refused[0], 503)["message"]
        assert_serves(server)
        assert "vllm:admission_rejections_total" in server.get("/metrics").text
        assert server.engine.num_rejected == 2


def test_an_engine_that_breaks_ends_every_request_and_the_health_check():
    engine = ScriptedEngine(step_s=0.02)
    with serving(lambda: engine) as server:

        async def break_it(client):
            plain = {"prompt": "a", "max_tokens": 100}
            tasks = [
                asyncio.create_task(client.post("/v1/completions", json=plain | {"stream": stream}))
                for stream in (False, True)
            ]
            while engine.num_tokens < 6:
                await asyncio.sleep(0.005)
            engine.broken.set()
            return await asyncio.gather(*tasks)

        answered, streamed = server.run(break_it)
        error_of(answered, 500)
        assert streamed.status_code == 200
        last = streamed.text.split("\n\n")[-2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 500
        assert "[DONE]" not in streamed.text
        assert server.get("/health").status_code == 503
        assert server.get("/ready").status_code == 503
        error_of(server.post("/v1/completions", {"prompt": "a"}), 503)


def test_a_client_that_leaves_frees_its_slot():
    engine = ScriptedEngine(step_s=0.01)
    with serving(lambda: engine) as server:

        async def leave(client):
            for stream in (False, True):
                body = {"prompt": "a", "max_tokens": 150, "n": 2, "stream": stream}
                task = asyncio.create_task(client.post("/v1/completions", json=body))
                while not engine.requests:
                    await asyncio.sleep(0.005)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                while engine.requests:
                    await asyncio.sleep(0.005)

        server.run(leave)
        assert len(engine.aborted) == server.engine.num_aborted == 4
        assert server.engine.num_live == 0
        assert engine.num_tokens < 300
        assert_serves(server)


def test_a_drain_lets_requests_finish_and_takes_no_more():
    engine = ScriptedEngine(step_s=0.005)
    with serving(lambda: engine) as server:

        async def drain(client):
            body = {"prompt": "a", "max_tokens": 20}
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            while not engine.requests:
                await asyncio.sleep(0.005)
            draining = asyncio.create_task(server.engine.drain(30))
            await asyncio.sleep(0)
            late = await client.post("/v1/completions", json=body)
            ready, health = await client.get("/ready"), await client.get("/health")
            await draining
            return await running, late, ready, health

        running, late, ready, health = server.run(drain)
        assert running.json()["usage"]["completion_tokens"] == 20
        assert "shutting down" in error_of(late, 503)["message"]
        assert (ready.status_code, health.status_code) == (503, 200)


def test_a_drain_ends_what_takes_too_long():
    engine = ScriptedEngine(step_s=0.005)
    with serving(lambda: engine) as server:

        async def drain(client):
            body = {"prompt": "a", "max_tokens": 150}
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            while not engine.requests:
                await asyncio.sleep(0.005)
            await server.engine.drain(0.02)
            return await running

        error_of(server.run(drain), 503)


def test_an_engine_that_cannot_be_built_says_why():
    def build():
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"), serving(build):
        pass
