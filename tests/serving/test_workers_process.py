# SPDX-License-Identifier: Apache-2.0
"""`treespark workers` with a real router and real servers: balance, faults, an orderly end.

The outcomes of the faults are printed: `-m slow -k killed`.
"""

import asyncio
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import httpx
import pytest

from tests.http_world import folders, tiny
from treespark.bench.running import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.multi, pytest.mark.timeout(1200)]

SLOTS = 12
# HAProxy passes the path on to a worker, sglang-router has one of its own.
READY = {"haproxy": "/ready", "smg": "/readiness"}


class Workers:
    """The command in a process of its own, two workers behind a router."""

    def __init__(self, root, router="haproxy"):
        target, draft = folders(root)
        self.port = free_ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        self.run_dir = root / "run"
        self.log = root / "workers.log"
        command = [
            *(sys.executable, "-m", "treespark", "workers", target, "--drafter", draft),
            *("--served-model-name", "tiny", "--dtype", "float32", "--device", "cpu"),
            *("--workers", "2", "--slots", str(SLOTS), "--threads", "1", "--router", router),
            *("--port", str(self.port), "--worker-port", str(self.port + 1)),
            *("--run-dir", str(self.run_dir), "--queue-timeout", "300"),
        ]
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self.until(lambda: self.status(READY[router]) == 200, 600)
        except BaseException:
            self.stop()
            raise

    def status(self, path):
        try:
            return httpx.get(f"{self.url}{path}", timeout=5).status_code
        except httpx.HTTPError:
            return None

    def pids(self):
        return json.loads((self.run_dir / "pids.json").read_text())

    def until(self, condition, seconds=300):
        end_s = time.monotonic() + seconds
        while not condition():
            assert self.child.poll() is None, self.log.read_text()
            assert time.monotonic() < end_s, self.log.read_text()
            time.sleep(0.1)

    def stop(self):
        if self.child.poll() is None:
            self.child.terminate()
            self.child.wait(90)

    def gauge(self, number, name):
        """A gauge or counter of one worker."""
        page = httpx.get(f"http://127.0.0.1:{self.port + 1 + number}/metrics", timeout=30).text
        (line,) = [line for line in page.splitlines() if line.startswith(f"treespark:{name}{{")]
        return float(line.rpartition(" ")[2])


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    if shutil.which("haproxy") is None:
        pytest.skip("haproxy is not installed (apt-get install -y haproxy)")
    made = Workers(tmp_path_factory.mktemp("workers"))
    try:
        yield made
    finally:
        made.stop()


def prompt(number):
    """Text of three tokens; sglang-router takes no token ids, and needs the model's name."""
    return chr(97 + number % 26) + "bc"


