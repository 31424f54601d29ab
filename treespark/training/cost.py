# SPDX-License-Identifier: Apache-2.0
"""What a recipe costs by arithmetic on shapes: FLOPs of a row, memory, bytes of a feature store.

FLOPs count a multiply-add as two, and matrix products alone. Memory is what this package's own code
holds at its peak, by part; allocator overhead comes on top. Shapes: S tokens of a row, A anchors, B
draft depths, V vocabulary, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from treespark.data.feature_rows import RowLayout
from treespark.drafter.attention import MAX_SCORES
from treespark.drafter.auto import DRAFTERS
from treespark.training.row_blocks import block_rows

if TYPE_CHECKING:
    from treespark.drafter.config import DrafterConfig
    from treespark.recipe import LossWeights, Recipe

# Tokens that a round of decoding held-out prompts adds while a drafter is still being trained.
_TOKENS_A_ROUND = 1.5


@dataclass(frozen=True)
class Workload:
    """Rows of the training data, their mean length in tokens, and that of the prompt in them."""

    rows: int
    mean_tokens: float
    mean_prompt_tokens: float = 1.0


@dataclass(frozen=True)
class Shapes:
    """Sizes that the arithmetic needs, from the recipe and the target's config."""

    config: DrafterConfig
    trainable: int
    frozen: int
    target_parameters: int
    target_layers: int
    target_width: int

    @classmethod
    def of(cls, target: Any, config: DrafterConfig) -> Shapes:
        """Count parameters on models without storage.  target: a transformers config."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            drafter = DRAFTERS[type(config)](config)
            model = AutoModelForCausalLM.from_config(target)
        sizes = [(p.numel(), p.requires_grad) for p in drafter.parameters()]
        tied = bool(getattr(target, "tie_word_embeddings", False))
        heads = target.num_attention_heads
        head_dim = getattr(target, "head_dim", None) or target.hidden_size // heads
        return cls(
            config,
            sum(size for size, trained in sizes if trained),
            sum(size for size, trained in sizes if not trained) // (2 if tied else 1),
            sum(p.numel() for p in model.parameters()),
            target.num_hidden_layers,
            heads * head_dim,
        )


def flops_per_row(
    shapes: Shapes,
    recipe: Recipe,
    tokens: float,
    online: float = 1.0,
    *,
    plans_apart: bool = False,
) -> dict[str, float]:
    """Return the FLOPs of one row by part, as a mean over the run's mixes of losses.

    online: share of the rows that the target computes.  plans_apart: a step has several
    micro-batches, whose trees are planned in a pass of their own before.
    """
    parts = {"trunk": 0.0, "losses": 0.0, "replay": 0.0}
    for share, weights in _mixes(recipe):
        grows = _grows(recipe, weights)
        parts["trunk"] += share * _trunk(shapes, recipe, tokens, once_more=grows and plans_apart)
        parts["losses"] += share * _losses(shapes, recipe, tokens, weights)
        parts["replay"] += share * _replay(shapes, recipe, weights, plans_apart)
    if recipe.data.features != "store":
        scores = 2 * tokens * tokens * shapes.target_width * shapes.target_layers
        parts["target"] = online * (2 * shapes.target_parameters * tokens + scores)
    return {name: float(value) for name, value in parts.items()}


def _trunk(shapes: Shapes, recipe: Recipe, tokens: float, *, once_more: bool) -> float:
    """The drafter's pass over the blocks of a row and its gradients; once_more: a pass alone."""
    c = shapes.config
    drafts = recipe.data.num_anchors * c.block_size
    width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    rows = c.attention_input_size
    layer = rows * (width + 2 * kv_width) + c.hidden_size * (width + 3 * c.intermediate_size)
    fuse = 2 * tokens * c.feature_size * c.hidden_size
    context = c.num_hidden_layers * 4 * tokens * rows * kv_width
    # Every block is scored against the whole row; the mask comes after.
    attention = c.num_hidden_layers * 4 * drafts * (tokens + c.block_size) * width
    once = context + c.num_hidden_layers * 2 * drafts * layer + attention
    # Too many scores to keep are computed again for the gradients.
    again = attention if _num_scores(shapes, recipe, tokens) > MAX_SCORES else 0
    return 2 * fuse + 3 * once + again + once_more * (fuse + once)


