# SPDX-License-Identifier: Apache-2.0
"""How one request is decoded: the fields a user sets, each checked by name."""

from __future__ import annotations

from dataclasses import dataclass

from treespark.errors import UsageError

MAX_TEMPERATURE = 2.0
# OpenAI's largest `top_logprobs`. Every alternative costs host memory per output token.
MAX_LOGPROBS = 20
# A signed 64-bit integer, as other servers take it.
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How to decode one request.

    max_tokens: most tokens to add, at least 1.  stop: strings that end the text and are cut from
    it.  stop_token_ids: ids that end the output like an end-of-sequence id.  ignore_eos: do not
    end at the target's own end-of-sequence ids (`stop_token_ids` still count).
    temperature: 0 is greedy decoding; above it every token is drawn.  top_p: draw among the fewest
    best tokens that hold this share of the probability.  top_k: among the k best, 0 and -1 = all.
    min_p: among those at least this fraction as likely as the best one.  seed: makes the draws
    repeatable, whoever is decoded beside; None = another one each time.
    logprobs: None, or how many best tokens to report beside every output token, 0..20.
    min_tokens: no stop of any kind before so many tokens.  include_stop_str_in_output: keep the
    stop in text and ids.
    Raises UsageError naming the field.
    """

    max_tokens: int = 128
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        """Bring the fields to their stored types and refuse what cannot work."""
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_int("top_k", self.top_k, -1)
        _check_number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, 0, 1)
        _check_number("min_p", self.min_p, 0, 1)
        if self.top_p == 0:
            raise UsageError("top_p 0: allowed: numbers above 0, at most 1")
        if self.seed is not None:
            _check_int("seed", self.seed, MIN_SEED, MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} {_shown(getattr(self, name))}: allowed: True and False")

    @property
    def is_greedy(self) -> bool:
        """True where every token is the most likely one."""
        return self.temperature == 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """The value for a message, cut: a client may send megabytes."""
    # Python refuses to print integers of thousands of digits.
    is_huge = isinstance(value, int) and abs(value) >= 10**30
    text = "(an integer of over 30 digits)" if is_huge else repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _check_int(name: str, value: object, lowest: int, highest: int | None = None) -> None:
    """Raise UsageError unless `value` is an integer in lowest..highest."""
    is_in = isinstance(value, int) and not isinstance(value, bool) and lowest <= value
    if not is_in or (highest is not None and value > highest):  # type: ignore[operator]
        bounds = f"of at least {lowest}" if highest is None else f"in {lowest}..{highest}"
        raise UsageError(f"{name} {_shown(value)}: allowed: integers {bounds}")


def _check_number(name: str, value: object, lowest: float, highest: float) -> None:
    """Raise UsageError unless `value` is a number in lowest..highest; NaN is in no range."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not lowest <= value <= highest:  # type: ignore[operator]
        raise UsageError(f"{name} {_shown(value)}: allowed: numbers in {lowest:g}..{highest:g}")


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, (tuple, list)) or any(not isinstance(s, str) or not s for s in items):
        raise UsageError(f"{name} {_shown(value)}: allowed: non-empty strings")
    return tuple(items)


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or any(not _is_int(i) or i < 0 for i in value):
        raise UsageError(f"{name} {_shown(value)}: allowed: integers of at least 0")
    return tuple(value)
