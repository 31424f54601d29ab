# SPDX-License-Identifier: Apache-2.0
"""A server for tests: in this process over ASGI, with a tiny or a scripted engine, or a real one.

The scripted engine says one byte a step and request, so that tests can hold it, break it and count.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx

from tests.serving_world import TEXT_VOCAB, byte_tokenizer, drafter, world
from treespark.serving.async_engine import AsyncEngine
from treespark.serving.codec import Codec
from treespark.serving.engine import Engine
from treespark.serving.records import RequestRecord
from treespark.serving.scheduler import RequestOutput
from treespark.serving.server import create_app
from treespark.serving.service import Service, ServiceOptions
from treespark.serving.stats import EngineStats

CONTEXT = 160
TREE = {"depth": 5, "branching": 3, "budget": 12}
EOS = 256


def tiny():
    """A random target with one token per byte; shared by all tests that use it."""
    return world(vocab=TEXT_VOCAB, eos=EOS, seed=3)


def tiny_engine(**options) -> Engine:
    """An engine with trees over the tiny target."""
    target = tiny().target
    made = drafter(target, tree=TREE)
    return Engine(target, made, **({"max_num_seqs": 4, "max_model_len": CONTEXT} | options))


class ScriptedEngine:
    """Answers every request with "abcabc..." until its limit, one token a step.

    hold: set to keep `step` waiting.  broken: set to make it raise.
    """

    def __init__(self, num_slots: int = 2, step_s: float = 0.0) -> None:
        self.scheduler = SimpleNamespace(slots=[None] * num_slots)
        self.step_s = step_s
        self.requests, self.outputs, self.aborted = {}, {}, []
        self.hold, self.broken = threading.Event(), threading.Event()
        self.num_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request) -> None:
        request.record = RequestRecord(len(request.prompt_token_ids), time.perf_counter())
        self.requests[request.request_id], self.outputs[request.request_id] = request, []

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return self.requests.pop(request_id, None) is not None

    def step(self) -> list[RequestOutput]:
        while self.hold.is_set() and not self.broken.is_set():
            time.sleep(0.005)
        if self.broken.is_set():
            raise RuntimeError("out of memory at 0x7f00")
        time.sleep(self.step_s)
        running = list(self.requests.items())[: len(self.scheduler.slots)]
        return [self._grow(name, request) for name, request in running]

    def _grow(self, name, request) -> RequestOutput:
        ids, record = self.outputs[name], request.record
        ids.append(97 + len(ids) % 3)
        self.num_tokens += 1
        now_s = time.perf_counter()
        record.admitted_s = record.first_token_s = record.first_token_s or now_s
        record.num_prefill_tokens = len(ids)
        is_done = len(ids) == request.params.max_tokens
        if is_done:
            record.finished_s = now_s
            del self.requests[name]
        text = bytes(ids).decode()
        reason = "length" if is_done else None
        return RequestOutput(name, request.prompt_token_ids, list(ids), text, reason, None, record)

    def stats(self) -> EngineStats:
        slots = len(self.scheduler.slots)
        running = min(len(self.requests), slots)
        waiting = len(self.requests) - running
        zeros = [0] * 5
        return EngineStats(
            running, waiting, slots - running, 0.0, 0, 0, self.num_tokens, *zeros, [0] * 5
        )


class Server:
    """A service and its application; every call runs in an event loop of its own."""

    def __init__(self, service: Service, app) -> None:
        self.service, self.app, self.engine = service, app, service.engine
        self.timeout_s = 60

    def run(self, function):
        """Return what a coroutine function makes of a client."""

        async def inner():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await asyncio.wait_for(function(client), self.timeout_s)

        return asyncio.run(inner())

    def get(self, path, **options) -> httpx.Response:
        return self.run(lambda client: client.get(path, **options))

    def post(self, path, body=None, **options) -> httpx.Response:
        return self.run(lambda client: client.post(path, json=body, **options))

    def complete(self, prompt="ab", **fields) -> dict:
        """The body of a completion that must succeed."""
        return self._ok(self.post("/v1/completions", {"prompt": prompt} | fields))

    def chat(self, content="ab", **fields) -> dict:
        """The body of a chat completion that must succeed."""
        messages = [{"role": "user", "content": content}]
        return self._ok(self.post("/v1/chat/completions", {"messages": messages} | fields))

    def stream(self, path, **fields) -> list[dict]:
        """The events of a stream that must end as it should."""
        answer = self.post(path, {"stream": True} | fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_of(answer.text)

    @staticmethod
    def _ok(answer: httpx.Response) -> dict:
        assert answer.status_code == 200, answer.text
        return answer.json()


def events_of(text: str) -> list[dict]:
    """The JSON of each event; the last must be [DONE]."""
    *lines, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@contextlib.contextmanager
def serving(make_engine=tiny_engine, keys=(), max_queued=8, **options):
    """A server in this process, its engine thread ended behind the test."""
    engine = AsyncEngine(make_engine, max_queued)
    engine.load()
    tokenizer = byte_tokenizer()
    codec = Codec(tokenizer, TEXT_VOCAB, CONTEXT)
    chosen = ServiceOptions(("tiny",), **({"tree": TREE} | options))
    service = Service(engine, codec, tokenizer.backend_tokenizer, chosen)
    try:
        yield Server(service, create_app(service, keys))
    finally:
        engine.stop()


# ------------------------------------------------------------------ a process of its own


@functools.cache
def folders(root) -> tuple[str, str]:
    """Folders of the tiny target and a drafter under `root`."""
    folder = root / "drafter"
    drafter(tiny().target, tree=TREE).save_pretrained(folder)
    return str(tiny().target.path), str(folder)


def serve_command(root, *options) -> list[str]:
    """The command line of a server of the tiny target on a free port."""
    target, draft = folders(root)
    return [
        *(sys.executable, "-m", "treespark", "serve", target, "--drafter", draft),
        *("--port", "0", "--served-model-name", "tiny", "--device", "cpu"),
        *("--dtype", "float32", "--max-num-seqs", "4", *options),
    ]


class ServerProcess:
    """`treespark serve` in a process of its own."""

    def __init__(self, root, *options, name: str = "server") -> None:
        self.log = root / f"{name}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(
                serve_command(root, *options), stderr=log, stdout=log, env=environment
            )
        self.url = self._address()
        self.port = int(self.url.rpartition(":")[2])

    def _address(self) -> str:
        for _ in range(1200):
            for line in self.log.read_text().splitlines():
                if "serving tiny on " in line:
                    return line.rpartition(" ")[2]
            assert self.child.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal and return the exit code."""
        self.child.send_signal(number)
        return self.child.wait(timeout_s)

    def kill(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
