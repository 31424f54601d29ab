# SPDX-License-Identifier: Apache-2.0
"""A tiny target and a drafter that has learnt its answers by heart, in seconds.

So the drafts reach far with the right layers, layout and mask token, and nowhere with others: what
a random target says cannot be guessed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy, pad

from tests.serving_world import TEXT_VOCAB, drafter, world
from treespark.bench.doctor import target_answers
from treespark.bench.views import view
from treespark.target.template import render_prompt

if TYPE_CHECKING:
    from pathlib import Path

    from treespark.drafter.modeling import TreeSparkDrafter
    from treespark.target.model import TargetModel

QUESTIONS = ("What is 17 + 25?", "Name three fruits.", "Write a loop.")
# The first unused id, as drafters of real targets have it.
MASK = 258
TAPS, DEPTH, STEPS, TOKENS = [1], 4, 90, 24


def target() -> TargetModel:
    """A random target with a tokenizer of one token per byte, and answers that go on."""
    return world(vocab=TEXT_VOCAB, eos=271, seed=3).target


def questions(path: Path) -> Path:
    """Write the prompts whose answers are learnt."""
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    return path


def learned() -> TreeSparkDrafter:
    """A drafter that knows the target's answers to the questions."""
    model = target()
    asked = [(str(i), render_prompt(model.tokenizer, text)) for i, text in enumerate(QUESTIONS)]
    rows = target_answers(model, asked, TOKENS)
    views = view(model, rows, TAPS)
    made = drafter(
        model,
        num_hidden_layers=1,
        block_size=DEPTH,
        target_layer_ids=TAPS,
        mask_token_id=MASK,
        markov_rank=0,
        enable_confidence_head=False,
        confidence_head_with_markov=False,
        initializer_range=0.1,
        target_fingerprint=model.fingerprint,
    ).train()
    weights = [p for p in made.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=1e-2)
    for step in range(STEPS):
        row = rows[step % len(rows)]
        tokens = torch.from_numpy(row.token_ids)
        anchors = torch.arange(row.prompt_len, len(tokens) - 1)[None]
        keep = torch.ones_like(anchors, dtype=torch.bool)
        hidden = made.training_blocks(tokens[None], views([row], TAPS), anchors, keep)
        index = anchors[0][:, None] + torch.arange(1, DEPTH + 1)
        wanted = pad(tokens, (0, DEPTH), value=-100)[index]
        optimizer.zero_grad()
        loss = cross_entropy(made.base_logits(hidden)[0].flatten(0, 1), wanted.flatten())
        loss.backward()
        optimizer.step()
    return made.eval()
