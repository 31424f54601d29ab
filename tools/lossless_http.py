# SPDX-License-Identifier: Apache-2.0
"""Are the answers of a loaded server those of one prompt alone? By token, in float32, by HTTP.

    python tools/lossless_http.py TARGET --drafter DIR [--out runs/lossless-http]

The reference is autoregressive decoding of one prompt at a time, made once and kept in
OUT/answers.jsonl. Then the same prompts go to a server with the drafter: with 1, 6 and 12 slots,
and to three servers of 12 slots behind HAProxy. Requests arrive at random times, twice as many as
there are slots, and beside every fourth one another is dropped on its way. All ids have to be
equal; exit code 1 if any differs. Answers are kept as they come: after an interruption the same
command goes on with the missing ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from treespark.bench.cells import Cells
from treespark.bench.running import Deployment, RunningServer
from treespark.data.completions_client import check_httpx
from treespark.data.jsonl import check_folder
from treespark.errors import UsageError

if TYPE_CHECKING:
    import httpx

ROOT = Path(__file__).parent.parent
PROMPTS = sorted((ROOT / "recipes" / "prompts").glob("*.jsonl"))
REFERENCE = "alone"
# Seconds: arrivals of the requests that may be in flight, and how long a dropped one lives.
_ARRIVAL_S, _DROPPED_S = 2.0, 4.0
# Seconds that a request is sent again while there is no room for it.
_REFUSED_S = 1800.0


@dataclass(frozen=True)
class Load:
    """Slots per server, and servers behind a router (0: one without)."""

    slots: int
    workers: int = 0

    @property
    def label(self) -> str:
        """Its name in files and tables."""
        return f"{self.workers}x{self.slots}" if self.workers else f"{self.slots}"


def parse_load(text: str) -> Load:
    """Return the load of `12` or `3x12`. Raises UsageError."""
    parts = text.split("x")
    if len(parts) > 2 or not all(p.isascii() and p.isdigit() and 0 < int(p) < 1000 for p in parts):
        raise UsageError(f"--loads {text}: need slots, as 12, or servers and slots, as 3x12")
    numbers = [int(part) for part in parts]
    return Load(numbers[-1], numbers[0] if len(numbers) == 2 else 0)


# ------------------------------------------------------------------ prompts and reference


def chosen_prompts(args: argparse.Namespace) -> dict[str, list[int]]:
    """Return prompts by name, of all files in turns, none longer than --max-prompt-tokens."""
    from types import SimpleNamespace

    from treespark.bench.workload import load_prompts
    from treespark.target.template import open_tokenizer

    config = json.loads((args.target / "config.json").read_text("utf-8"))
    tokenizer = open_tokenizer(args.target, "target")
    target: Any = SimpleNamespace(tokenizer=tokenizer, vocab_size=config["vocab_size"])
    files: dict[str, list[Any]] = {}
    for prompt in load_prompts(args.prompts or PROMPTS, target):
        if len(prompt.token_ids) <= args.max_prompt_tokens:
            files.setdefault(prompt.file, []).append(prompt)
    longest = max(map(len, files.values()), default=0)
    ordered = [rows[i] for i in range(longest) for rows in files.values() if i < len(rows)]
    if len(ordered) < args.num_prompts:
        raise UsageError(f"--num-prompts {args.num_prompts}: the files have {len(ordered)}")
    return {prompt.name: prompt.token_ids for prompt in ordered[: args.num_prompts]}


def make_references(args: argparse.Namespace, prompts: dict[str, list[int]], cells: Cells) -> None:
    """Decode the prompts that have no reference yet, one at a time and without a drafter."""
    missing = [name for name in prompts if f"{REFERENCE}/{name}" not in cells]
    if not missing:
        return
    import torch

    from treespark.serving.llm import LLM, SamplingParams

    torch.set_num_threads(args.threads)
    length = args.max_prompt_tokens + args.max_tokens
    llm = LLM(args.target, dtype="float32", device="cpu", max_num_seqs=1, max_model_len=length)
    params = SamplingParams(args.max_tokens, ignore_eos=True)
    for name in tqdm(missing, desc="alone", unit="prompt"):
        (output,) = llm.generate(prompts[name], params)
        cells.add({"id": f"{REFERENCE}/{name}", "token_ids": output.token_ids})


# ------------------------------------------------------------------ load


async def ask_all(
    server: RunningServer, load: Load, prompts: dict[str, list[int]], max_tokens: int, cells: Cells
) -> int:
    """Send the prompts, keep the answers; return how many neighbours were dropped."""
    import httpx

    draw = random.Random(load.label)
    gate = asyncio.Semaphore(2 * load.slots * max(1, load.workers))
    num_dropped = 0

    async def post(client: httpx.AsyncClient, ids: list[int]) -> list[int]:
        body = {"prompt": ids, "max_tokens": max_tokens, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        end_s = time.monotonic() + _REFUSED_S
        while True:
            answer = await client.post(f"{server.url}/v1/completions", json=body)
            # A router lets a request wait for a slot for a minute only.
            if answer.status_code != 503 or time.monotonic() > end_s:
                break
            await asyncio.sleep(float(answer.headers.get("retry-after", 1)))
        answer.raise_for_status()
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids

    async def wanted(client: httpx.AsyncClient, name: str, bar: Any) -> None:
        async with gate:
            await asyncio.sleep(draw.uniform(0, _ARRIVAL_S))
            ids = await post(client, prompts[name])
        cells.add({"id": f"{load.label}/{name}", "token_ids": ids})
        bar.update()

    async def dropped(client: httpx.AsyncClient, name: str) -> None:
        nonlocal num_dropped
        async with gate:
            await asyncio.sleep(draw.uniform(0, _ARRIVAL_S))
            try:
                await asyncio.wait_for(post(client, prompts[name]), draw.uniform(0.05, _DROPPED_S))
            except asyncio.TimeoutError:
                num_dropped += 1

    names = [name for name in prompts if f"{load.label}/{name}" not in cells]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=3600, limits=limits) as client:
        with tqdm(total=len(names), desc=load.label, unit="prompt") as bar:
            tasks = []
            for number, name in enumerate(names):
                tasks.append(wanted(client, name, bar))
                if number % 4 == 0:
                    tasks.append(dropped(client, name))
            await asyncio.gather(*tasks)
    return num_dropped


def run_load(
    args: argparse.Namespace, load: Load, prompts: dict[str, list[int]], cells: Cells
) -> None:
    """Get what is missing of a load's answers from servers of its own."""
    if all(f"{load.label}/{name}" in cells for name in prompts):
        return
    length = args.max_prompt_tokens + args.max_tokens
    flags = ("--drafter", str(args.drafter), "--dtype", "float32", "--device", "cpu",
             "--max-model-len", str(length), "--budget", str(args.budget))  # fmt: skip
    threads = 1 if load.workers else args.threads
    deployment = Deployment(args.target, flags, load.slots, load.workers, threads)
    with RunningServer(deployment, args.out / "servers", load.label) as server:
        num_dropped = asyncio.run(ask_all(server, load, prompts, args.max_tokens, cells))
        if not load.workers:
            state = server.metrics()
            assert state["num_requests_running"] == 0 == state["num_requests_waiting"], state
    print(f"{load.label}: {num_dropped} neighbours dropped", file=sys.stderr)


