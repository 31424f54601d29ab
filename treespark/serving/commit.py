# SPDX-License-Identifier: Apache-2.0
"""The one place where tokens become output.

`commit` alone writes a request's ids, log-probabilities, text, finish reason, counts and logical
length. It walks the tokens of a round one by one, so a stop in the middle of an accepted path ends
the request exactly where one-token decoding would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from treespark.serving.records import RoundRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treespark.serving.records import TokenLogprobs
    from treespark.serving.scheduler import Request


class Proposal(NamedTuple):
    """What one round offered one request: accepted draft tokens, tree nodes, deepest node.

    plain_decoding: why it offered none, if that is not just this round's end of the output; see
    `RequestRecord`.
    """

    num_accepted: int
    num_nodes: int
    depth: int
    plain_decoding: str | None = None


def commit(
    request: Request,
    tokens: Sequence[int],
    proposal: Proposal | None,
    now_s: float,
    logprobs: Sequence[TokenLogprobs] | None = None,
) -> None:
    """Append `tokens` until one of them ends the request; everything behind that one is dropped.

    tokens: the accepted path and its bonus token, or the token that prefill yields (`proposal`
    None, which belongs to no round). A stop id ends the output and stays in it; a stop string ends
    it and is cut from text, ids, log-probabilities and counts alike; the output limit is never
    exceeded. logprobs: one entry per token if the request asks for them.
    Source: acceptance accounting of TreeSpark E.2, cut at the first stop and at the token limit.
    """
    assert request.finish_reason is None, "commit to a finished request"
    assert (logprobs is None) == (request.params.logprobs is None), "logprobs as asked for"
    num_walked = _walk(request, tokens)
    request.output_logprobs += (logprobs or ())[:num_walked]
    record = request.record
    if record.first_token_s is None:
        record.first_token_s = now_s
    if proposal is None:
        record.num_prefill_tokens = num_walked
    else:
        record.rounds.append(_round(request, num_walked, proposal))
        record.plain_decoding = proposal.plain_decoding
    if request.finish_reason is None:
        request.length = len(request.prompt_token_ids) + len(request.output_token_ids) - 1
        return
    record.finished_s = now_s
    if isinstance(request.stop_reason, str):
        _cut_to_text(request)


def _walk(request: Request, tokens: Sequence[int]) -> int:
    """Append tokens up to the first that ends the request; return how many were appended."""
    output, text = request.output_token_ids, request.text
    for num_walked, token in enumerate(tokens, start=1):
        output.append(token)
        may_stop = len(output) > request.params.min_tokens
        if token in request.stop_ids:
            if request.params.include_stop_str_in_output:
                stop = text.push(token, may_stop) or text.flush(output, may_stop)
            else:
                stop = text.flush(output[:-1], may_stop)
            request.finish_reason = "stop"
            request.stop_reason = token if stop is None else stop
            return num_walked
        stop = text.push(token, may_stop)
        is_full = len(output) == request.max_output_len
        if stop is None and is_full:
            stop = text.flush(output, may_stop)
        if stop is not None or is_full:
            request.finish_reason = "length" if stop is None else "stop"
            request.stop_reason = stop
            return num_walked
    return len(tokens)


def _round(request: Request, num_walked: int, proposal: Proposal) -> RoundRecord:
    """Counts of a round that appended `num_walked` tokens."""
    is_cut_inside_path = request.finish_reason == "stop" and num_walked <= proposal.num_accepted
    return RoundRecord(
        num_committed=num_walked,
        num_accepted=min(proposal.num_accepted, num_walked),
        num_proposed=proposal.num_nodes,
        proposed_depth=min(proposal.depth, num_walked) if is_cut_inside_path else proposal.depth,
    )


def _cut_to_text(request: Request) -> None:
    """Take back the tokens behind the text, from the newest round to the oldest."""
    num_kept = request.text.num_tokens()
    num_dropped = len(request.output_token_ids) - num_kept
    del request.output_token_ids[num_kept:], request.output_logprobs[num_kept:]
    for record in reversed(request.record.rounds):
        num_taken = min(num_dropped, record.num_committed)
        record.num_committed -= num_taken
        record.num_accepted = min(record.num_accepted, record.num_committed)
        num_dropped -= num_taken
    request.record.num_prefill_tokens -= num_dropped
