# SPDX-License-Identifier: Apache-2.0
"""What the endpoints do, without the web framework: from a body's fields to an answer under way."""

from __future__ import annotations

import dataclasses
import time
import uuid
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import treespark
from treespark.serving.answers import (
    Call,
    ChatFormat,
    CompletionFormat,
    Format,
    Piece,
)
from treespark.serving.api_error import ApiError
from treespark.serving.limits import LENGTHS
from treespark.serving.prompt_logprobs import prompt_logprobs
from treespark.serving.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    prompts_of,
    validated,
)
from treespark.serving.scheduler import Request, SamplingParams
from treespark.serving.streaming import Pieces
from treespark.serving.telemetry import Telemetry
from treespark.serving.work import MetricsOptions, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from treespark.serving.async_engine import AsyncEngine, Submission
    from treespark.serving.codec import Codec

# OpenAI's default for completions; a chat answer may fill the context.
_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class ServiceOptions:
    """How a server presents itself.

    model_names: names it answers to, the first is reported.  defaults: sampling fields for requests
    that leave them out.  stream_interval: tokens per event, 1 = as they come.  tree: depth,
    branching and budget of the trees; None without a drafter.  request_metrics: whether bodies have
    `metrics`.  compatible: vllm's metric names too.  described: what /server_info shows.
    """

    model_names: tuple[str, ...]
    defaults: dict[str, float] = field(default_factory=dict)
    stream_interval: int = 1
    tree: dict[str, int] | None = None
    request_metrics: bool = True
    compatible: bool = True
    described: dict[str, Any] = field(default_factory=dict)


