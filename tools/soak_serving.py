# SPDX-License-Identifier: Apache-2.0
"""A server under load for half an hour: does its memory grow, does a request fail, is a slot lost?

    python tools/soak_serving.py TARGET --drafter DIR [--minutes 30] [--out runs/soak]

It starts the server, sends prompts of many lengths once, keeps `--concurrency` requests in flight
with beginnings of the prompts of random length, limits in 1..--max-tokens, half of them streamed
and every tenth sampled, and leaves `--abort-rate` of them after a random time. Memory is the
server's resident set, read from /proc (Linux). On a CPU it first grows with every new number of
rows in a forward, as oneDNN keeps the compiled products of the last 1024 shapes: that is what the
prompts of many lengths are for, and growth is judged behind --warmup-minutes. Exit code 1, with the
reasons, unless

- it grows by less than 2 % behind the warm-up, from the first to the last tenth (medians),
- every request that was not left got its whole answer, and the server counts as many,
- in the end nothing runs or waits and all slots are free, one more request is answered, and SIGTERM
  ends the server with 0.

It writes OUT/soak.json, soak.svg and soak.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from treespark import device as devices
from treespark.bench.plot import check_matplotlib
from treespark.bench.running import Deployment, RunningServer
from treespark.data.completions_client import check_httpx
from treespark.data.formats import first_user_turn
from treespark.data.jsonl import check_folder, read_jsonl, write_json_atomic
from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import httpx

ROOT = Path(__file__).parent.parent
PROMPTS = [ROOT / "recipes" / "prompts" / f"{name}.jsonl" for name in ("gsm8k", "mt-bench")]
# Caches and allocators settle within it; a leak of a kilobyte a request does not stay below it.
MAX_GROWTH = 0.02
# Characters; the shortest and the longest beginning of a prompt.
_SHORTEST, _LONGEST = 4, 800
# Rows of the largest forward of prompts: the engine's default for a chunk.
_LONGEST_PREFILL = 512
# Seconds: between two samples, that an aborted request lives at most, and to wait for the end.
_SAMPLE_S, _LONGEST_LIFE_S, _SETTLE_S = 2.0, 5.0, 60.0


class Soak:
    """The load, and what became of it.

    counts: finished, aborted, failed.  samples: (seconds since the start, resident bytes).
    """

    def __init__(self, server: RunningServer, texts: Sequence[str], args: argparse.Namespace):
        self.server, self.texts, self.args = server, texts, args
        self.counts = {"finished": 0, "aborted": 0, "failed": 0}
        self.errors: list[str] = []
        self.samples: list[tuple[float, int]] = []
        self._end_s = 0.0

    async def run(self) -> None:
        """Keep the server busy for the time that was asked for."""
        import httpx

        limits = httpx.Limits(max_connections=2 * self.args.concurrency)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            await self._fill_caches(client)
            start_s = time.monotonic()
            self._end_s = start_s + 60 * self.args.minutes
            clients = [
                asyncio.create_task(self._client(client, random.Random(f"{self.args.seed}-{i}")))
                for i in range(self.args.concurrency)
            ]
            with tqdm(total=round(60 * self.args.minutes), unit="s", desc="soak") as bar:
                while time.monotonic() < self._end_s:
                    await asyncio.sleep(_SAMPLE_S)
                    passed_s = time.monotonic() - start_s
                    self.samples.append((passed_s, self.server.resident_bytes()))
                    bar.set_postfix(self.counts, refresh=False)
                    bar.update(round(passed_s) - bar.n)
            await asyncio.gather(*clients)

    async def _fill_caches(self, client: httpx.AsyncClient) -> None:
        """Let the server read prompts of many lengths, one at a time."""
        longest = min(_LONGEST_PREFILL, self.args.max_model_len - 1)
        for length in tqdm(range(1, longest, 2), unit="prompt", desc="lengths"):
            body = {"prompt": [5] * length, "max_tokens": 1}
            answer = await client.post(f"{self.server.url}/v1/completions", json=body)
            answer.raise_for_status()
            self.counts["finished"] += 1

    async def _client(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """Send one request after the other."""
        while time.monotonic() < self._end_s:
            body = self.body(draw)
            life_s = None
            if draw.random() < self.args.abort_rate:
                life_s = draw.uniform(0.01, _LONGEST_LIFE_S)
            try:
                error = await asyncio.wait_for(self.ask(client, body), life_s)
            except asyncio.TimeoutError:
                self.counts["aborted"] += 1
                continue
            self.counts["failed" if error else "finished"] += 1
            if error:
                self.errors.append(error)

    def body(self, draw: random.Random) -> dict[str, Any]:
        """Return the next request."""
        text = draw.choice(self.texts)[: draw.randint(_SHORTEST, _LONGEST)]
        return {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": draw.randint(1, self.args.max_tokens),
            "stream": draw.random() < 0.5,
            "temperature": 0.8 if draw.random() < 0.1 else 0.0,
        }

    async def ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str | None:
        """Send one request; return what is wrong with its answer, None for a whole one."""
        import httpx

        url = f"{self.server.url}/v1/chat/completions"
        try:
            async with client.stream("POST", url, json=body) as reply:
                text = (await reply.aread()).decode("utf-8", "replace")
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"[:200]
        if reply.status_code != 200:
            return f"HTTP {reply.status_code}: {text}"[:200]
        if body["stream"]:
            return None if text.endswith("data: [DONE]\n\n") else f"no [DONE]: {text[-200:]}"
        return None if json.loads(text)["choices"][0]["finish_reason"] else f"no end: {text[-200:]}"


# ------------------------------------------------------------------ judging


def growth(samples: Sequence[tuple[float, float]], warmup_s: float) -> float:
    """Return by which share the median rises from the first to the last tenth behind the warm-up.

    Raises UsageError when a tenth has no sample.
    """
    late = [value for seconds, value in samples if seconds >= warmup_s]
    size = len(late) // 10
    if size == 0:
        raise UsageError(f"--minutes: {len(late)} samples behind the warm-up, need at least 10")
    return median(late[-size:]) / median(late[:size]) - 1


def problems(
    rise: float, counts: dict[str, int], state: dict[str, float], num_slots: int
) -> list[str]:
    """Return what is wrong: growth, failures, slots, counts of the server."""
    found = []
    if rise >= MAX_GROWTH:
        found.append(f"resident memory grew by {rise:.1%}, allowed: below {MAX_GROWTH:.0%}")
    if counts["failed"]:
        found.append(f"{counts['failed']} requests failed")
    for name, expected in (
        ("num_requests_running", 0),
        ("num_requests_waiting", 0),
        ("free_slots", num_slots),
    ):
        if state[name] != expected:
            found.append(f"{name} is {state[name]:.0f} in the end, expected {expected}")
    # A request that was left at once may not have reached the engine.
    if not counts["finished"] <= state["ended"] <= sum(counts.values()):
        found.append(f"the server counts {state['ended']:.0f} ended requests, the client {counts}")
    return found


def settled_state(server: RunningServer, num_slots: int) -> dict[str, float]:
    """Return the gauges once all slots are free, or as they are after a minute."""
    end_s = time.monotonic() + _SETTLE_S
    while True:
        state = server.metrics()
        if state["free_slots"] == num_slots or time.monotonic() > end_s:
            return state
        time.sleep(0.5)


def plot(samples: Sequence[tuple[float, int]], warmup_s: float, path: Path) -> None:
    """Write the resident memory over time; the format is that of path's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([s / 60 for s, _ in samples], [size / 2**20 for _, size in samples])
    axes.axvline(warmup_s / 60, linestyle=":", color="gray", label="end of the warm-up")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes")
    axes.set_ylabel("resident memory, MiB")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)


