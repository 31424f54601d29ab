# SPDX-License-Identifier: Apache-2.0
"""Load on any OpenAI server: a closed loop or random arrivals, every answer streamed and timed.

Flags and result keys are those of `vllm bench serve`; `load_summary.py` says what they mean.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from treespark.bench.load_summary import (
    METRICS,
    Outcome,
    counters_of,
    load_table,
    summarize_load,
)
from treespark.data.completions_client import (
    DEFAULT_KEY,
    Server,
    check_httpx,
    key_header,
    model_name,
    parsed,
    server_address,
)
from treespark.data.formats import first_user_turn
from treespark.data.jsonl import check_file, read_jsonl, write_json_atomic
from treespark.data.terminal import plain_console
from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import httpx

BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
# Ids below it are often special tokens.
_FIRST_RANDOM_ID = 3


@dataclass(frozen=True)
class LoadOptions:
    """Flags of `treespark bench serve`, by the same names; `None` where the default is derived."""

    base_url: str
    dataset_path: Path | None = None
    dataset_name: str = "custom"
    backend: str = "openai-chat"
    endpoint: str | None = None
    model: str | None = None
    num_prompts: int = 100
    max_concurrency: int | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    output_len: int = 128
    random_input_len: int = 128
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int = 0
    num_warmups: int = 0
    percentile_metrics: str = ",".join(METRICS)
    metric_percentiles: str = "99"
    api_key_env: str = DEFAULT_KEY
    save_result: bool = False
    result_dir: Path = field(default_factory=Path)
    result_filename: str | None = None


def run_load(options: LoadOptions, as_json: bool = False) -> dict[str, Any]:
    """Send the prompts, print or save what was measured and return it. Raises as `measure_load`."""
    metrics, percentiles = _check(options)
    out = _result_path(options)
    if options.save_result:
        check_file(out, "--result-filename ")
    result = measure_load(options)
    if options.save_result:
        write_json_atomic(out, result)
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        plain_console(100).print(load_table(result, metrics, percentiles))
        if options.save_result:
            plain_console().print(f"written: {out}")
    return result


def measure_load(options: LoadOptions) -> dict[str, Any]:
    """Send the prompts and return what was measured.

    Raises UsageError, before any load, for a wrong option or file and for a server that cannot be
    reached or does not serve the model.
    """
    _, percentiles = _check(options)
    root, server, model = _connect(options)
    load = _Load(options, server, root, model, _prompts(options, server, root))
    outcomes, seconds, counters = asyncio.run(load.run())
    result = summarize_load(outcomes, seconds, counters, percentiles)
    return _head(options, model) | result


def send_prompts(options: LoadOptions, prompts: Sequence[list[int]]) -> tuple[list[Outcome], float]:
    """Send prompts as token ids; return their outcomes in order, and the seconds it took.

    Raises UsageError for a server that cannot be reached or does not serve the model.
    """
    root, server, model = _connect(options)
    outcomes, seconds, _ = asyncio.run(_Load(options, server, root, model, prompts).run())
    return outcomes, seconds


def _connect(options: LoadOptions) -> tuple[str, Server, str]:
    """Return the server's address, the server and the model it serves."""
    check_httpx("--base-url", "bench")
    root = server_address(options.base_url, "--base-url", "http://host:8000")
    server = Server(f"{root}/v1", key_header(options.api_key_env), 0, "--base-url")
    return root, server, model_name(server, options.model)


# ------------------------------------------------------------------ options


def _check(options: LoadOptions) -> tuple[list[str], list[float]]:
    """Return the metrics and percentiles to print. Raises UsageError."""
    if options.backend not in BACKENDS:
        raise UsageError(f"--backend {options.backend}: allowed: {', '.join(BACKENDS)}")
    if options.dataset_name not in ("custom", "random"):
        raise UsageError(f"--dataset-name {options.dataset_name}: allowed: custom, random")
    if options.dataset_name == "custom" and options.dataset_path is None:
        raise UsageError("--dataset-path: missing; give a JSONL file, or --dataset-name random")
    if options.dataset_name == "random" and options.backend != "openai":
        raise UsageError("--dataset-name random: sends token ids, which need --backend openai")
    if not options.request_rate > 0:
        raise UsageError(f"--request-rate {options.request_rate}: need a number above 0, or inf")
    if not (options.burstiness > 0 and math.isfinite(options.burstiness)):
        raise UsageError(f"--burstiness {options.burstiness}: need a number above 0")
    if not (options.temperature >= 0 and math.isfinite(options.temperature)):
        raise UsageError(f"--temperature {options.temperature}: need a number of at least 0")
    metrics = options.percentile_metrics.split(",")
    for name in metrics:
        if name not in METRICS:
            raise UsageError(f"--percentile-metrics {name}: allowed: {', '.join(METRICS)}")
    percentiles = []
    for text in options.metric_percentiles.split(","):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 100:
            raise UsageError(f"--metric-percentiles {text}: need numbers in 0..100")
        percentiles.append(value)
    return metrics, percentiles


def _result_path(options: LoadOptions) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{options.backend}-{options.request_rate:g}qps"
    if options.max_concurrency is not None:
        name += f"-concurrency{options.max_concurrency}"
    return options.result_dir / (options.result_filename or f"{name}-{stamp}.json")


