# SPDX-License-Identifier: Apache-2.0
"""How long a stream pauses while the server reads another prompt, in chunks of its prefill."""

from __future__ import annotations

import asyncio
import random
import time
from itertools import pairwise
from statistics import median

from treespark.data.completions_client import check_httpx

# The engine's default, which `treespark serve` has no flag for.
PREFILL_CHUNK = 512
_NUM_CHUNKS, _NUM_TOKENS, _QUIET_EVENTS, _REPEATS = 3, 256, 30, 3


def measure_stall(url: str, seed: int = 0) -> dict[str, float]:
    """Return the gaps between the events of a stream, alone and while a long prompt is read.

    quiet_gap_ms: the median one alone.  worst_gap_ms: the worst one from the other prompt's arrival
    on.  chunk_ms: the most that a lone prompt of one, two or three chunks takes beyond one of a
    chunk less, each the median of three.  extra_chunks: (worst - quiet) / chunk.
    """
    check_httpx("measure_stall", "bench")
    return asyncio.run(_measure(url, random.Random(seed)))


async def _measure(url: str, draw: random.Random) -> dict[str, float]:
    import httpx

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        vocab = (await client.get("/model_info")).json()["vocab_size"]

        async def read(num_tokens: int) -> float:
            """Seconds from a prompt of so many tokens to its answer of one."""
            ids = [draw.randrange(3, vocab) for _ in range(num_tokens)]
            start_s = time.perf_counter()
            body = {"prompt": ids, "max_tokens": 1, "ignore_eos": True}
            (await client.post("/v1/completions", json=body)).raise_for_status()
            return time.perf_counter() - start_s

        times = [0.0]
        for chunks in range(1, _NUM_CHUNKS + 1):
            several = [await read(chunks * PREFILL_CHUNK) for _ in range(_REPEATS)]
            times.append(median(several))
        chunk_s = max(b - a for a, b in pairwise(times))
        body = {"prompt": "Once upon a time", "max_tokens": _NUM_TOKENS, "ignore_eos": True}
        event_s: list[float] = []
        other: asyncio.Task[float] | None = None
        streaming = client.stream("POST", "/v1/completions", json=body | {"stream": True})
        async with streaming as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event_s.append(time.perf_counter())
                if other is None and len(event_s) == _QUIET_EVENTS:
                    other = asyncio.create_task(read(_NUM_CHUNKS * PREFILL_CHUNK))
        assert other is not None, f"the stream had fewer than {_QUIET_EVENTS} events"
        await other
    gaps = [end - start for start, end in pairwise(event_s)]
    quiet_s, worst_s = median(gaps[: _QUIET_EVENTS - 1]), max(gaps[_QUIET_EVENTS - 1 :])
    return {
        "quiet_gap_ms": 1000 * quiet_s,
        "worst_gap_ms": 1000 * worst_s,
        "chunk_ms": 1000 * chunk_s,
        "extra_chunks": (worst_s - quiet_s) / chunk_s,
    }