# ------------------------------------------------------------------ main


def texts_of(files: Sequence[Path]) -> list[str]:
    """Return the first user turns of all files. Raises UsageError if there is none."""
    turns = [
        first_user_turn(row, f"{path}:{number}", partial(_no_marks, f"{path}:{number}"))
        for path in files
        for number, row in read_jsonl(path)
    ]
    texts = [turn for turn in turns if isinstance(turn, str) and len(turn) >= _SHORTEST]
    if not texts:
        raise UsageError(f"--prompts: no text of at least {_SHORTEST} characters in the files")
    return texts


def _no_marks(where: str) -> NoReturn:
    raise UsageError(f"{where}: a `text` row needs the target's tokenizer; use another format")


def arguments() -> argparse.Namespace:
    """Parse and check the command line. Raises UsageError."""
    parser = argparse.ArgumentParser(description="A server under load: memory, errors, slots.")
    parser.add_argument("target", type=Path)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warmup-minutes", type=float, help="default: a sixth of --minutes")
    parser.add_argument("--concurrency", type=int, default=12, help="also the server's slots")
    parser.add_argument("--abort-rate", type=float, default=0.05)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--prompts", type=Path, action="append", help="JSONL file; repeatable")
    parser.add_argument("--budget", type=int, default=8, help="nodes of a tree")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in ("minutes", "concurrency", "max_tokens", "threads"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: need more than 0")
    if not 0 <= args.abort_rate <= 1:
        raise UsageError(f"--abort-rate {args.abort_rate}: allowed: 0..1")
    if args.warmup_minutes is None:
        args.warmup_minutes = args.minutes / 6
    if not 0 <= args.warmup_minutes < args.minutes:
        raise UsageError(f"--warmup-minutes {args.warmup_minutes}: allowed: 0..--minutes")
    return args


def main() -> int:
    """Run the soak; return its exit code."""
    args = arguments()
    check_matplotlib("soak")
    check_httpx("soak_serving", "bench")
    check_folder(args.out, f"--out {args.out}")
    args.out.mkdir(parents=True, exist_ok=True)
    texts = texts_of(args.prompts or PROMPTS)
    flags = ("--drafter", str(args.drafter), "--dtype", args.dtype, "--device", "cpu",
             "--max-model-len", str(args.max_model_len), "--budget", str(args.budget))  # fmt: skip
    deployment = Deployment(args.target, flags, args.concurrency, threads=args.threads)
    load_start = os.getloadavg()
    with RunningServer(deployment, args.out, "server") as server:
        soak = Soak(server, texts, args)
        asyncio.run(soak.run())
        state = settled_state(server, args.concurrency)
        state["ended"] = state["requests_aborted_total"] + sum(
            state[f"request_success_total.{reason}"] for reason in ("stop", "length")
        )
        rise = growth(soak.samples, 60 * args.warmup_minutes)
        wrong = problems(rise, soak.counts, state, args.concurrency)
        body = soak.body(random.Random(0)) | {"stream": False}
        wrong += filter(None, [asyncio.run(_one_more(soak, body))])
        code = server.stop()
    if code != 0:
        wrong.append(f"the server ended with code {code}")
    result = {
        "command": sys.argv,
        "versions": devices.report(),
        "minutes": args.minutes,
        "warmup_minutes": args.warmup_minutes,
        "concurrency": args.concurrency,
        "load_average": {"start": load_start, "end": os.getloadavg()},
        "counts": soak.counts,
        "errors": soak.errors[:20],
        "server": state,
        "growth": rise,
        "problems": wrong,
        "samples": soak.samples,
    }
    write_json_atomic(args.out / "soak.json", result)
    for suffix in ("svg", "png"):
        plot(soak.samples, 60 * args.warmup_minutes, args.out / f"soak.{suffix}")
    num_tokens = state["generation_tokens_total"]
    print(f"{soak.counts}, {num_tokens:.0f} tokens, resident memory {rise:+.2%}")
    for problem in wrong:
        print(f"problem: {problem}")
    return int(bool(wrong))


async def _one_more(soak: Soak, body: dict[str, Any]) -> str | None:
    import httpx

    async with httpx.AsyncClient(timeout=600) as client:
        error = await soak.ask(client, body)
    return None if error is None else f"one more request: {error}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