def body(number, max_tokens=40):
    return {
        "model": "tiny", "prompt": prompt(number), "max_tokens": max_tokens, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip


def check_ids(answers, max_tokens=40):
    """Every answer has the ids that its prompt alone gets."""
    for number, answer in enumerate(answers):
        assert answer.status_code == 200, answer.text
        ids = answer.json()["choices"][0]["token_ids"]
        assert ids == tiny().reference(list(prompt(number).encode()), max_tokens)


def ask(workers, number, during=None, **fields):
    """Send so many requests at once; what comes back, or the exception that did.

    during: called once every slot of the first worker is taken.
    """

    async def until_full():
        while await asyncio.to_thread(workers.gauge, 0, "num_requests_running") < SLOTS:
            await asyncio.sleep(0.02)

    async def all_of_them():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            posts = [
                client.post(f"{workers.url}/v1/completions", json=body(i) | fields)
                for i in range(number)
            ]
            tasks = [asyncio.ensure_future(post) for post in posts]
            if during is not None:
                await asyncio.wait_for(until_full(), 120)
                during()
            return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(all_of_them())


def outcome(answer):
    """What a client got: a status, a whole stream, a stream that broke off, or an error."""
    if isinstance(answer, Exception):
        return type(answer).__name__
    if answer.headers["content-type"].startswith("text/event-stream"):
        return "whole stream" if answer.text.endswith("data: [DONE]\n\n") else "cut stream"
    return str(answer.status_code)


def show(capsys, title, answers):
    """Print how often each outcome came; return it."""
    counts = collections.Counter(map(outcome, answers))
    with capsys.disabled():
        print(f"\n{title}: {dict(counts)}")
    return counts


def test_all_slots_and_as_many_that_wait_are_answered_as_alone(workers):
    check_ids(ask(workers, 4 * SLOTS))
    assert min(workers.gauge(i, "generation_tokens_total") for i in range(2)) > 0


def kill_first(workers):
    victim = workers.pids()["worker-0"]
    os.kill(victim, signal.SIGKILL)
    return victim


def until_back(workers, victim):
    workers.until(lambda: workers.pids().get("worker-0") not in (None, victim))
    workers.until(lambda: httpx_status(workers.port + 1) == 200)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_killed_worker_with_twelve_in_flight_leaves_none_without_an_outcome(
    workers, stream, capsys
):
    workers.until(lambda: httpx_status(workers.port + 1) == 200)
    victims, start_s = [], time.monotonic()
    answers = ask(
        workers,
        2 * SLOTS,
        lambda: victims.append(kill_first(workers)),
        max_tokens=140,
        stream=stream,
    )
    seconds = time.monotonic() - start_s
    title = f"kill -9 with {SLOTS} in flight and {SLOTS} beside, {'stream' if stream else 'plain'}"
    counts = show(capsys, f"{title}, {seconds:.1f} s", answers)
    assert counts.total() == 2 * SLOTS
    if stream:
        # A stream that had begun breaks off without [DONE], which httpx reports; nothing had been
        # sent of the others, and HAProxy asked the other worker.
        assert counts["whole stream"] >= SLOTS
        assert counts.keys() <= {"whole stream", "RemoteProtocolError"}
    else:
        assert counts == {"200": 2 * SLOTS}
        check_ids(answers, 140)
    until_back(workers, victims[0])
    assert ask(workers, 1)[0].status_code == 200


def test_a_killed_router_comes_back_and_the_workers_do_not_notice(workers, capsys):
    before = workers.pids()
    left = sum(workers.gauge(i, "requests_aborted_total") for i in range(2))
    kill = partial(os.kill, before["router"], signal.SIGKILL)
    counts = show(capsys, "kill -9 of the router", ask(workers, 2 * SLOTS, kill, max_tokens=140))
    assert counts.total() == 2 * SLOTS
    assert "200" not in counts
    workers.until(lambda: workers.status("/ready") == 200)
    after = workers.pids()
    assert after["router"] != before["router"]
    assert {**after, "router": 0} == {**before, "router": 0}
    # Every request was left by its client, the router, and none holds a slot any more.
    workers.until(lambda: sum(workers.gauge(i, "free_slots") for i in range(2)) == 2 * SLOTS)
    assert sum(workers.gauge(i, "requests_aborted_total") for i in range(2)) == left + 2 * SLOTS
    assert [answer.status_code for answer in ask(workers, 2 * SLOTS)] == [200] * 2 * SLOTS


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


def test_sglangs_router_serves_and_takes_a_worker_back(tmp_path, capsys):
    pytest.importorskip("sglang_router", reason="pip install sglang-router")
    workers = Workers(tmp_path, "smg")
    try:
        check_ids(ask(workers, 2 * SLOTS))
        victim = kill_first(workers)
        counts = show(capsys, "sglang-router, a worker killed", ask(workers, SLOTS))
        assert counts == {"200": SLOTS}
        until_back(workers, victim)
        served = workers.gauge(0, "generation_tokens_total")

        def is_used_again():
            ask(workers, 4)
            return workers.gauge(0, "generation_tokens_total") > served

        workers.until(is_used_again)
    finally:
        workers.stop()
    assert workers.child.returncode == 0
