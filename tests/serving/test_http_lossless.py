# SPDX-License-Identifier: Apache-2.0
"""Through HTTP, under load, beside requests that are dropped: the tokens of one prompt alone."""

import asyncio
import random

import pytest

from tests.http_world import CONTEXT, serving, tiny, tiny_engine
from tests.serving_world import TEXT_VOCAB, prompts

MAX_TOKENS = 100
PROMPTS = prompts(64, vocab=TEXT_VOCAB, seed=11, longest=CONTEXT - MAX_TOKENS)


def check(num_prompts, concurrency, aborted):
    """Send prompts at random times, every `aborted`-th dropped on its way; compare the others."""
    draw = random.Random(concurrency)
    chosen = PROMPTS[:num_prompts]

    async def everyone(client):
        async def one(prompt, pause_s):
            await asyncio.sleep(pause_s)
            body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True,
                    "return_token_ids": True, "stream": False}  # fmt: skip
            async with gate:
                return (await client.post("/v1/completions", json=body)).json()

        async def dropped(prompt):
            post = asyncio.ensure_future(one(prompt, 2 * draw.random()))
            await asyncio.sleep(2 * draw.random())
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)

        gate = asyncio.Semaphore(2 * concurrency)
        wanted = [one(prompt, 2 * draw.random()) for prompt in chosen]
        others = [dropped(prompt) for prompt in chosen[::aborted]]
        answers = await asyncio.gather(*wanted, *others)
        return answers[: len(wanted)]

    with serving(lambda: tiny_engine(max_num_seqs=concurrency), max_queued=200) as server:
        server.timeout_s = 500
        answers = server.run(everyone)
        assert server.engine.num_live == 0
        assert server.engine.stats.num_running == server.engine.stats.num_waiting == 0
    for prompt, answer in zip(chosen, answers, strict=True):
        assert answer["choices"][0]["token_ids"] == tiny().reference(prompt, MAX_TOKENS)


def test_six_at_a_time_get_what_each_gets_alone():
    check(10, 6, aborted=5)


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 6, 12])
def test_sixty_four_prompts_get_what_each_gets_alone(concurrency):
    check(64, concurrency, aborted=4)
