# SPDX-License-Identifier: Apache-2.0
"""Requests, their states and limits, and which of them hold a slot of the KV cache."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from treespark.serving.detokenize import TextStream
from treespark.serving.params import SamplingParams
from treespark.serving.records import RequestRecord, TokenLogprobs
from treespark.serving.stats import Counted

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "NEXT_STATES",
    "Request",
    "RequestOutput",
    "RequestState",
    "SamplingParams",
    "Scheduler",
    "Slot",
]


class RequestState(Enum):
    """Where a request is; `NEXT_STATES` is the whole life cycle."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


NEXT_STATES = {
    RequestState.WAITING: {RequestState.PREFILL, RequestState.ABORTED},
    # A request whose first token already ends it never runs.
    RequestState.PREFILL: {RequestState.RUNNING, RequestState.FINISHED, RequestState.ABORTED},
    RequestState.RUNNING: {RequestState.FINISHED, RequestState.ABORTED},
    RequestState.FINISHED: set(),
    RequestState.ABORTED: set(),
}


@dataclass(eq=False)
class Request:
    """One prompt and its growing answer.

    The caller gives the first three fields and `Engine.add` the next five; `counted` belongs to the
    engine's totals. Everything below has one writer, `treespark.serving.commit.commit`; length is
    the number of tokens in front of the anchor, which is also the anchor's position.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)

    state: RequestState = RequestState.WAITING
    stop_ids: frozenset[int] = frozenset()
    max_output_len: int = 0
    seed: int = 0
    text: TextStream = field(default_factory=lambda: TextStream(None))
    counted: Counted = field(default_factory=Counted)

    record: RequestRecord = field(default_factory=lambda: RequestRecord(0, 0.0))
    output_token_ids: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    length: int = 0

    @property
    def num_remaining(self) -> int:
        """Tokens that the output may still grow by."""
        return self.max_output_len - len(self.output_token_ids)

    def move_to(self, state: RequestState) -> None:
        """Enter the next state of the life cycle."""
        assert state in NEXT_STATES[self.state], f"{self.state} -> {state}"
        self.state = state


@dataclass(frozen=True)
class RequestOutput:
    """The answer so far; nothing in it is taken back later.

    token_ids: a stop id that ended the output is in it, the tokens of a stop string are not, unless
    they were to be kept.  text: decoded token_ids, without the stop, special tokens and an
    unfinished last character.  finish_reason: "stop", "length" or None while running.  stop_reason:
    the id or string that stopped it.  metrics: the request's own record, which goes on counting.
    logprobs: one entry per token id, None unless asked for.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    metrics: RequestRecord
    logprobs: list[TokenLogprobs] | None = None

    @classmethod
    def of(cls, request: Request) -> RequestOutput:
        """Return the request's answer; while it runs, only what no stop string can take back."""
        text, num_tokens = request.text.text, None
        if request.finish_reason is None:
            text, num_tokens = request.text.settled()
        return cls(
            request.request_id,
            request.prompt_token_ids,
            request.output_token_ids[:num_tokens],
            text,
            request.finish_reason,
            request.stop_reason,
            request.record,
            None if request.params.logprobs is None else request.output_logprobs[:num_tokens],
        )


@dataclass(eq=False)
class Slot:
    """One row of the KV cache and who holds it.

    kv_length, draft_length: leading rows of the target's and of the drafter's cache that hold
    committed tokens.  last: whose tokens, while they are not the request's: those of the last
    holder stay until the next one has looked them through, which clears `is_fresh`.  released: the
    order in which slots became free.
    """

    index: int
    request: Request | None = None
    kv_length: int = 0
    draft_length: int = 0
    last: Request | None = None
    is_fresh: bool = False
    released: int = 0

    def begin(self, kv_length: int, draft_length: int) -> None:
        """Start on the request with this many rows of its prompt in place."""
        self.kv_length, self.draft_length = kv_length, draft_length
        self.last, self.is_fresh = None, False

    def cached_ids(self) -> list[int]:
        """Return the token ids of the rows in the target's cache."""
        owner = self.last or self.request
        if owner is None:
            return []
        return (owner.prompt_token_ids + owner.output_token_ids)[: self.kv_length]


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many leading items are equal."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Scheduler:
    """First come, first served: waiting requests take free slots and keep them until they end."""

    def __init__(self, num_slots: int) -> None:
        """Start with `num_slots` free slots and nobody waiting."""
        self.waiting: deque[Request] = deque()
        self.slots = [Slot(index) for index in range(num_slots)]
        # Slots in the order in which their requests arrived.
        self._held: list[Slot] = []
        self._num_released = 0

    @property
    def has_work(self) -> bool:
        """True while a request waits or holds a slot."""
        return bool(self.waiting or self._held)

    def holds(self, request_id: str) -> bool:
        """Return whether a request of this id waits or holds a slot."""
        return any(r.request_id == request_id for r in self.waiting) or any(
            s.request is not None and s.request.request_id == request_id for s in self._held
        )

    def fill_slots(self, now_s: float) -> None:
        """Hand free slots to waiting requests: the one that holds most of the prompt, else the one
        that is free for longest."""
        free = [slot for slot in self.slots if slot.request is None]
        while free and self.waiting:
            request = self.waiting.popleft()
            prompt = request.prompt_token_ids
            shared = {slot.index: common_length(prompt, slot.cached_ids()) for slot in free}
            slot = max(free, key=lambda one: (shared[one.index], -one.released))
            request.move_to(RequestState.PREFILL)
            request.record.admitted_s = now_s
            slot.request, slot.is_fresh = request, True
            self._held.append(slot)
            free.remove(slot)

    def in_state(self, state: RequestState) -> list[tuple[Slot, Request]]:
        """Return the slots whose request is in `state`, earliest arrival first."""
        return [(s, s.request) for s in self._held if s.request and s.request.state is state]

    def release(self, slot: Slot, state: RequestState) -> None:
        """Free a slot; its request ends in `state`."""
        assert slot.request is not None
        slot.request.move_to(state)
        if not slot.is_fresh:
            slot.last = slot.request
        self._num_released += 1
        slot.request, slot.is_fresh, slot.released = None, False, self._num_released
        self._held.remove(slot)

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; return whether there was one."""
        for slot in self._held:
            if slot.request is not None and slot.request.request_id == request_id:
                self.release(slot, RequestState.ABORTED)
                return True
        for request in self.waiting:
            if request.request_id == request_id:
                request.move_to(RequestState.ABORTED)
                self.waiting.remove(request)
                return True
        return False

    def abort_all(self) -> None:
        """Drop every request."""
        while self._held:
            self.release(self._held[0], RequestState.ABORTED)
        while self.waiting:
            self.waiting.popleft().move_to(RequestState.ABORTED)
