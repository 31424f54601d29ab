# SPDX-License-Identifier: Apache-2.0
"""The requests of the OpenAI endpoints, field by field, under vLLM's names.

`null` is the same as leaving a field out. A field that is not here is refused, unless its value
asks for what happens anyway (`NEUTRAL`) or it is a label that changes no answer (`LABELS`).
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from treespark.serving.api_error import ApiError
from treespark.serving.limits import COUNTS, LENGTHS, NUMBERS

# Fields of OpenAI and vLLM that are not supported, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "priority": (0,),
    # sglang-router writes these into every request it passes on.
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "separate_reasoning": (True, False),
    "stream_reasoning": (True, False),
}
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")


def _int(name: str) -> Any:
    bounds = NUMBERS[name]
    return Annotated[int, Field(strict=True, ge=int(bounds.low), le=int(bounds.high))]


def _float(name: str) -> Any:
    bounds = NUMBERS[name]
    return Annotated[float, Field(strict=True, ge=bounds.low, le=bounds.high, allow_inf_nan=False)]


def _list(name: str, item: Any, lowest: int = 0) -> Any:
    return Annotated[list[item], Field(min_length=lowest, max_length=COUNTS[name])]


Bool = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Stop = Annotated[str, Field(strict=True, min_length=1, max_length=LENGTHS["stop"])]
Name = Annotated[str, Field(strict=True, min_length=1, max_length=LENGTHS["model"])]
TokenId = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
_TEXT, _IDS = {"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [_TEXT, _IDS, *({"type": "array", "items": kind} for kind in (_TEXT, _IDS))]}
    ),
]


class Body(BaseModel):
    """A request body: unknown fields are refused, null is the same as absent."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: Bool = False
    continuous_usage_stats: Bool = False


class GenerationBody(Body):
    """Fields that both endpoints share."""

    model: Name | None = None
    n: _int("n") = 1
    temperature: _float("temperature") | None = None
    top_p: _float("top_p") | None = None
    top_k: _int("top_k") | None = None
    min_p: _float("min_p") | None = None
    seed: _int("seed") | None = None
    stop: Stop | _list("stop", Stop) = []
    stop_token_ids: _list("stop_token_ids", TokenId) = []
    include_stop_str_in_output: Bool = False
    ignore_eos: Bool = False
    min_tokens: _int("min_tokens") | None = None
    stream: Bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: Bool = False

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: allowed only with stream true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, one or many."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompt
    # OpenAI's default.
    max_tokens: _int("max_tokens") | None = None
    logprobs: _int("logprobs") | None = None
    echo: Bool = False

    @model_validator(mode="after")
    def _check_max_tokens(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 is allowed only with echo true")
        return self


class TextPart(Body):
    """One part of a message's content; only text is supported."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """One chat message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | _list("content", TextPart, 1)

    def as_text(self) -> dict[str, str]:
        """Return the message as a chat template reads it, text parts joined by line breaks."""
        parts = self.content if isinstance(self.content, str) else [p.text for p in self.content]
        # `developer` is OpenAI's later word for system; chat templates know the older one.
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": parts if isinstance(parts, str) else "\n".join(parts)}


class TemplateOptions(Body):
    """What a client may tell the chat template."""

    enable_thinking: Bool = False


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: _list("messages", Message, 1)
    max_tokens: _int("max_completion_tokens") | None = None
    max_completion_tokens: _int("max_completion_tokens") | None = None
    logprobs: Bool = False
    top_logprobs: _int("top_logprobs") | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: allowed only with logprobs true")
        return self


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages."""

    model: Name | None = None
    prompt: Text | None = None
    messages: _list("messages", Message, 1) | None = None
    add_special_tokens: Bool = True

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: Name | None = None
    tokens: list[TokenId]


BODIES = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
AnyBody = TypeVar("AnyBody", bound=Body)


def validated(kind: type[AnyBody], data: dict[str, Any]) -> AnyBody:
    """Return the request in `data`. Raises ApiError 400 that names the first wrong field."""
    fields = {key: value for key, value in data.items() if not _changes_nothing(key, value)}
    try:
        return kind.model_validate(fields)
    except ValidationError as problem:
        raise _refusal(kind, problem) from None


def _changes_nothing(key: str, value: Any) -> bool:
    # `True == 1` in Python, but not in a request.
    return key in LABELS or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in NEUTRAL.get(key, ())
    )


def _refusal(kind: type[Body], problem: ValidationError) -> ApiError:
    """Say what is wrong with the first field; of the client's value repeat a short one only."""
    errors = problem.errors(include_url=False)
    # Of the ways to read a field, the one that got furthest is the one that was meant.
    same = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    first = max(same, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
    path = first["loc"]
    names = [str(part) for i, part in enumerate(path) if i == 0 or not _is_union_tag(part)]
    field = names[0] if names else None
    if first["type"] == "extra_forbidden":
        allowed = [str(value) for value in NEUTRAL.get(field or "", ())]
        hint = f"; allowed: {', '.join(allowed)}" if allowed else ""
        name = ".".join(names)[:100]
        return ApiError(400, f"{name}: not supported by this server{hint}", field)
    message = first["msg"].removeprefix("Value error, ")
    if field is None:
        return ApiError(400, message, message.partition(":")[0])
    return ApiError(400, f"{'.'.join(names)[:100]}{_shown(first['input'])}: {message}", field)


def _shown(value: Any) -> str:
    """A number or a short text for a message, with a space in front; nothing for anything else."""
    # Python takes its time to print thousands of digits.
    if isinstance(value, int) and abs(value) >= 10**30:
        return " (over 30 digits)"
    is_short = isinstance(value, (int, float)) or (isinstance(value, str) and len(value) <= 30)
    return f" {json.dumps(value)}" if is_short else ""


def _is_union_tag(part: str | int) -> bool:
    """Whether a part of an error's path names a way to read a field, not a field."""
    return isinstance(part, str) and (part in ("str", "constrained-str") or "[" in part)


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """Return the prompts of a completion request: text or token ids, one or several.

    Raises ApiError 400 for anything else, an empty prompt included.
    """
    prompt = body.prompt
    is_one = isinstance(prompt, str) or (
        isinstance(prompt, list) and set(map(type, prompt)) <= {int}
    )
    prompts = [prompt] if is_one else prompt
    allowed = "text, a list of token ids, or a list of either"
    if not isinstance(prompts, list) or not prompts:
        raise ApiError(400, f"prompt{_shown(prompt)}: need {allowed}", "prompt")
    if len(prompts) > COUNTS["prompt"]:
        raise ApiError(400, f"prompt: {len(prompts)} given, at most {COUNTS['prompt']}", "prompt")
    for one in prompts:
        if not (isinstance(one, str) or (isinstance(one, list) and set(map(type, one)) <= {int})):
            raise ApiError(400, f"prompt{_shown(one)}: need {allowed}", "prompt")
        if not one:
            raise ApiError(400, "prompt: is empty, at least 1 token is needed", "prompt")
    return prompts
