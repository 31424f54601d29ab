# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back for the server, beside the event loop and before the engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from treespark.serving.api_error import ApiError
from treespark.target.template import render_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor


class Codec:
    """A target's tokenizer for requests.

    tokenizer: of transformers, not shared with another thread; None if the target has none.
    max_model_len: context in tokens; longer prompts are refused, most of them by their length in
    characters alone.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int) -> None:
        """Measure the longest token, which bounds how few tokens a text can have."""
        self.tokenizer, self.vocab_size, self.max_model_len = tokenizer, vocab_size, max_model_len
        self._longest = 1
        if tokenizer is not None:
            self._longest = max(map(len, tokenizer.get_vocab()))
        # One thread: a tokenizer must not be used by two at once.
        self._executor: Executor = ThreadPoolExecutor(1, thread_name_prefix="treespark-tokenizer")
        self.token_text = lru_cache(maxsize=65536)(self._token_text)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text as it stands. Raises ApiError 400 for one that cannot fit."""
        self._check_text(text)
        return await self._run(lambda: self._ids(text, add_special_tokens))

    async def render(self, messages: Sequence[dict[str, str]], thinking: bool) -> list[int]:
        """Return the ids of chat messages, generation prompt included.

        Raises ApiError 400 for messages that cannot fit and UsageError for those that the template
        refuses.
        """
        if self.tokenizer is not None and getattr(self.tokenizer, "chat_template", None) is None:
            raise ApiError(400, "messages: the target has no chat template", "messages")
        self._check_text("".join(message["content"] for message in messages))
        return await self._run(lambda: self._render(messages, thinking))

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        self._need_tokenizer()
        return await self._run(lambda: self._decode(ids))

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise ApiError 400 for ids outside the vocabulary."""
        wrong = [token for token in (min(ids), max(ids)) if not 0 <= token < self.vocab_size]
        if wrong:
            allowed = f"allowed: 0..{self.vocab_size - 1}"
            raise ApiError(400, f"{field}: token id {str(wrong[0])[:30]}, {allowed}", field)

    def room(self, prompt: Sequence[int], max_tokens: int | None, default: int | None) -> int:
        """Return how many tokens an answer may have: as asked for, else what is left, at most
        `default`.

        Raises ApiError 400 when the prompt, or prompt and `max_tokens` together, exceed the
        context.
        """
        left = self.max_model_len - len(prompt)
        where = f"the maximum context length is {self.max_model_len} tokens"
        if left < 1 and not (max_tokens == 0 and left == 0):
            raise ApiError(400, f"prompt: has {len(prompt)} tokens, {where}", "prompt")
        if max_tokens is None:
            return left if default is None else min(left, default)
        if max_tokens > left:
            asked = f"{max_tokens} asked for behind a prompt of {len(prompt)} tokens"
            raise ApiError(400, f"max_tokens: {asked}, {where}", "max_tokens")
        return max_tokens

    def _need_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise ApiError(400, "prompt: the target has no tokenizer; send token ids", "prompt")

    def _check_text(self, text: str) -> None:
        self._need_tokenizer()
        if len(text) > self._longest * self.max_model_len:
            where = f"the maximum context length is {self.max_model_len} tokens"
            raise ApiError(400, f"prompt: {len(text)} characters cannot fit, {where}", "prompt")

    async def _run(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _render(self, messages: Sequence[dict[str, str]], thinking: bool) -> list[int]:
        return self._ids(render_text(self.tokenizer, messages, thinking), False)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    def _token_text(self, token: int) -> str:
        # Padding rows of the vocabulary have no text.
        return "" if self.tokenizer is None else self._decode([token])
