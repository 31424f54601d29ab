# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a prompt's own tokens, for `echo` with `logprobs`: what evaluations read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from treespark.tree.policy import ordered_topk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treespark.serving.engine import Engine

# Rows whose logits over the whole vocabulary are in memory at once.
_ROWS = 64


class PromptLogprobs(NamedTuple):
    """A token, its log-probability, and the best tokens at its place, equal ones by id.

    logprob: None for the first token, which nothing predicts.
    """

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]]


@torch.inference_mode()
def prompt_logprobs(engine: Engine, prompt: Sequence[int], num_top: int) -> list[PromptLogprobs]:
    """Return one entry per prompt token.

    Each is the target's raw log-softmax in float32 at the place before. To be called between two
    steps of the engine: it is one forward of the whole prompt, without a cache.
    """
    target, ids = engine.target, torch.tensor([list(prompt)])
    _, hidden = target.sequence_outputs(ids, [len(prompt)])
    entries = [PromptLogprobs(prompt[0], None, [])]
    for start in range(0, len(prompt) - 1, _ROWS):
        following = torch.tensor(prompt[start + 1 : start + 1 + _ROWS], device=hidden.device)
        rows = hidden[0, start : start + len(following)]
        logprobs = target.logits(rows).log_softmax(-1)
        own = logprobs.gather(1, following[:, None])[:, 0].tolist()
        values, tokens = (part.tolist() for part in ordered_topk(logprobs, num_top))
        for i, token in enumerate(following.tolist()):
            best = list(zip(tokens[i], values[i], strict=True))
            entries.append(PromptLogprobs(token, own[i], best))
    return entries
