# SPDX-License-Identifier: Apache-2.0
"""THE table of limits on a request, and the strict reading of its body.

Everything here is checked before a prompt is tokenised, so that no request costs more than its
bytes before it is refused.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from treespark.serving.api_error import ApiError

if TYPE_CHECKING:
    from treespark.errors import UsageError


@dataclass(frozen=True)
class Range:
    """Smallest and largest value of a number, both allowed."""

    low: float
    high: float


_INT32, _INT64 = 2**31 - 1, 2**63 - 1

NUMBERS = {
    "n": Range(1, 8),
    # 0 is for `echo` alone: the request reads the prompt and generates nothing.
    "max_tokens": Range(0, _INT32),
    "max_completion_tokens": Range(1, _INT32),
    "min_tokens": Range(0, _INT32),
    # OpenAI's own maxima.
    "logprobs": Range(0, 5),
    "top_logprobs": Range(0, 20),
    "temperature": Range(0, 2),
    # Above 0: nothing could be sampled from an empty set.
    "top_p": Range(1e-6, 1),
    # 0 and -1 switch it off, as in vLLM.
    "top_k": Range(-1, _INT32),
    "min_p": Range(0, 1),
    "seed": Range(-_INT64 - 1, _INT64),
}
# Most items of a list.
COUNTS = {"prompt": 16, "stop": 4, "stop_token_ids": 16, "messages": 1024, "content": 256}
# Most characters of a string; prompts are bounded by the context instead.
LENGTHS = {"stop": 256, "model": 256, "role": 16}

MAX_BODY_BYTES = 4 << 20
MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 << 10
# Objects and lists inside each other; a chat request needs 5.
MAX_DEPTH = 16


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request body. Raises ApiError 400 for anything else.

    NaN, Infinity, numbers beyond a double, lone surrogates, deep nesting and bytes that are not
    UTF-8 are refused. Of a key that comes twice the last value counts, as in every JSON reader.
    """
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise _malformed("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise _malformed(f"not UTF-8 at byte {error.start}") from None
    except ValueError as error:
        raise _malformed(str(error)) from None
    if not isinstance(value, dict):
        raise _malformed(f"need an object, got {type(value).__name__}")
    _check_depth(value)
    if "\\u" in text:
        _check_surrogates(value)
    return value


def refusal_of(problem: UsageError) -> ApiError:
    """Return the 400 of a request that the engine or its parameters refuse; names the field."""
    message = re.sub(r"^request '[^']*': (the )?", "", str(problem))
    field = message.partition(" ")[0]
    return ApiError(400, message, field if field in {**NUMBERS, **COUNTS} else None)


def _malformed(reason: str) -> ApiError:
    return ApiError(400, f"request body: {reason}")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is beyond the range of numbers")
    return number


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise _malformed(f"nested too deeply, allowed: {MAX_DEPTH} levels")


def _check_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _malformed("half a surrogate pair in a string") from None
