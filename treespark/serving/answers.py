# SPDX-License-Identifier: Apache-2.0
"""From the engine's answers to the bodies of the OpenAI endpoints, whole or in pieces.

Field names and shapes are vLLM's. A `Piece` is a stretch of one answer: all of it in a plain
response, what was added since the last event in a stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treespark.serving.codec import Codec
    from treespark.serving.records import RequestRecord
    from treespark.serving.scheduler import RequestOutput

# JSON has no -inf; vLLM's stand-in.
_LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Call:
    """What every body of one HTTP request has in common.

    prompts: token ids.  n: choices per prompt.  wants_logprobs: whether bodies have them.
    """

    id: str
    created: int
    model: str
    prompts: list[list[int]]
    n: int
    wants_logprobs: bool
    wants_token_ids: bool


@dataclass(frozen=True)
class Piece:
    """A stretch of one answer.

    logprobs: one entry per token, an echoed prompt's included, with token_id, logprob (None where
    nothing predicts it) and top.  offset: characters of the tokens in front of it.
    finish_reason: None unless it is the last.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Any] = ()
    offset: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @classmethod
    def of(cls, output: RequestOutput, tokens: slice, text: slice) -> Piece:
        """Return a stretch of an answer; it carries the finish reason if it reaches its end."""
        is_last = text.stop == len(output.text) and tokens.stop == len(output.token_ids)
        logprobs = output.logprobs or []
        return cls(
            output.text[text],
            output.token_ids[tokens],
            logprobs[tokens],
            0,
            output.finish_reason if is_last else None,
            output.stop_reason if is_last else None,
        )

    def behind(self, prefix: Piece | None) -> Piece:
        """Return this stretch with an echoed prompt in front."""
        if prefix is None:
            return self
        logprobs = [*prefix.logprobs, *self.logprobs]
        return replace(self, text=prefix.text + self.text, logprobs=logprobs)

    @classmethod
    def whole(cls, output: RequestOutput) -> Piece:
        """Return all of an answer."""
        return cls.of(output, slice(0, len(output.token_ids)), slice(0, len(output.text)))


