# SPDX-License-Identifier: Apache-2.0
"""Independent workers behind one door: start them, wait, restart what dies, stop them together.

A worker is a whole `treespark serve` on its own card or CPU threads; nothing is shared, so none can
take another one down. A worker that fails before all have come up stops everything: that is a
wrong option or a broken folder, and it would fail again.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from treespark.errors import UsageError
from treespark.serving.router import Door, choose_router, haproxy_config, router_command
from treespark.serving.serve import bound_socket

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

_TICK_S = 0.2
# Restarts wait 1, 2, 4 ... seconds; a process that lived for a minute starts from 1 again.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _STEADY_S = 1.0, 60.0, 60.0
# How often a worker is asked whether its engine still works, and how long the answer may take.
_HEALTH_EVERY_S, _PROBE_S = 5.0, 2.0
# Beyond the workers' own time to finish.
_KILL_AFTER_S = 15.0


@dataclass(frozen=True)
class WorkersOptions:
    """Flags of `treespark workers`; each flag has its field's name.

    serve_args: passed on to every `treespark serve`, the target first.  worker_url: workers that
    run elsewhere; then none is started here.  slots: requests at a time per worker.
    """

    serve_args: tuple[str, ...]
    run_dir: Path
    workers: int = 3
    slots: int = 12
    router: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    worker_port: int = 8100
    device: str | None = None
    threads: int | None = None
    queue_timeout: int = 60
    start_timeout: int = 600
    shutdown_timeout: int = 30
    worker_url: tuple[str, ...] = ()
    dry_run: bool = False


@dataclass
class Process:
    """One program that is kept running.

    env: what its environment adds.  url: where it answers, None for a router.
    """

    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    url: str | None = None
    child: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    due_s: float = 0.0

    def start(self) -> None:
        """Start it in a group of its own, so that a Ctrl-C reaches it only through us."""
        self.started_s = time.monotonic()
        environment = {**os.environ, **self.env}
        self.child = subprocess.Popen(self.command, env=environment, start_new_session=True)

    @property
    def is_running(self) -> bool:
        """True while the program runs."""
        return self.child is not None and self.child.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal if it runs."""
        if self.child is not None and self.is_running:
            self.child.send_signal(number)

    def plan_restart(self) -> None:
        """Set when it is started again: later each time it dies young."""
        if time.monotonic() - self.started_s > _STEADY_S:
            self.pause_s = _FIRST_PAUSE_S
        self.due_s = time.monotonic() + self.pause_s
        self.pause_s = min(2 * self.pause_s, _LONGEST_PAUSE_S)

    def shown(self) -> str:
        """Return the shell line that runs it."""
        env = [f"{name}={value}" for name, value in self.env.items()]
        return shlex.join([*(["env", *env] if env else []), *self.command])


def run_workers(options: WorkersOptions) -> int:
    """Run workers and router until SIGTERM or SIGINT; return the exit code.

    0 after a signal, 1 when a worker or the router failed at the start. With dry_run only the
    commands are printed. Raises UsageError for wrong options, a missing router and ports in use.
    """
    _check(options)
    kind = choose_router(options.router, is_checked=not options.dry_run)
    workers = _workers(options)
    urls = options.worker_url or tuple(str(worker.url) for worker in workers)
    door = Door(options.host, options.port, urls, options.slots, options.queue_timeout)
    config = options.run_dir / "haproxy.cfg"
    router = None if kind == "none" else Process("router", router_command(kind, door, config))
    if options.dry_run:
        _show([*workers, *([router] if router else [])], door, kind, config)
        return 0
    _check_ports(options, is_routed=router is not None)
    options.run_dir.mkdir(parents=True, exist_ok=True)
    if kind == "haproxy":
        config.write_text(haproxy_config(door), "utf-8")
    return Supervisor(workers, router, options).run()


def _check(options: WorkersOptions) -> None:
    for name, low in (("workers", 1), ("slots", 1), ("queue_timeout", 1), ("threads", 1)):
        value = getattr(options, name)
        if value is not None and value < low:
            raise UsageError(f"--{name.replace('_', '-')} {value}: need at least {low}")
    last = options.worker_port + options.workers - 1
    if not 1 <= options.worker_port <= last <= 65535:
        raise UsageError(f"--worker-port {options.worker_port}: allowed: 1..65535 for all workers")
    if options.router != "none" and options.worker_port <= options.port <= last:
        raise UsageError(f"--port {options.port}: is also a worker's; change --worker-port")
    for url in options.worker_url:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.netloc or parts.path.strip("/"):
            raise UsageError(f"--worker-url {url}: need an address as http://host:8100")
    if options.worker_url and options.router == "none":
        raise UsageError("--worker-url: without a router there is nothing to run here")
    if not options.worker_url and not options.serve_args:
        raise UsageError("TARGET: missing; give the target's folder, or --worker-url")


