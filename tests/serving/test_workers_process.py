# SPDX-License-Identifier: Apache-2.0
"""`treespark workers` with HAProxy and real servers: balance, a worker killed, an orderly end."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import httpx
import pytest

from tests.http_world import folders, tiny
from treespark.serving.serve import bound_socket

pytestmark = [pytest.mark.slow, pytest.mark.multi]

SLOTS = 6


def free_ports(number):
    """So many free ports in a row."""
    while True:
        with bound_socket("127.0.0.1", 0) as first:
            port = first.getsockname()[1]
        try:
            socks = [bound_socket("127.0.0.1", port + i) for i in range(number)]
        except ValueError:
            continue
        for sock in socks:
            sock.close()
        return port


class Workers:
    """The command in a process of its own, two workers behind HAProxy."""

    def __init__(self, root):
        target, draft = folders(root)
        self.port = free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        self.run_dir = root / "run"
        self.log = root / "workers.log"
        command = [
            *(sys.executable, "-m", "treespark", "workers", target, "--drafter", draft),
            *("--served-model-name", "tiny", "--dtype", "float32", "--device", "cpu"),
            *("--workers", "2", "--slots", str(SLOTS), "--threads", "1", "--router", "haproxy"),
            *("--port", str(self.port), "--worker-port", str(self.port + 1)),
            *("--run-dir", str(self.run_dir), "--queue-timeout", "30"),
        ]
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(command, stdout=log, stderr=log)
        self.until(lambda: self.status("/ready") == 200, 240)

    def status(self, path):
        try:
            return httpx.get(f"{self.url}{path}", timeout=5).status_code
        except httpx.HTTPError:
            return None

    def pids(self):
        return json.loads((self.run_dir / "pids.json").read_text())

    def until(self, condition, seconds=120):
        end_s = time.monotonic() + seconds
        while not condition():
            assert self.child.poll() is None, self.log.read_text()
            assert time.monotonic() < end_s, self.log.read_text()
            time.sleep(0.1)


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    if shutil.which("haproxy") is None:
        pytest.skip("haproxy is not installed (apt-get install -y haproxy)")
    made = Workers(tmp_path_factory.mktemp("workers"))
    try:
        yield made
    finally:
        if made.child.poll() is None:
            made.child.terminate()
            made.child.wait(90)


def body(number, max_tokens=40):
    return {
        "prompt": [97 + number % 26, 98, 99], "max_tokens": max_tokens, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip


def ask(workers, number, during=None, **fields):
    """Send so many requests at once; what comes back, or the exception that did."""

    async def all_of_them():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            posts = [
                client.post(f"{workers.url}/v1/completions", json=body(i) | fields)
                for i in range(number)
            ]
            tasks = [asyncio.ensure_future(post) for post in posts]
            if during is not None:
                await asyncio.sleep(0.5)
                during()
            return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(all_of_them())


def test_twelve_at_once_and_as_many_that_wait_are_answered_as_alone(workers):
    for number, answer in enumerate(ask(workers, 4 * SLOTS)):
        assert answer.status_code == 200, answer.text
        ids = answer.json()["choices"][0]["token_ids"]
        assert ids == tiny().reference(body(number)["prompt"], 40)
    pages = [httpx.get(f"http://127.0.0.1:{workers.port + 1 + i}/metrics").text for i in range(2)]
    shares = [float(p.split("treespark:generation_tokens_total{")[1].split()[1]) for p in pages]
    assert min(shares) > 0


def test_a_killed_worker_leaves_no_request_without_an_outcome_and_comes_back(workers):
    victim = workers.pids()["worker-0"]

    def kill():
        os.kill(victim, signal.SIGKILL)

    plain = ask(workers, 2 * SLOTS, kill, max_tokens=140)
    # Nothing of a plain answer had been sent: HAProxy asks the other worker.
    statuses = [getattr(answer, "status_code", repr(answer)) for answer in plain]
    assert statuses == [200] * (2 * SLOTS)
    workers.until(lambda: workers.pids().get("worker-0") not in (None, victim))
    workers.until(lambda: httpx_status(workers.port + 1) == 200)
    victim = workers.pids()["worker-0"]
    streamed = ask(workers, 2 * SLOTS, kill, max_tokens=140, stream=True)
    assert len(streamed) == 2 * SLOTS
    # A stream that had begun breaks off without [DONE], which a client notices.
    ended = [a for a in streamed if isinstance(a, httpx.Response) and a.text.endswith("[DONE]\n\n")]
    assert len(ended) >= SLOTS
    assert ask(workers, 1)[0].status_code == 200


def httpx_status(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code
    except httpx.HTTPError:
        return None


def test_a_stopped_worker_gets_no_requests_until_it_goes_on(workers):
    workers.until(lambda: httpx_status(workers.port + 1) == 200)
    worker = workers.pids()["worker-1"]
    os.kill(worker, signal.SIGSTOP)
    try:
        time.sleep(5)
        answers = ask(workers, SLOTS)
        assert [answer.status_code for answer in answers] == [200] * SLOTS
    finally:
        os.kill(worker, signal.SIGCONT)
    workers.until(lambda: httpx_status(workers.port + 2) == 200)


def test_without_any_worker_the_door_answers_in_the_servers_own_shape(workers):
    for name in ("worker-0", "worker-1"):
        os.kill(workers.pids()[name], signal.SIGSTOP)
    try:
        time.sleep(5)
        answer = httpx.post(f"{workers.url}/v1/completions", json=body(0), timeout=60)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == 503
    finally:
        for name in ("worker-0", "worker-1"):
            os.kill(workers.pids()[name], signal.SIGCONT)
    workers.until(lambda: workers.status("/ready") == 200)


def test_a_signal_ends_all_of_it_with_zero(workers):
    pids = workers.pids()
    assert pids.keys() == {"worker-0", "worker-1", "router"}
    workers.child.send_signal(signal.SIGTERM)
    assert workers.child.wait(90) == 0
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