class Service:
    """An engine and a tokenizer behind the OpenAI endpoints.

    tokenizer: the engine's own text decoder, None if the target has none.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        codec: Codec,
        tokenizer: Tokenizer | None,
        options: ServiceOptions,
    ) -> None:
        """Serve; `engine` is loaded."""
        self.engine, self.codec, self.tokenizer, self.options = engine, codec, tokenizer, options
        self.telemetry = Telemetry(engine, options.model_names[0], options.compatible)
        engine.on_finished = self.telemetry.count_finished
        self._created = int(time.time())

    # ------------------------------------------------------------------ generation

    async def complete(self, data: dict[str, Any]) -> Work:
        """Start an answer to a body of /v1/completions. Raises ApiError or UsageError."""
        body = validated(CompletionBody, data)
        self._check(body.model)
        given = prompts_of(body)
        prompts = [await self._prompt_ids(prompt) for prompt in given]
        limits = [self.codec.room(p, body.max_tokens, _DEFAULT_MAX_TOKENS) for p in prompts]
        call = self._call("cmpl", body, prompts, body.logprobs is not None)
        prefixes: list[Piece | None] = [None] * (len(prompts) * body.n)
        if body.echo:
            echoed = [await self._echo(g, p, body) for g, p in zip(given, prompts, strict=True)]
            prefixes = [prefix for prefix in echoed for _ in range(body.n)]
        submission = None
        if body.max_tokens != 0:
            submission = self._submit(call, body, limits, body.logprobs)
        return self._work(body, call, CompletionFormat(self.codec), submission, prefixes)

    async def chat(self, data: dict[str, Any]) -> Work:
        """Start an answer to a body of /v1/chat/completions. Raises ApiError or UsageError."""
        body = validated(ChatBody, data)
        self._check(body.model)
        asked = {body.max_tokens, body.max_completion_tokens} - {None}
        if len(asked) > 1:
            both = f"{body.max_tokens}: max_completion_tokens is {body.max_completion_tokens}"
            raise ApiError(400, f"max_tokens {both}; give one of the two", "max_tokens")
        messages = [message.as_text() for message in body.messages]
        thinking = body.chat_template_kwargs.enable_thinking
        prompt = await self.codec.render(messages, thinking)
        limit = self.codec.room(prompt, asked.pop() if asked else None, None)
        call = self._call("chatcmpl", body, [prompt], body.logprobs)
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        submission = self._submit(call, body, [limit], num_top)
        return self._work(body, call, ChatFormat(self.codec), submission, [None] * body.n)

    def _work(
        self,
        body: GenerationBody,
        call: Call,
        spelling: Format,
        submission: Submission | None,
        prefixes: list[Piece | None],
    ) -> Work:
        options = self.options
        make_pieces = partial(Pieces, options.stream_interval, self.tokenizer)
        metrics = MetricsOptions(options.request_metrics, options.tree)
        return Work(body, call, spelling, submission, prefixes, make_pieces, metrics)

    def _check(self, model: str | None) -> None:
        """Raise ApiError while no request is taken, and for another model's name."""
        self.engine.check_ready()
        names = self.options.model_names
        if model is not None and model not in names:
            shown = model[: LENGTHS["model"]]
            raise ApiError(404, f"model: {shown!r} is not served, but {', '.join(names)}", "model")

    async def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            self.codec.check_ids(prompt, "prompt")
            return prompt
        ids = await self.codec.encode(prompt)
        if not ids:
            raise ApiError(400, "prompt: has no token, at least 1 is needed", "prompt")
        return ids

    def _call(
        self, kind: str, body: GenerationBody, prompts: list[list[int]], logprobs: bool
    ) -> Call:
        name = f"{kind}-{uuid.uuid4().hex}"
        model = self.options.model_names[0]
        return Call(name, int(time.time()), model, prompts, body.n, logprobs, body.return_token_ids)

    def _submit(
        self, call: Call, body: GenerationBody, limits: Sequence[int], num_top: int | None
    ) -> Submission:
        """Hand the engine one request per choice. Raises ApiError when it has no room."""
        requests = [
            Request(f"{call.id}-{number}-{i}", prompt, self._params(body, limit, num_top, i))
            for number, (prompt, limit) in enumerate(zip(call.prompts, limits, strict=True))
            for i in range(body.n)
        ]
        return self.engine.submit(requests)

    def _params(
        self, body: GenerationBody, max_tokens: int, num_top: int | None, choice: int
    ) -> SamplingParams:
        fields: dict[str, Any] = dict(self.options.defaults)
        for name in ("temperature", "top_p", "top_k", "min_p", "min_tokens"):
            if getattr(body, name) is not None:
                fields[name] = getattr(body, name)
        optional = {
            "include_stop_str_in_output": body.include_stop_str_in_output or None,
            "ignore_eos": body.ignore_eos or None,
            "logprobs": num_top,
            # Choices of one call differ, and each can be had again.
            "seed": None if body.seed is None else body.seed + choice,
        }
        fields |= {name: value for name, value in optional.items() if value is not None}
        stop_ids = tuple(body.stop_token_ids)
        return SamplingParams(max_tokens, body.stops, stop_ids, **fields)

    async def _echo(self, given: str | list[int], ids: list[int], body: CompletionBody) -> Piece:
        """Return the prompt as the beginning of its own answer."""
        text = given if isinstance(given, str) else await self._text(ids)
        logprobs: Sequence[Any] = ()
        if body.logprobs is not None:
            compute = partial(prompt_logprobs, prompt=ids, num_top=body.logprobs)
            logprobs = await self.engine.call(compute)
        return Piece(text, [], logprobs)

    async def _text(self, ids: list[int]) -> str:
        return "" if self.codec.tokenizer is None else await self.codec.decode(ids)

    # ------------------------------------------------------------------ everything else

    async def tokenize(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the body of /tokenize. Raises ApiError or UsageError."""
        body = validated(TokenizeBody, data)
        self._check(body.model)
        if body.messages is not None:
            ids = await self.codec.render([m.as_text() for m in body.messages], False)
        else:
            assert body.prompt is not None
            ids = await self.codec.encode(body.prompt, body.add_special_tokens)
        return {"count": len(ids), "max_model_len": self.codec.max_model_len, "tokens": ids}

    async def detokenize(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the body of /detokenize. Raises ApiError or UsageError."""
        body = validated(DetokenizeBody, data)
        self._check(body.model)
        if body.tokens:
            self.codec.check_ids(body.tokens, "tokens")
        return {"prompt": await self.codec.decode(body.tokens)}

    def models(self) -> dict[str, Any]:
        """Return the body of /v1/models."""
        rows = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "treespark",
                "root": self.options.model_names[0],
                "parent": None,
                "max_model_len": self.codec.max_model_len,
            }
            for name in self.options.model_names
        ]
        return {"object": "list", "data": rows}

    def model_info(self) -> dict[str, Any]:
        """Return the body of /model_info, in SGLang's shape for its router."""
        name = self.options.model_names[0]
        return {
            "model_path": name,
            "tokenizer_path": name,
            "is_generation": True,
            "max_model_len": self.codec.max_model_len,
            "vocab_size": self.codec.vocab_size,
        }

    def server_info(self) -> dict[str, Any]:
        """Return the body of /server_info: settings and state, SGLang's names where it has them."""
        stats = self.engine.stats
        state = dataclasses.asdict(stats)
        rounds = stats.num_rounds
        state["avg_spec_accept_length"] = stats.num_committed_tokens / rounds if rounds else None
        return {
            "version": treespark.__version__,
            "served_model_name": self.options.model_names[0],
            "default_sampling_params": self.options.defaults,
            "tree": self.options.tree,
            **self.options.described,
            "internal_states": [state],
        }
