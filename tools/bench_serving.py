# SPDX-License-Identifier: Apache-2.0
"""Throughput of the server on this machine: modes of speculation at several concurrencies.

    python tools/bench_serving.py TARGET --drafter DIR [--out runs/bench-serving]

Parts, each a list of cells that is measured `--repeats` times, modes taking turns:

servers: one server with `--slots` slots and all threads, closed loops of `--concurrency` requests.
workers: `--workers` such servers of one thread each behind HAProxy, as many requests as all slots.
peer:    transformers' generate on the same prompts in batches of the same sizes.
stall:   the gaps of one stream while another prompt of three prefill chunks is read.

A cell that is done stands in OUT/cells.jsonl: after an interruption the same command goes on with
the next one. In the end it writes OUT/bench.json, bench.md, bench.svg and bench.png. Nothing else
should run meanwhile; the load averages are in the result. The defaults take about 40 minutes with
a 135M target on two cores: 12 prompts at C=1, three per slot above that, 64 tokens each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treespark import device as devices
from treespark.bench.cells import Cells
from treespark.bench.load import LoadOptions, measure_load
from treespark.bench.plot import check_matplotlib, grouped_bars
from treespark.bench.running import Deployment, RunningServer
from treespark.bench.serving_table import PEER, markdown, summarize_cells
from treespark.bench.stall import measure_stall
from treespark.cli.flags import integers
from treespark.data.jsonl import check_folder, read_jsonl
from treespark.errors import UsageError
from treespark.serving.speculation import MODES

ROOT = Path(__file__).parent.parent
PROMPTS = [ROOT / "recipes" / "prompts" / f"{name}.jsonl" for name in ("gsm8k", "mt-bench")]
PARTS = ("servers", "workers", "peer", "stall")
DEFAULT_MODES = ("off", "chain", "8", "auto")
NAMED_MODES = [mode for mode in MODES if not mode.isdigit()]
# Of a cell's result: what the tables and a later reader need.
KEPT = (
    "duration", "completed", "failed", "errors", "total_input_tokens", "total_output_tokens",
    "output_throughput", "per_request_throughput", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "p99_itl_ms", "median_e2el_ms", "acceptance_length",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    part: str
    mode: str
    concurrency: int
    repeat: int

    @property
    def id(self) -> str:
        """Its name in cells.jsonl."""
        return f"{self.part}/{self.mode}/c{self.concurrency}/r{self.repeat}"


def all_cells(
    parts: list[str], modes: list[str], concurrency: list[int], num_slots: int, repeats: int
) -> list[Cell]:
    """Return the cells in the order of measurement; the first mode of a turn rotates.

    num_slots: of all workers together.
    """
    loads = {"servers": concurrency, "workers": [num_slots], "peer": concurrency, "stall": [1]}
    return [
        Cell(part, mode, number, repeat)
        for part in parts
        for repeat in range(repeats)
        for turn, number in enumerate(loads[part])
        for mode in ([PEER] if part == "peer" else rotated(modes, repeat + turn))
    ]


def rotated(modes: list[str], turn: int) -> list[str]:
    """Return the modes beginning with another one each turn."""
    first = turn % len(modes)
    return [*modes[first:], *modes[:first]]


def mode_flags(mode: str) -> tuple[str, ...]:
    """Return the flags of `treespark serve` for off, chain, auto or a number of nodes."""
    return ("--speculation", mode) if mode in MODES else ("--budget", mode)


# ------------------------------------------------------------------ measuring


class Bench:
    """Measures cells; servers of a part start when they are first needed and end with the part."""

    def __init__(self, args: argparse.Namespace, prompts: Path) -> None:
        self.args, self.prompts = args, prompts
        self._part, self._stack = "", ExitStack()
        self._servers: dict[str, RunningServer] = {}
        self._peer: Any = None

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Return the row of one cell."""
        if cell.part != self._part:
            self.close()
            self._part = cell.part
        kinds = {"peer": self._measure_peer, "stall": self._measure_stall}
        load = os.getloadavg()
        result = kinds.get(cell.part, self._measure_load)(cell)
        return {
            "id": cell.id,
            "part": cell.part,
            "mode": cell.mode if cell.mode in (*NAMED_MODES, PEER) else f"tree-{cell.mode}",
            "concurrency": cell.concurrency,
            "repeat": cell.repeat,
            "load_average": [load[0], os.getloadavg()[0]],
            **result,
        }

    def close(self) -> None:
        """End the servers that run."""
        self._stack.close()
        self._servers.clear()

    def _server(self, cell: Cell) -> RunningServer:
        if cell.mode not in self._servers:
            args, is_many = self.args, cell.part == "workers"
            flags = ("--drafter", str(args.drafter), "--dtype", args.dtype, "--device", "cpu",
                     "--max-model-len", str(args.max_model_len), "--profile",
                     *mode_flags(cell.mode))  # fmt: skip
            deployment = Deployment(
                args.target,
                flags,
                args.slots,
                args.workers if is_many else 0,
                1 if is_many else args.threads,
            )
            server = RunningServer(deployment, args.out / "servers", f"{cell.part}-{cell.mode}")
            self._servers[cell.mode] = self._stack.enter_context(server)
            self._load(server, self._num_slots(cell), self._num_slots(cell), 8)
        return self._servers[cell.mode]

    def _num_slots(self, cell: Cell) -> int:
        return self.args.slots * (self.args.workers if cell.part == "workers" else 1)

    def _load(
        self, server: RunningServer, num_prompts: int, concurrency: int, max_tokens: int
    ) -> dict[str, Any]:
        return measure_load(
            LoadOptions(
                server.url,
                self.prompts,
                num_prompts=num_prompts,
                max_concurrency=concurrency,
                output_len=max_tokens,
            )
        )

    def _num_prompts(self, concurrency: int) -> int:
        return max(self.args.min_prompts, self.args.prompts_per_slot * concurrency)

    def _measure_load(self, cell: Cell) -> dict[str, Any]:
        server, args = self._server(cell), self.args
        before = server.metrics()
        number = self._num_prompts(cell.concurrency)
        result = self._load(server, number, cell.concurrency, args.max_tokens)
        kept = {key: result[key] for key in KEPT}
        if cell.part == "workers":
            # One page would be that of any worker.
            return kept | {"workers": args.workers}
        return kept | phase_growth(before, server.metrics())

    def _measure_peer(self, cell: Cell) -> dict[str, Any]:
        if self._peer is None:
            self._peer = _Peer(self.args, self.prompts)
        return self._peer.measure(self._num_prompts(cell.concurrency), cell.concurrency)

    def _measure_stall(self, cell: Cell) -> dict[str, Any]:
        return measure_stall(self._server(cell).url, self.args.seed + cell.repeat)