def compare(loads: list[Load], prompts: dict[str, list[int]], cells: Cells) -> dict[str, Any]:
    """Return per load how many answers equal the reference and where the others part from it."""
    result: dict[str, Any] = {}
    for load in loads:
        different = []
        for name in prompts:
            expected = cells[f"{REFERENCE}/{name}"]["token_ids"]
            found = cells[f"{load.label}/{name}"]["token_ids"]
            if found != expected:
                pairs = enumerate(zip(expected, found, strict=False))
                shorter = min(len(expected), len(found))
                position = next((i for i, (a, b) in pairs if a != b), shorter)
                different.append({"prompt": name, "position": position})
        equal = len(prompts) - len(different)
        result[load.label] = {"equal": equal, "of": len(prompts), "different": different}
    return result


# ------------------------------------------------------------------ main


def arguments() -> argparse.Namespace:
    """Parse and check the command line. Raises UsageError."""
    parser = argparse.ArgumentParser(description="Answers under load against one prompt alone.")
    parser.add_argument("target", type=Path)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/lossless-http"))
    parser.add_argument("--loads", default="1,6,12,3x12", help="slots, or servers x slots")
    parser.add_argument("--prompts", type=Path, action="append", help="JSONL file; repeatable")
    sizes = {"num-prompts": 64, "max-tokens": 128, "max-prompt-tokens": 256, "budget": 8,
             "threads": os.cpu_count() or 1}  # fmt: skip
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    args = parser.parse_args()
    args.loads = [parse_load(text) for text in args.loads.split(",")]
    for name in sizes:
        value = getattr(args, name.replace("-", "_"))
        if value < 1:
            raise UsageError(f"--{name} {value}: need at least 1")
    if not (args.target / "config.json").is_file():
        raise UsageError(f"target {args.target}: no config.json (a model folder is expected)")
    return args


def main() -> int:
    """Run what is missing, compare, print; exit code 1 if any answer differs."""
    args = arguments()
    check_httpx("lossless_http", "bench")
    check_folder(args.out, f"--out {args.out}")
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = chosen_prompts(args)
    names = ("num_prompts", "max_tokens", "max_prompt_tokens", "budget")
    setting = {name: getattr(args, name) for name in names} | {
        "target": str(args.target),
        "drafter": str(args.drafter),
        "prompts": list(prompts),
    }
    with Cells(args.out / "answers.jsonl", setting) as cells:
        make_references(args, prompts, cells)
        for load in args.loads:
            run_load(args, load, prompts, cells)
        result = compare(args.loads, prompts, cells)
    (args.out / "lossless.json").write_text(
        json.dumps({"setting": setting, "loads": result}, indent=1) + "\n", encoding="utf-8"
    )
    for label, row in result.items():
        print(f"{label}: {row['equal']} of {row['of']} answers equal, token by token")
        for other in row["different"]:
            print(f"  {other['prompt']}: parts at output token {other['position']}")
    return int(any(row["different"] for row in result.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
