# SPDX-License-Identifier: Apache-2.0
"""Servers that a measurement starts for itself, asks and stops: one, or workers behind HAProxy."""

from __future__ import annotations

import ctypes
import http.client
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treespark.errors import UsageError
from treespark.serving.serve import bound_socket

if TYPE_CHECKING:
    from types import TracebackType

_START_S, _STOP_S, _GET_S, _TICK_S = 600.0, 120.0, 30.0, 0.1
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_SAMPLE = re.compile(r"^treespark:(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Deployment:
    """What is started.

    flags: of `treespark serve`.  slots: requests at a time per server.  workers: servers behind
    HAProxy, 0 for one without.  threads: CPU threads per server.
    """

    target: Path
    flags: tuple[str, ...]
    slots: int = 12
    workers: int = 0
    threads: int = 1

    def command(self, port: int, folder: Path) -> list[str]:
        """Return the command line that listens on `port`; workers take the ports behind it."""
        own = [sys.executable, "-m", "treespark"]
        if not self.workers:
            own += ["serve", str(self.target), "--port", str(port)]
            return [*own, "--max-num-seqs", str(self.slots), *self.flags]
        numbers = {
            "workers": self.workers,
            "slots": self.slots,
            "threads": self.threads,
            "port": port,
            "worker-port": port + 1,
        }
        own += ["workers", str(self.target), "--router", "haproxy", "--run-dir", str(folder)]
        return [*own, *(w for k, v in numbers.items() for w in (f"--{k}", str(v))), *self.flags]


class RunningServer:
    """A deployment that runs; it ends with its context, or with this process however that ends."""

    def __init__(self, deployment: Deployment, folder: Path, name: str) -> None:
        """Start it; its output goes to NAME.log in the folder.

        Raises UsageError with the server's own last line when it does not come up.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{name}.log"
        port = free_ports(1 + deployment.workers)
        self.url = f"http://127.0.0.1:{port}"
        environment = {**os.environ, "OMP_NUM_THREADS": str(deployment.threads)}
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(
                deployment.command(port, folder / name),
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        end_s = time.monotonic() + _START_S
        while (self.get("/ready") or (0, ""))[0] != 200:
            if self.child.poll() is not None or time.monotonic() > end_s:
                lines = self.log.read_text("utf-8", "replace").splitlines() or ["no output"]
                raise UsageError(f"the server did not start: {lines[-1]} (see {self.log})")
            time.sleep(_TICK_S)

    def get(self, path: str) -> tuple[int, str] | None:
        """Return status and body of a path, None without an answer."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=_GET_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Return our own samples of /metrics by name, with any label of their own behind a dot."""
        answer = self.get("/metrics")
        assert answer is not None, f"no answer from {self.url}"
        page = answer[1]
        found = {}
        for name, labels, value in _SAMPLE.findall(page):
            own = [v for k, v in _LABEL.findall(labels) if k not in ("model_name", "engine")]
            found[".".join([name, *own])] = float(value)
        return found

    def resident_bytes(self) -> int:
        """Return the memory of the process that is resident now; Linux only."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None, "no VmRSS: the process has ended"
        return int(found[1]) * 1024

    def stop(self) -> int:
        """End it and return its exit code."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        try:
            return self.child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            return self.child.wait()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _end_with_parent() -> None:
    # A measurement that is killed must not leave servers behind: the next one would share the
    # machine with them. Linux alone offers this; elsewhere nothing happens.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def free_ports(number: int) -> int:
    """Return the first of so many free ports in a row."""
    while True:
        with bound_socket("127.0.0.1", 0) as first:
            port = first.getsockname()[1]
        try:
            for offset in range(number):
                bound_socket("127.0.0.1", port + offset).close()
        except (UsageError, OverflowError):
            continue
        return port
