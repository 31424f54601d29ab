# SPDX-License-Identifier: Apache-2.0
"""The target's answers to a prompt file from an OpenAI-compatible server that runs it.

Prompts are rendered here and sent as token ids; the ids of an answer come from the server (vLLM) or
are made of its text again where that is safe. Rows and resuming are those of continuation_rows.py.
"""

import asyncio
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treespark.data.completions_client import (
    DEFAULT_KEY,
    RowError,
    Server,
    check_httpx,
    key_header,
    model_name,
    parsed,
    server_address,
)
from treespark.data.continuation_rows import (
    FIXED,
    Answer,
    Collector,
    ContinuationReport,
    Job,
    Limits,
    collect,
    read_prompts,
)
from treespark.data.interrupt import StopRequest
from treespark.data.jsonl import check_out
from treespark.errors import UsageError
from treespark.target.checks import check_config
from treespark.target.folder import eos_token_ids, load_config
from treespark.target.template import load_tokenizer, template_fingerprint

# How soon a signal is noticed.
_POLL_S = 0.1


def run_server_continuations(
    target: Path,
    prompts: Path,
    out: Path,
    server: str,
    max_tokens: int = 512,
    model: str | None = None,
    concurrency: int = 32,
    api_key_env: str = DEFAULT_KEY,
    retries: int = 5,
    temperature: float = 0.0,
    drop_truncated: bool = False,
) -> ContinuationReport:
    """Let a server answer every prompt; append to `out` what `run_continuations` does.

    target: folder with tokenizer and config.json; weights are not read. server: address up to
    `/v1`. model: its name there; None: the only one it lists. concurrency: requests at a time.
    api_key_env: variable with the key. retries: of a request, after connection errors, 429 and 5xx.
    `gen` holds "server" for fingerprint and dtype, and in `ids` where a row's ids are from. Raises
    UsageError, with nothing written, as `run_continuations` and for a server that cannot be
    reached or does not serve the model; SystemExit when a signal stopped it.
    """
    for name, value, lowest in (
        ("--max-tokens", max_tokens, 1),
        ("--concurrency", concurrency, 1),
        ("--retries", retries, 0),
    ):
        if value < lowest:
            raise UsageError(f"{name} {value}: need at least {lowest}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UsageError(f"--temperature {temperature}: need a number of at least 0")
    check_httpx()
    asked = Server(server_address(server), key_header(api_key_env), retries)
    check_out(out, [prompts])
    rows = read_prompts(prompts)
    tokenizer = load_tokenizer(target)
    check_config(target / "config.json")
    config = load_config(target)
    gen = {
        "model": model_name(asked, model),
        "fingerprint": "server",
        "dtype": "server",
        "sampling": {"temperature": float(temperature)},
        "max_tokens": max_tokens,
        "template": template_fingerprint(tokenizer),
        "drafter": None,
    }
    limits = Limits(config.vocab_size, config.max_position_embeddings)
    eos = eos_token_ids(target, config) or {tokenizer.eos_token_id} - {None}
    reader = _Reader(tokenizer, limits, eos)

    def decode(jobs: deque[Job], collector: Collector, stop: StopRequest) -> None:
        with collector:
            asyncio.run(_ask_all(asked, reader, jobs, gen, concurrency, collector, stop))

    # Without a fingerprint the name is all that tells one target from another.
    fixed = ("model", *FIXED)
    return collect(rows, out, tokenizer, limits, gen, decode, fixed, drop_truncated)


@dataclass(frozen=True)
class _Reader:
    """Makes an answer of what the server sent."""

    tokenizer: Any
    limits: Limits
    eos: set[int]

    def read(self, job: Job, content: bytes) -> Answer:
        """Return the answer in the body of a response; raises RowError for an unusable one."""
        try:
            choices = parsed(content).get("choices")
        except UsageError as error:
            raise RowError(str(error)[:200]) from None
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or not isinstance(choice.get("text"), str):
            raise RowError("the server's answer has no choices[0].text")
        text, reason = choice["text"], choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise RowError(f"finish_reason {reason!r:.80}: need stop or length")
        if choice.get("prompt_token_ids") not in (None, job.prompt_token_ids):
            raise RowError("the server read other prompt ids than were sent")
        ids, source = choice.get("token_ids"), "server"
        if ids is None:
            ids, source = self._encoded(text), "re-encoded"
        elif not isinstance(ids, list) or any(type(i) is not int for i in ids):
            raise RowError("token_ids: need a list of integers")
        if reason == "stop":
            ids = self._ended(ids, choice)
        if not ids:
            raise RowError("an answer without tokens")
        if not self.limits.are_ids(ids):
            raise RowError(f"token id of the server outside 0..{self.limits.vocab_size - 1}")
        return Answer(job, ids, text, reason, {"ids": source})

    def _encoded(self, text: str) -> list[int]:
        """Return the ids of a text that spells them exactly."""
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        # A special token spelled out in the text, or half a character at its end, was other ids.
        again = self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if again != text or "\N{REPLACEMENT CHARACTER}" in text:
            raise RowError("no token_ids from the server, and its text does not encode back")
        return ids

    def _ended(self, ids: list[int], choice: dict[str, Any]) -> list[int]:
        """Return ids with the one that ended them: vLLM and SGLang name it if it is not the usual.

        Raises RowError when it could be any of several.
        """
        if not self.eos or (ids and ids[-1] in self.eos):
            return ids
        named = [choice.get("stop_reason"), choice.get("matched_stop"), self.tokenizer.eos_token_id]
        known = [i for i in named if type(i) is int and i in self.eos] or list(self.eos)
        if len(self.eos) > 1 and known[0] not in named:
            raise RowError(f"which of the ids {sorted(self.eos)} ended the answer is unknown")
        return [*ids, known[0]]


async def _ask_all(
    server: Server,
    reader: _Reader,
    jobs: deque[Job],
    gen: dict[str, Any],
    concurrency: int,
    collector: Collector,
    stop: StopRequest,
) -> None:
    """Keep `concurrency` requests running until all have ended; a signal drops those that run."""
    running: set[asyncio.Task[Answer | tuple[Job, str]]] = set()
    async with server.open(concurrency) as client:
        try:
            while (jobs or running) and not stop:
                while jobs and len(running) < concurrency:
                    ask = _ask(server, client, reader, jobs.popleft(), gen)
                    running.add(asyncio.create_task(ask))
                # Python's signal handlers do not wake the loop, so it looks now and then.
                ended, running = await asyncio.wait(
                    running, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED
                )
                results = [task.result() for task in ended]
                answers = [result for result in results if isinstance(result, Answer)]
                collector.add(answers, sum(len(answer.token_ids) for answer in answers))
                for result in results:
                    if not isinstance(result, Answer):
                        collector.fail(*result)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _ask(
    server: Server, client: Any, reader: _Reader, job: Job, gen: dict[str, Any]
) -> Answer | tuple[Job, str]:
    """Return the answer to one prompt, or the job with the reason why there is none."""
    request = {
        "model": gen["model"],
        "prompt": job.prompt_token_ids,
        "max_tokens": gen["max_tokens"],
        "temperature": gen["sampling"]["temperature"],
        # vLLM's; servers that do not know the field pass over it.
        "return_token_ids": True,
    }
    try:
        return reader.read(job, await server.complete(client, request))
    except RowError as error:
        return job, str(error)