def _head(options: LoadOptions, model: str) -> dict[str, Any]:
    rate = options.request_rate
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "model_id": model,
        "num_prompts": options.num_prompts,
        # JSON has no infinity; vLLM writes the word too.
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "output_len": options.output_len,
        "dataset": str(options.dataset_path or options.dataset_name),
    }


# ------------------------------------------------------------------ prompts


def _prompts(options: LoadOptions, server: Server, root: str) -> list[str | list[int]]:
    """Return the distinct prompts, at most as many as are sent. Raises UsageError."""
    if options.dataset_path is None:
        return _random_prompts(options, server, root)
    path, found = options.dataset_path, list[str | list[int]]()
    for number, row in read_jsonl(path):
        if len(found) == options.num_prompts:
            break
        where = f"{path}:{number}"
        turn = first_user_turn(row, where, partial(_no_marks, where))
        if not turn:
            raise UsageError(f"{where}: the prompt is empty")
        if isinstance(turn, list) and options.backend != "openai":
            raise UsageError(f"{where}: token ids need --backend openai")
        found.append(turn)
    if not found:
        raise UsageError(f"--dataset-path {path}: no prompt in it")
    return found


def _no_marks(where: str) -> NoReturn:
    raise UsageError(f"{where}: a `text` row needs the target's tokenizer; use another format")


def _random_prompts(options: LoadOptions, server: Server, root: str) -> list[str | list[int]]:
    import httpx

    try:
        answer = httpx.get(f"{root}/model_info", headers=server.headers, timeout=10)
        vocab = parsed(answer.content).get("vocab_size") if answer.is_success else None
    except (httpx.RequestError, UsageError):
        vocab = None
    if not isinstance(vocab, int) or vocab <= _FIRST_RANDOM_ID:
        raise UsageError(
            f"--dataset-name random: {root}/model_info does not tell the vocabulary; use custom"
        )
    draw = random.Random(options.seed)
    return [
        [draw.randrange(_FIRST_RANDOM_ID, vocab) for _ in range(options.random_input_len)]
        for _ in range(options.num_prompts)
    ]


# ------------------------------------------------------------------ load


class _Load:
    """One measurement against one server."""

    def __init__(
        self,
        options: LoadOptions,
        server: Server,
        root: str,
        model: str,
        prompts: Sequence[str] | Sequence[list[int]] | Sequence[str | list[int]],
    ) -> None:
        self.options, self.server, self.root, self.model = options, server, root, model
        self.prompts = prompts
        self.url = root + (options.endpoint or BACKENDS[options.backend])
        self.gate = asyncio.Semaphore(options.max_concurrency or options.num_prompts)

    async def run(self) -> tuple[list[Outcome], float, dict[str, float]]:
        """Return the outcomes in order, the seconds it took and what the server counted."""
        async with self.server.open(self.options.max_concurrency or self.options.num_prompts) as c:
            for number in range(self.options.num_warmups):
                await self._ask(c, number)
            before = await self._counters(c)
            start_s = time.perf_counter()
            tasks = []
            with tqdm(total=self.options.num_prompts, unit="request") as bar:
                async for number in self._arrivals():
                    tasks.append(asyncio.create_task(self._gated(c, number, bar)))
                outcomes = await asyncio.gather(*tasks)
            seconds = max(outcome.end_s for outcome in outcomes) - start_s
            after = await self._counters(c)
        return outcomes, seconds, {k: after[k] - before.get(k, 0) for k in after}

    async def _arrivals(self) -> AsyncIterator[int]:
        """Yield request numbers, each at its time: gaps of a gamma distribution."""
        options, draw = self.options, random.Random(self.options.seed)
        due_s = time.perf_counter()
        for number in range(options.num_prompts):
            yield number
            if math.isfinite(options.request_rate):
                mean_s = 1 / options.request_rate
                due_s += draw.gammavariate(options.burstiness, mean_s / options.burstiness)
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))

    async def _gated(self, client: httpx.AsyncClient, number: int, bar: Any) -> Outcome:
        async with self.gate:
            outcome = await self._ask(client, number)
        bar.update()
        return outcome

    async def _ask(self, client: httpx.AsyncClient, number: int) -> Outcome:
        """Send one request and time its events; whatever goes wrong is in the outcome."""
        import httpx

        outcome = Outcome(time.perf_counter())
        try:
            body = self._body(self.prompts[number % len(self.prompts)])
            async with client.stream("POST", self.url, json=body) as response:
                if response.status_code != 200:
                    content = (await response.aread()).decode("utf-8", "replace")
                    outcome.error = f"HTTP {response.status_code}: {content[:200]}"
                else:
                    async for line in response.aiter_lines():
                        outcome.read(line)
        except (httpx.RequestError, UsageError) as error:
            outcome.error = f"{type(error).__name__}: {error}"[:200]
        outcome.close()
        return outcome

    def _body(self, prompt: str | list[int]) -> dict[str, Any]:
        options = self.options
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.backend == "openai":
            return body | {"prompt": prompt, "max_tokens": options.output_len}
        messages = [{"role": "user", "content": prompt}]
        return body | {"messages": messages, "max_completion_tokens": options.output_len}

    async def _counters(self, client: httpx.AsyncClient) -> dict[str, float]:
        """Return the server's speculative counters; none if it does not tell."""
        import httpx

        try:
            answer = await client.get(f"{self.root}/metrics", timeout=10)
        except httpx.RequestError:
            return {}
        return counters_of(answer.text) if answer.is_success else {}
