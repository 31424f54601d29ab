# SPDX-License-Identifier: Apache-2.0
"""Workers behind a router: what is started, what is restarted, and that nothing stays behind."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from treespark import device as devices
from treespark.errors import UsageError
from treespark.serving import router, workers
from treespark.serving.router import Door, choose_router, haproxy_config, router_command
from treespark.serving.serve import bound_socket
from treespark.serving.workers import Process, Supervisor, WorkersOptions, run_workers

DOOR = Door("127.0.0.1", 8000, ("http://127.0.0.1:8100", "http://10.0.0.2:8100"), 12, 60)
# Answers /ready and /health with 200, or as the file named by its second argument says.
STAND_IN = """
import http.server, pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = pathlib.Path(sys.argv[2])
        self.send_response(int(path.read_text()) if path.exists() else 200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port():
    with bound_socket("127.0.0.1", 0) as sock:
        return sock.getsockname()[1]


def options(tmp_path, **fields):
    return WorkersOptions(**({"serve_args": ("target",), "run_dir": tmp_path} | fields))


class Running:
    """A supervisor of stand-in workers, run in a thread."""

    def __init__(self, tmp_path, monkeypatch, num_workers=2, commands=()):
        # Signal handlers belong to the main thread; the test sets the flag itself.
        monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
        monkeypatch.setattr(workers, "_FIRST_PAUSE_S", 0.1)
        monkeypatch.setattr(workers, "_HEALTH_EVERY_S", 0.2)
        self.status = tmp_path / "status"
        made = []
        for number in range(num_workers):
            port = free_port()
            command = [sys.executable, "-c", STAND_IN, str(port), str(self.status)]
            made.append(Process(f"worker-{number}", command, url=f"http://127.0.0.1:{port}"))
        made += [
            Process(f"worker-{n}", c, url="http://127.0.0.1:9") for n, c in enumerate(commands, 9)
        ]
        for process in made:
            process.pause_s = 0.1
        self.path = tmp_path / "pids.json"
        self.supervisor = Supervisor(made, None, options(tmp_path, shutdown_timeout=5))
        self.codes = []
        self.thread = threading.Thread(target=lambda: self.codes.append(self.supervisor.run()))
        self.thread.start()

    def pids(self):
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def until(self, condition):
        end_s = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end_s, self.pids()
            time.sleep(0.02)

    def stop(self):
        self.supervisor._is_stopping = True
        self.thread.join(30)
        return self.codes


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_that_dies_is_started_again_and_a_stop_leaves_nothing(tmp_path, monkeypatch):
    running = Running(tmp_path, monkeypatch)
    running.until(lambda: running.supervisor.is_serving)
    first = running.pids()
    os.kill(first["worker-0"], signal.SIGKILL)
    running.until(lambda: running.pids().get("worker-0") not in (None, first["worker-0"]))
    second = running.pids()
    assert second["worker-1"] == first["worker-1"]
    assert running.stop() == [0]
    assert not any(map(is_alive, [*first.values(), *second.values()]))


def test_a_worker_whose_engine_stopped_is_started_again(tmp_path, monkeypatch):
    running = Running(tmp_path, monkeypatch, num_workers=1)
    running.until(lambda: running.supervisor.is_serving)
    first = running.pids()["worker-0"]
    running.status.write_text("503")
    running.until(lambda: not is_alive(first))
    running.status.unlink()
    running.until(lambda: running.pids().get("worker-0") not in (None, first))
    assert running.stop() == [0]


def test_a_first_start_that_fails_stops_all(tmp_path, monkeypatch, caplog):
    failing = [sys.executable, "-c", "raise SystemExit(2)"]
    running = Running(tmp_path, monkeypatch, num_workers=1, commands=[failing])
    running.thread.join(30)
    assert running.codes == [1]
    assert "worker-9 ended with code 2" in caplog.text
    assert running.pids() == {}


def test_restarts_come_later_each_time(monkeypatch):
    process = Process("w", [])
    process.started_s = time.monotonic()
    pauses = []
    for _ in range(9):
        process.plan_restart()
        pauses.append(round(process.due_s - time.monotonic()))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    process.started_s -= 120
    process.plan_restart()
    assert round(process.due_s - time.monotonic()) == 1


def test_haproxy_sends_each_worker_what_it_has_slots_for():
    text = haproxy_config(DOOR)
    for line in (
        "balance leastconn", "option http-no-delay", "option httpchk GET /ready",
        "timeout queue 60s", "bind 127.0.0.1:8000", "retry-on conn-failure empty-response 503",
        "server worker-0 127.0.0.1:8100 maxconn 12", "server worker-1 10.0.0.2:8100 maxconn 12",
        "hdr Retry-After 1",
    ):  # fmt: skip
        assert line in text, line


def test_haproxy_takes_the_file(tmp_path):
    if shutil.which("haproxy") is None:
        pytest.skip("haproxy is not installed (apt-get install -y haproxy)")
    path = tmp_path / "haproxy.cfg"
    path.write_text(haproxy_config(DOOR))
    done = subprocess.run(["haproxy", "-c", "-f", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()


def test_sglangs_router_gets_short_intervals_and_a_policy_that_fits(tmp_path):
    command = router_command("smg", DOOR, tmp_path)
    pairs = dict(itertools.pairwise(command))
    assert pairs["--policy"] == "power_of_two"
    assert pairs["--max-concurrent-requests"] == "24"
    assert pairs["--health-check-endpoint"] == "/ready"
    assert pairs["--cb-timeout-duration-secs"] == pairs["--health-check-interval-secs"] == "5"
    assert command[command.index("--worker-urls") + 2] == "http://10.0.0.2:8100"
    one = router_command("smg", Door("127.0.0.1", 1, ("http://a:1",), 1, 1), tmp_path)
    assert "round_robin" in one


def test_a_missing_router_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(router.shutil, "which", lambda name: None)
    monkeypatch.setattr(router.importlib.util, "find_spec", lambda name: None)
    for kind, words in (
        ("haproxy", "apt-get install -y haproxy"),
        ("smg", "pip install sglang-router"),
        ("auto", "--router none"),
    ):
        with pytest.raises(UsageError, match=words):
            choose_router(kind)
    assert choose_router("none") == "none"


def shown(tmp_path, capsys, **fields):
    assert run_workers(options(tmp_path, dry_run=True, **fields)) == 0
    return capsys.readouterr().out


def test_a_dry_run_shows_one_card_per_worker_in_ascending_order(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "10,2,1")
    lines = shown(tmp_path, capsys, device="npu").splitlines()
    for number, card in enumerate((1, 2, 10)):
        assert f"ASCEND_RT_VISIBLE_DEVICES={card} " in lines[number]
        assert f"serve target --host 127.0.0.1 --port {8100 + number}" in lines[number]
        assert "--max-num-seqs 12" in lines[number]
    assert "haproxy -db -f" in lines[3]
    assert "server worker-2 127.0.0.1:8102 maxconn 12" in lines[-1]
    assert not any(tmp_path.iterdir())


def test_a_dry_run_on_a_cpu_shares_the_threads(tmp_path, capsys):
    lines = shown(tmp_path, capsys, device="cpu", workers=2, threads=3, router="none").splitlines()
    assert len(lines) == 2
    assert all("OMP_NUM_THREADS=3" in line for line in lines)


def test_a_dry_run_without_a_device_shows_what_a_run_would_take(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv(devices.ENV, raising=False)
    shown_lines = shown(tmp_path, capsys, workers=1, router="none").splitlines()
    kind = devices.available_devices()[0]
    assert f"{devices.ENV}={kind} " in shown_lines[0]


def test_a_dry_run_over_other_hosts_starts_only_the_router(tmp_path, capsys):
    urls = ("http://10.0.0.1:8100", "http://10.0.0.2:8100", "http://10.0.0.3:8100")
    out = shown(tmp_path, capsys, serve_args=(), worker_url=urls, router="smg", host="0.0.0.0")
    (line,) = out.splitlines()
    assert " ".join(urls) in line
    assert "--max-concurrent-requests 36" in line


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"workers": 0}, "--workers 0"),
        ({"slots": 0}, "--slots 0"),
        ({"port": 8101}, "--port 8101: is also a worker's"),
        ({"worker_port": 65535}, "--worker-port 65535"),
        ({"router": "nginx"}, "--router nginx: allowed: auto, haproxy, smg, none"),
        ({"worker_url": ("10.0.0.1:8100",)}, "--worker-url 10.0.0.1:8100"),
        ({"serve_args": ()}, "TARGET: missing"),
        ({"workers": 3, "device": "npu", "dry_run": False, "router": "none"}, "npu"),
        ({"device": "tpu"}, "--device tpu"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(tmp_path, fields, words):
    with pytest.raises(UsageError) as caught:
        run_workers(options(tmp_path, **({"dry_run": True} | fields)))
    assert words in str(caught.value)


def test_a_port_in_use_is_refused_before_anything_runs(tmp_path):
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port {port}: already in use"):
            run_workers(options(tmp_path, device="cpu", workers=1, worker_port=port, router="none"))