def _num_scores(shapes: Shapes, recipe: Recipe, tokens: float) -> float:
    """Attention scores of a row that are computed at a time."""
    c = shapes.config
    # An eagle3 drafter goes through its depths one by one.
    slots = 1 if recipe.drafter.architecture == "eagle3" else c.block_size
    return recipe.data.num_anchors * slots * c.num_attention_heads * (tokens + c.block_size)


def _losses(shapes: Shapes, recipe: Recipe, tokens: float, weights: LossWeights) -> float:
    """Products over the vocabulary of all losses on blocks."""
    c, again = shapes.config, not recipe.train.keep_logits
    drafts = recipe.data.num_anchors * c.block_size
    head = 2 * drafts * c.hidden_size * c.vocab_size
    markov = 2 * drafts * recipe.drafter.markov_rank * c.vocab_size
    teacher = 2 * min(drafts, tokens) * c.hidden_size * c.vocab_size
    compares, soft = _compares(recipe, weights), bool(weights.soft_ce)
    plain = not soft or _grows(recipe, weights) or compares or bool(weights.ce)
    # The head is frozen: forward and the gradient of its input, and once more where recomputed. The
    # bias is added twice, whatever is kept, and both of its factors have gradients.
    of_drafts = (2 + again) * head + 4 * markov
    return (plain + soft) * of_drafts + (compares + soft) * (1 + again) * teacher


def _replay(shapes: Shapes, recipe: Recipe, weights: LossWeights, plans_apart: bool) -> float:
    """Products over the vocabulary of the tree losses."""
    if not _grows(recipe, weights):
        return 0.0
    c, policy, again = shapes.config, recipe.policy, not recipe.train.keep_logits
    trees, frontier = recipe.data.tree_anchors, policy.frontier or policy.branching
    parents = trees * (1 + (policy.depth - 1) * frontier)
    bias = 2 * parents * recipe.drafter.markov_rank * c.vocab_size
    head = 2 * trees * policy.depth * c.hidden_size * c.vocab_size
    # Base logits are those of the losses, which a plan made before does not have yet.
    base = int(plans_apart)
    # The teacher's: once, unless the losses have kept them.
    teacher = int(again or plans_apart or not _compares(recipe, weights))
    # The bias: planned, computed anew, and two products backwards.
    return 4 * bias + (base + teacher) * head


def decoding_flops(shapes: Shapes, recipe: Recipe, prompt_tokens: float) -> float:
    """Return the FLOPs of decoding held-out prompts once, at `train.decode_every`.

    An upper bound as long as a round adds at least 1.5 tokens.
    """
    c, train = shapes.config, recipe.train
    rounds = train.decode_tokens / _TOKENS_A_ROUND
    head = c.vocab_size * (c.hidden_size + recipe.drafter.markov_rank)
    draft = 2 * c.block_size * (shapes.trainable + head)
    verify = 2 * shapes.target_parameters * (recipe.policy.budget + 1)
    prompts = train.decode_prompts or recipe.data.holdout_rows
    return prompts * (2 * shapes.target_parameters * prompt_tokens + rounds * (draft + verify))


def _mixes(recipe: Recipe) -> list[tuple[float, LossWeights]]:
    """The loss weights of the run, those of a warm-up among them, and their shares of its steps."""
    losses, warmup = recipe.losses, recipe.losses.warmup
    if warmup is None:
        return [(1.0, losses)]
    return [(warmup.fraction, warmup), (1 - warmup.fraction, losses)]


def _grows(recipe: Recipe, weights: LossWeights) -> bool:
    """Whether these losses replay trees."""
    return bool((weights.survival or weights.coverage) and recipe.data.tree_anchors)