class Format:
    """How an endpoint spells its bodies, whole (`object_name`) or as events (`chunk_name`)."""

    object_name = chunk_name = ""

    def __init__(self, codec: Codec) -> None:
        """`codec` spells single tokens."""
        self.codec = codec

    def choice(self, call: Call, index: int, piece: Piece) -> dict[str, Any]:
        """Return one entry of `choices` of a plain response."""
        raise NotImplementedError

    def chunk(self, call: Call, index: int, piece: Piece, is_first: bool) -> dict[str, Any]:
        """Return the entry of `choices` of a stream's event."""
        raise NotImplementedError

    def opening(self, call: Call, index: int) -> dict[str, Any] | None:
        """Return the entry of a choice's first event, ahead of any token; None for none."""
        return None

    def _tail(self, call: Call, piece: Piece) -> dict[str, Any]:
        tail: dict[str, Any] = {
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if call.wants_token_ids:
            tail["token_ids"] = list(piece.token_ids)
        return tail


class CompletionFormat(Format):
    """/v1/completions: text, and logprobs as parallel lists."""

    object_name = chunk_name = "text_completion"

    def choice(self, call: Call, index: int, piece: Piece) -> dict[str, Any]:
        """Return the entry; `prompt_token_ids` stand in each, as in vLLM."""
        choice = self.chunk(call, index, piece, False)
        if call.wants_token_ids:
            choice["prompt_token_ids"] = call.prompts[index // call.n]
        return choice

    def chunk(self, call: Call, index: int, piece: Piece, is_first: bool) -> dict[str, Any]:
        """Return the entry; in a stream the first of a choice has the prompt's ids."""
        logprobs = self._logprobs(piece) if call.wants_logprobs else None
        head: dict[str, Any] = {"index": index, "text": piece.text, "logprobs": logprobs}
        if is_first and call.wants_token_ids:
            head["prompt_token_ids"] = call.prompts[index // call.n]
        return head | self._tail(call, piece)

    def _logprobs(self, piece: Piece) -> dict[str, list[Any]]:
        tokens, values, tops, offsets = [], [], [], []
        offset = piece.offset
        for entry in piece.logprobs:
            text = self.codec.token_text(entry.token_id)
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
            if entry.logprob is None:
                values.append(None)
                tops.append(None)
                continue
            best: dict[str, float] = {}
            for other, value in entry.top:
                # Pieces of characters can look alike: the likeliest keeps the name.
                best.setdefault(self.codec.token_text(other), _clamped(value))
            best.setdefault(text, _clamped(entry.logprob))
            values.append(_clamped(entry.logprob))
            tops.append(best)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


class ChatFormat(Format):
    """/v1/chat/completions: messages, and logprobs as a list of objects."""

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def choice(self, call: Call, index: int, piece: Piece) -> dict[str, Any]:
        """Return the entry with the whole message."""
        message = {"role": "assistant", "content": piece.text}
        head = {"index": index, "message": message, "logprobs": self._logprobs(call, piece)}
        return head | self._tail(call, piece)

    def chunk(self, call: Call, index: int, piece: Piece, is_first: bool) -> dict[str, Any]:
        """Return the entry with what was added."""
        delta = {"content": piece.text} if piece.text or not piece.finish_reason else {}
        head = {"index": index, "delta": delta, "logprobs": self._logprobs(call, piece)}
        return head | self._tail(call, piece)

    def opening(self, call: Call, index: int) -> dict[str, Any] | None:
        """Return the event that names the speaker."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, call: Call, piece: Piece) -> dict[str, Any] | None:
        if not call.wants_logprobs:
            return None
        return {
            "content": [
                self._spelled(entry.token_id, entry.logprob)
                | {"top_logprobs": [self._spelled(*best) for best in entry.top]}
                for entry in piece.logprobs
            ]
        }

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.codec.token_text(token)
        return {"token": text, "logprob": _clamped(logprob), "bytes": list(text.encode())}


def _clamped(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


def usage(call: Call, num_completion: int) -> dict[str, int]:
    """Return the token counts of a call; each prompt counts once, however many choices it has."""
    num_prompt = sum(map(len, call.prompts))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


def request_metrics(record: RequestRecord, shape: dict[str, int] | None) -> dict[str, Any]:
    """Return times and acceptance of one ended request, in vLLM's shape with a `tree` beside it.

    shape: depth, branching and budget of the trees; None without a drafter.  Milliseconds; a mean
    over fewer than two tokens is None.
    """
    first, end = record.first_token_s, record.finished_s
    assert first is not None
    assert end is not None
    num_later = record.num_output_tokens - 1
    admitted = record.arrival_s if record.admitted_s is None else record.admitted_s
    decode_s = end - first
    return {
        "time_to_first_token_ms": 1000 * (first - record.arrival_s),
        "generation_time_ms": 1000 * (end - admitted),
        "queue_time_ms": 1000 * (admitted - record.arrival_s),
        "mean_itl_ms": 1000 * decode_s / num_later if num_later > 0 else None,
        "tokens_per_second": num_later / decode_s if num_later > 0 and decode_s > 0 else None,
        "speculative_decoding": None if shape is None else _acceptance(record, shape),
    }


def _acceptance(record: RequestRecord, shape: dict[str, int]) -> dict[str, Any]:
    """Return counts of a request's rounds; a round that proposed nothing is no speculative step."""
    rounds, depths = record.rounds, range(shape["depth"] + 1)
    num_nodes = sum(r.num_proposed for r in rounds)
    num_accepted = sum(r.num_accepted for r in rounds)
    num_committed = sum(r.num_committed for r in rounds)
    steps = [r for r in rounds if r.num_proposed]
    mean = num_committed / len(rounds) if rounds else None
    return {
        # Committed tokens per round, cut at the stop and the limit: TreeSpark E.2.
        "mean_acceptance_length": mean,
        "draft_acceptance_rate": num_accepted / num_nodes if num_nodes else None,
        "acceptance_histogram": [sum(r.num_accepted == k for r in steps) for k in depths],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_nodes,
        "num_spec_tokens": shape["depth"],
        "tree": shape
        | {
            "num_rounds": len(rounds),
            "num_committed_tokens": num_committed,
            "mean_nodes": num_nodes / len(rounds) if rounds else None,
            "num_accepting_per_depth": [
                sum(r.num_accepted >= k for r in rounds) for k in depths[1:]
            ],
        },
    }
