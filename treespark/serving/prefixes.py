# SPDX-License-Identifier: Apache-2.0
"""A prompt that begins as a cached one does is read from there on only.

What a slot holds stays until its next request overwrites it: the next turn of a conversation, a
repeated prompt and further answers to one prompt find their rows there. A row depends on the ids up
to it and on nothing else, so no answer changes; only the time to the first token does. That tells
whoever measures it that somebody asked the same before, so among strangers leave it off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treespark.serving.scheduler import common_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treespark.serving.scheduler import Request, Slot
    from treespark.target.kv_cache import KVCache

# Fewer rows are not worth a copy, and begin alike by chance or by a chat template.
SHORTEST_PREFIX = 16


def reusable_length(request: Request, slot: Slot, has_context: bool) -> int:
    """Return how many rows of `slot` this request's prompt begins with; 0 for too few.

    At least one prompt token is left to run, as its row gives the first token. has_context: only
    rows that the drafter's cache has, too.
    """
    prompt = request.prompt_token_ids
    length = min(common_length(prompt, slot.cached_ids()), len(prompt) - 1)
    if has_context:
        length = min(length, slot.draft_length)
    return length if length >= SHORTEST_PREFIX else 0


def is_read_ahead(request: Request, ahead: Sequence[Request]) -> bool:
    """Return whether one of `ahead`, whose prefill goes on, has this very prompt: wait for it."""
    prompt = request.prompt_token_ids
    is_worth = len(prompt) > SHORTEST_PREFIX
    return is_worth and any(other.prompt_token_ids == prompt for other in ahead)


def take_prefix(slot: Slot, slots: Sequence[Slot], kv: KVCache, context: Any, drafts: bool) -> int:
    """Begin a slot's new request with the longest beginning that is cached; return its length.

    slots: all of them; `slot` itself may still hold rows of its last request.  context: the
    drafter's cache, if there is one.  drafts: whether the request needs the rows there.
    """
    assert slot.request is not None
    lengths = [reusable_length(slot.request, one, drafts and context is not None) for one in slots]
    length = max(lengths)
    # In place if possible.
    best = slot if lengths[slots.index(slot)] == length else slots[lengths.index(length)]
    draft_length = min(length, best.draft_length)
    if best is not slot:
        kv.copy(best.index, slot.index, length)
        if context is not None:
            context.copy(best.index, slot.index, draft_length)
    slot.begin(length, draft_length)
    return length