def _compares(recipe: Recipe, weights: LossWeights) -> bool:
    """Whether these losses compare the blocks with the target's distributions."""
    confidence = weights.confidence and recipe.drafter.enable_confidence_head
    return bool(weights.l1 or confidence)


def memory(
    shapes: Shapes, recipe: Recipe, tokens: int, *, stage: int, devices: int, micro_batch: int
) -> dict[str, float]:
    """Return the bytes of one device by part, for rows of `tokens` tokens."""
    c, data, train = shapes.config, recipe.data, recipe.train
    size = 2 if train.dtype == "bfloat16" else 4
    states = 2 if size == 2 else 1
    share = {0: (1, 1, 1), 1: (1, 1, devices), 2: (1, devices, devices), 3: (devices,) * 3}[stage]
    weights, gradients, optimizer = (shapes.trainable / part for part in share)
    drafts, anchors = data.num_anchors * c.block_size, data.num_anchors
    width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    # Kept for the backward pass: inputs and outputs of norms, projections, gate and product.
    extra = c.attention_input_size - c.hidden_size
    per_draft = 6 * c.hidden_size + 2 * extra + 4 * (width + kv_width + c.intermediate_size)
    per_token = c.feature_size + 2 * c.hidden_size + c.num_hidden_layers * 6 * kv_width
    activations = c.num_hidden_layers * drafts * per_draft + tokens * per_token
    scores = _num_scores(shapes, recipe, tokens)
    # Kept, those of each step of an eagle3 drafter, too.
    steps = c.block_size if recipe.drafter.architecture == "eagle3" else 1
    scores = scores * steps if scores <= MAX_SCORES else MAX_SCORES
    rows = min(micro_batch * drafts, block_rows(micro_batch * drafts, train.keep_logits))
    # Base (later its gradient) and teacher of a block, and two float32 buffers of a chunk.
    block = c.vocab_size * (rows * 2 * size + min(train.chunk_rows, rows) * 2 * 4)
    mixes = [weights for _, weights in _mixes(recipe)]
    trees = data.tree_anchors * any(_grows(recipe, weights) for weights in mixes)
    has_teacher = any(_compares(recipe, weights) or weights.soft_ce for weights in mixes)
    kept = (drafts + has_teacher * min(drafts, tokens)) * c.vocab_size * size
    # Of the anchors with trees while they are planned: their logits once more, where kept the
    # target's, too, and of the parents of one depth logits, softmax and what choosing needs.
    frontier = recipe.policy.frontier or recipe.policy.branching
    planned = (1 + train.keep_logits) * c.block_size * size + 3 * frontier * 4
    replay = micro_batch * trees * planned * c.vocab_size
    held = -(-train.global_batch // (devices * micro_batch)) * micro_batch
    parts = {
        "target": shapes.target_parameters * 2.0 if data.features != "store" else 0.0,
        "embedding and head": 0.0 if data.features != "store" else shapes.frozen * 2.0,
        "weights": weights * size,
        "gradients": gradients * (size + (4 if states == 2 else 0)),
        "optimizer": optimizer * (12 if states == 2 else 8),
        "features of a step": held * tokens * (c.feature_size + c.hidden_size) * size,
        "activations": micro_batch * (activations * size + anchors * (tokens + 7) * 4),
        "attention scores": 2.0 * scores * 4,
        "losses": block + micro_batch * kept * train.keep_logits,
        "replay": replay,
    }
    return {name: float(value) for name, value in parts.items()}


def store_bytes(shapes: Shapes, recipe: Recipe, workload: Workload) -> int:
    """Bytes of a feature store of all rows, as the store itself counts them.

    target.dtype auto counts as bfloat16, which it is on accelerators.
    """
    name = "bfloat16" if recipe.target.dtype == "auto" else recipe.target.dtype
    config, data = shapes.config, recipe.data
    taps = len(config.target_layer_ids)
    layout = RowLayout(taps, config.hidden_size, getattr(torch, name), data.taps_dtype)
    return round(
        workload.rows * layout.num_bytes(workload.mean_tokens, workload.mean_prompt_tokens)
    )