def phase_growth(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Return the seconds by phase and the rounds between two readings of /metrics."""
    prefix = "round_seconds_total."
    return {
        "phase_s": {
            name.removeprefix(prefix): value - before[name]
            for name, value in after.items()
            if name.startswith(prefix)
        },
        "num_timed_rounds": after["timed_rounds_total"] - before["timed_rounds_total"],
    }


class _Peer:
    """transformers' generate on the prompts that the load client sends."""

    def __init__(self, args: argparse.Namespace, prompts: Path) -> None:
        import torch

        from treespark.bench.peers import HFGenerate
        from treespark.bench.workload import load_prompts
        from treespark.target.model import TargetModel

        torch.set_num_threads(args.threads)
        target = TargetModel.from_pretrained(args.target, dtype=args.dtype, device="cpu")
        self._prompts = [prompt.token_ids for prompt in load_prompts([prompts], target)]
        self._peer, self._max_tokens = HFGenerate(target), args.max_tokens
        self._peer.generate(self._prompts[:2], 8)

    def measure(self, num_prompts: int, batch_size: int) -> dict[str, Any]:
        """Return the throughput over the prompts in batches, each until its longest has ended."""
        some = [self._prompts[i % len(self._prompts)] for i in range(num_prompts)]
        start_s, num_tokens = time.perf_counter(), 0
        for first in range(0, num_prompts, batch_size):
            answers = self._peer.generate(some[first : first + batch_size], self._max_tokens)
            num_tokens += sum(map(len, answers))
        seconds = time.perf_counter() - start_s
        return {
            "duration": seconds,
            "completed": num_prompts,
            "failed": 0,
            "total_output_tokens": num_tokens,
            "output_throughput": num_tokens / seconds,
        }


# ------------------------------------------------------------------ setting, files, main


def mixed_prompts(files: list[Path], out: Path) -> Path:
    """Write the rows of all files in turns, so that any beginning is of all kinds; return where."""
    columns = [[row for _, row in read_jsonl(path)] for path in files]
    rows = [c[i] for i in range(max(map(len, columns))) for c in columns if i < len(c)]
    path = out / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def setting_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what must be the same when a measurement goes on."""
    names = ("target", "drafter", "dtype", "threads", "slots", "workers", "max_tokens",
             "min_prompts", "prompts_per_slot", "max_model_len", "seed")  # fmt: skip
    facts = devices.report()
    packages = {name: facts["packages"][name] for name in ("torch", "transformers")}
    return {
        **{name: getattr(args, name) for name in names},
        "target": str(args.target),
        "drafter": str(args.drafter),
        "prompts": [path.stem for path in args.prompts],
        "versions": {name: facts[name] for name in ("treespark", "python", "platform")} | packages,
    }


def commit() -> str:
    """Return the commit of this checkout, or why it has none."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "none"
    except FileNotFoundError:
        return "unknown: no git here"


def write_result(out: Path, setting: dict[str, Any], cells: list[dict[str, Any]]) -> None:
    """Write bench.json, bench.md and the plots."""
    summary = summarize_cells(cells)
    loads = [load for cell in cells for load in cell["load_average"]]
    shown = setting | {
        "command": " ".join(sys.argv),
        "commit": commit(),
        "load_average": f"{min(loads):.1f}..{max(loads):.1f}",
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    result = {"setting": shown, "summary": summary, "cells": cells}
    (out / "bench.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / "bench.md").write_text(markdown(shown, summary), encoding="utf-8")
    labels = list(summary["loads"])
    modes = dict.fromkeys(mode for label in labels for mode in summary["loads"][label])
    rows = {
        mode: [summary["loads"][label].get(mode, {}).get("output_throughput") for label in labels]
        for mode in modes
    }
    title = f"{setting['dtype']}, {setting['threads']} threads (workers: 1 each), min..max"
    for suffix in ("svg", "png"):
        grouped_bars(out / f"bench.{suffix}", labels, rows, "output tokens / s", title)


def arguments() -> argparse.Namespace:
    """Parse and check the command line. Raises UsageError."""
    parser = argparse.ArgumentParser(description="Throughput of the server on this machine.")
    parser.add_argument("target", type=Path)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-serving"))
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    modes = ",".join(DEFAULT_MODES)
    parser.add_argument("--modes", default=modes, help="off, chain, auto or numbers of nodes")
    parser.add_argument("--concurrency", default="1,6,12", help="of parts servers and peer")
    parser.add_argument("--prompts", type=Path, action="append", help="JSONL file; repeatable")
    parser.add_argument("--dtype", default="bfloat16")
    sizes = {
        "slots": 12,
        "workers": 3,
        "repeats": 3,
        "max-tokens": 64,
        "min-prompts": 12,
        "prompts-per-slot": 3,
        "max-model-len": 2048,
        "threads": os.cpu_count() or 1,
    }
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts of part stall")
    args = parser.parse_args()
    args.prompts = args.prompts or PROMPTS
    args.parts, args.modes = args.parts.split(","), args.modes.split(",")
    args.concurrency = integers("--concurrency", args.concurrency)
    for part in args.parts:
        if part not in PARTS:
            raise UsageError(f"--parts {part}: allowed: {', '.join(PARTS)}")
    for mode in args.modes:
        if mode not in NAMED_MODES and not (mode.isascii() and mode.isdigit()):
            raise UsageError(f"--modes {mode}: allowed: off, chain, auto and numbers of nodes")
    for name in sizes:
        if getattr(args, name.replace("-", "_")) < 1:
            raise UsageError(f"--{name} {getattr(args, name.replace('-', '_'))}: need at least 1")
    if min(args.concurrency) < 1:
        raise UsageError("--concurrency 0: need at least 1")
    return args


def main() -> int:
    """Measure what is missing, write the result; exit code 1 if a request failed."""
    args = arguments()
    check_matplotlib("bench")
    check_folder(args.out, f"--out {args.out}")
    args.out.mkdir(parents=True, exist_ok=True)
    setting = setting_of(args)
    cells = all_cells(
        args.parts, args.modes, args.concurrency, args.slots * args.workers, args.repeats
    )
    with Cells(args.out / "cells.jsonl", setting) as done:
        bench = Bench(args, mixed_prompts(args.prompts, args.out))
        try:
            for number, cell in enumerate(cells, 1):
                if cell.id not in done:
                    print(f"{number} of {len(cells)}: {cell.id}", file=sys.stderr, flush=True)
                    done.add(bench.measure(cell))
        finally:
            bench.close()
        rows = [done[cell.id] for cell in cells]
    write_result(args.out, setting, rows)
    print((args.out / "bench.md").read_text(encoding="utf-8"))
    return int(any(row.get("failed", 0) for row in rows))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