def _workers(options: WorkersOptions) -> list[Process]:
    """Return the workers that run here, none when they run elsewhere."""
    if options.worker_url:
        return []
    from treespark.device import worker_environments

    environments = worker_environments(
        options.device, options.workers, options.threads, is_asked=not options.dry_run
    )
    workers = []
    for number, environment in enumerate(environments):
        port = options.worker_port + number
        command = [
            *(sys.executable, "-m", "treespark", "serve", *options.serve_args),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--max-num-seqs", str(options.slots)),
            *("--shutdown-timeout", str(options.shutdown_timeout)),
        ]
        url = f"http://127.0.0.1:{port}"
        workers.append(Process(f"worker-{number}", command, environment, url))
    return workers


def _check_ports(options: WorkersOptions, is_routed: bool) -> None:
    """Raise UsageError for a port in use, before anything is started."""
    if is_routed:
        bound_socket(options.host, options.port).close()
    if not options.worker_url:
        for number in range(options.workers):
            bound_socket("127.0.0.1", options.worker_port + number).close()


def _show(processes: Sequence[Process], door: Door, kind: str, config: Path) -> None:
    lines = [process.shown() for process in processes]
    if kind == "haproxy":
        lines += [f"# {config}:", haproxy_config(door).rstrip()]
    sys.stdout.write("\n".join(lines) + "\n")


class Supervisor:
    """Keeps workers and router running until it is told to stop."""

    def __init__(
        self, workers: Sequence[Process], router: Process | None, options: WorkersOptions
    ) -> None:
        """`router` None: clients connect to the workers themselves."""
        self.workers, self.router, self.options = list(workers), router, options
        # True once all have come up.
        self.is_serving = False
        self._is_stopping = False
        self._asked_s = 0.0

    @property
    def processes(self) -> list[Process]:
        """All that runs here, the router last."""
        return [*self.workers, *([self.router] if self.router else [])]

    def run(self) -> int:
        """Start, watch and stop; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            if not self._start():
                return 0 if self._is_stopping else 1
            self.is_serving = True
            while not self._is_stopping:
                self._watch()
                time.sleep(_TICK_S)
            return 0
        finally:
            self._stop()

    def _on_signal(self, number: int, frame: object) -> None:
        self._is_stopping = True

    def _start(self) -> bool:
        """Start the workers, wait until they are ready, open the door; False if that failed."""
        for worker in self.workers:
            worker.start()
        self._note_pids()
        end_s = time.monotonic() + self.options.start_timeout
        waiting = list(self.workers)
        while waiting and not self._is_stopping:
            for worker in waiting:
                if not worker.is_running:
                    logger.error("%s ended with code %s", worker.name, _code(worker))
                    return False
            waiting = [worker for worker in waiting if _status(worker, "/ready") != 200]
            if waiting and time.monotonic() > end_s:
                logger.error("%s is not ready after --start-timeout", waiting[0].name)
                return False
            time.sleep(_TICK_S)
        if self._is_stopping:
            return False
        return self._open_door()

    def _open_door(self) -> bool:
        if self.router is not None:
            self.router.start()
            self._note_pids()
            time.sleep(1.0)
            if not self.router.is_running:
                logger.error("the router ended with code %s", _code(self.router))
                return False
            logger.info("serving on http://%s:%d", self.options.host, self.options.port)
        return True

    def _watch(self) -> None:
        """Restart what has died or has said that its engine stopped."""
        now_s = time.monotonic()
        for process in self.processes:
            if process.is_running:
                continue
            if process.due_s < process.started_s:
                process.plan_restart()
                pause_s = process.due_s - now_s
                logger.warning(
                    "%s ended with code %s, again in %.0f s", process.name, _code(process), pause_s
                )
            elif now_s >= process.due_s:
                process.start()
                self._note_pids()
        if now_s - self._asked_s > _HEALTH_EVERY_S:
            self._asked_s = now_s
            for worker in self.workers:
                if worker.is_running and _status(worker, "/health") == 503:
                    logger.warning("%s has lost its engine", worker.name)
                    worker.signal(signal.SIGTERM)

    def _stop(self) -> None:
        """Close the door, let the workers finish, end everything."""
        if self.router is not None:
            # HAProxy then takes no connection and keeps those it has; for others it is the end.
            is_soft = self.router.command[0] == "haproxy"
            self.router.signal(signal.SIGUSR1 if is_soft else signal.SIGTERM)
        for worker in self.workers:
            worker.signal(signal.SIGTERM)
        end_s = time.monotonic() + self.options.shutdown_timeout + _KILL_AFTER_S
        while any(w.is_running for w in self.workers) and time.monotonic() < end_s:
            time.sleep(_TICK_S)
        for process in self.processes:
            process.signal(signal.SIGKILL)
            if process.child is not None:
                process.child.wait()
        self._note_pids()

    def _note_pids(self) -> None:
        """Write who runs under which number, for tools that look from outside."""
        pids = {p.name: p.child.pid for p in self.processes if p.child and p.is_running}
        path = self.options.run_dir / "pids.json"
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(pids) + "\n", "utf-8")
        partial.replace(path)


def _code(process: Process) -> int | None:
    return process.child.returncode if process.child else None


def _status(worker: Process, path: str) -> int | None:
    """Return the HTTP status of a worker's path; None when it does not answer in time."""
    connection = http.client.HTTPConnection(urlsplit(str(worker.url)).netloc, timeout=_PROBE_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
