# SPDX-License-Identifier: Apache-2.0
"""`treespark plan`: what a recipe costs in parameters, time, memory and disk, before it runs.

Everything here is arithmetic on shapes. FLOPs count a multiply-add as two. Memory is what this
package's own code holds at its peak, by part; allocator overhead comes on top, so `fits` leaves a
tenth free. Shapes: S tokens of a row, A anchors, B draft depths, V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from treespark.data.batches import load_rows
from treespark.data.feature_rows import RowLayout
from treespark.drafter.attention import MAX_SCORES
from treespark.drafter.auto import DRAFTERS
from treespark.errors import UsageError
from treespark.sizes import readable
from treespark.target.checks import check_config
from treespark.target.folder import load_config
from treespark.training import setup
from treespark.training.row_blocks import block_rows

if TYPE_CHECKING:
    from treespark.drafter.config import DrafterConfig
    from treespark.recipe import LossWeights, Recipe

GIB = 1 << 30
# Part of the memory that a plan may use; the rest is the allocator's.
_USABLE = 0.9
_STAGES = (1, 2, 3)


@dataclass(frozen=True)
class Machine:
    """What the run may use.  memory_bytes: of one device.  peak_flops: of one device, bfloat16.

    mfu: part of the peak that training reaches.  disk_bytes: for the feature store.
    """

    devices: int
    memory_bytes: int
    peak_flops: float
    mfu: float
    disk_bytes: int


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
    shapes: Shapes, recipe: Recipe, tokens: float, online: float = 1.0
) -> dict[str, float]:
    """Return the FLOPs of one row by part.  online: share of the rows that the target computes."""
    c, data = shapes.config, recipe.data
    drafts = data.num_anchors * c.block_size
    width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    rows = c.attention_input_size
    layer = rows * (width + 2 * kv_width) + c.hidden_size * (width + 3 * c.intermediate_size)
    fuse = 2 * tokens * c.feature_size * c.hidden_size
    context = c.num_hidden_layers * 4 * tokens * rows * kv_width
    # Every block is scored against the whole row; the mask comes after.
    attention = c.num_hidden_layers * 4 * drafts * (tokens + c.block_size) * width
    trunk = 2 * fuse + 3 * (context + c.num_hidden_layers * 2 * drafts * layer + attention)
    head = 2 * drafts * c.hidden_size * c.vocab_size
    markov = 2 * drafts * recipe.drafter.markov_rank * c.vocab_size
    teacher = 2 * _teacher_rows(recipe, drafts, tokens) * c.hidden_size * c.vocab_size
    again = 1 - recipe.train.keep_logits
    # The head is frozen: forward and the gradient of its input, and once more where recomputed.
    losses = (2 + again) * head + (3 + again) * markov + (1 + again) * teacher
    policy = recipe.policy
    frontier = policy.frontier or policy.branching
    parents = _tree_anchors(recipe) * (1 + (policy.depth - 1) * frontier)
    # Planned, computed anew, and two products backwards; the teacher once more where not kept.
    replay = 4 * 2 * parents * recipe.drafter.markov_rank * c.vocab_size
    replay += again * 2 * _tree_anchors(recipe) * c.block_size * c.hidden_size * c.vocab_size
    parts = {"trunk": trunk, "losses": losses, "replay": replay}
    if data.features != "store":
        scores = 2 * tokens * tokens * shapes.target_width * shapes.target_layers
        parts["target"] = online * (2 * shapes.target_parameters * tokens + scores)
    return {name: float(value) for name, value in parts.items()}


def _mixes(recipe: Recipe) -> list[LossWeights]:
    """The loss weights of the run, those of a warm-up among them."""
    return [part for part in (recipe.losses, recipe.losses.warmup) if part is not None]


def _tree_anchors(recipe: Recipe) -> int:
    """Anchors of a row whose trees are replayed."""
    used = any(part.survival or part.coverage for part in _mixes(recipe))
    return recipe.data.tree_anchors if used else 0


def _teacher_rows(recipe: Recipe, drafts: int, tokens: int) -> int:
    """Positions of a row whose target distributions are computed."""
    with_confidence = recipe.drafter.enable_confidence_head
    used = any(
        part.l1 or part.soft_ce or (part.confidence and with_confidence) for part in _mixes(recipe)
    )
    return min(drafts, tokens) if used else 0


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
    # An eagle3 drafter goes through its depths one by one, and keeps the scores of each.
    steps = c.block_size if recipe.drafter.architecture == "eagle3" else 1
    scores = drafts // steps * c.num_attention_heads * (tokens + c.block_size)
    scores = scores * steps if scores <= MAX_SCORES else MAX_SCORES
    rows = min(micro_batch * drafts, block_rows(micro_batch * drafts, train.keep_logits))
    # Base (later its gradient) and teacher of a block, and two float32 buffers of a chunk.
    block = c.vocab_size * (rows * 2 * size + min(train.chunk_rows, rows) * 2 * 4)
    kept = (drafts + _teacher_rows(recipe, drafts, tokens)) * c.vocab_size * size
    # Of the anchors with trees while they are planned: their logits once more, where kept the
    # target's, too, and of the parents of one depth logits, softmax and what choosing needs.
    frontier = recipe.policy.frontier or recipe.policy.branching
    planned = (1 + train.keep_logits) * c.block_size * size + 3 * frontier * 4
    replay = micro_batch * _tree_anchors(recipe) * planned * c.vocab_size
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


def choose(shapes: Shapes, recipe: Recipe, machine: Machine) -> tuple[int, int, dict[str, float]]:
    """Return (zero_stage, micro_batch, memory by part): the largest micro-batch that fits, at the
    lowest stage.

    Rows are as long as data.max_tokens. Raises UsageError where not even one row fits at stage 3.
    """
    per_device = recipe.train.global_batch // machine.devices
    if per_device * machine.devices != recipe.train.global_batch or per_device == 0:
        raise UsageError(
            f"--devices {machine.devices}: cannot share train.global_batch "
            f"{recipe.train.global_batch} evenly"
        )
    sizes = [n for n in range(per_device, 0, -1) if per_device % n == 0]
    for micro in sizes:
        for stage in _STAGES if machine.devices > 1 else (0,):
            parts = memory(
                shapes,
                recipe,
                recipe.data.max_tokens,
                stage=stage,
                devices=machine.devices,
                micro_batch=micro,
            )
            if sum(parts.values()) <= _USABLE * machine.memory_bytes:
                return stage, micro, parts
    need = sum(parts.values()) / _USABLE / GIB
    raise UsageError(
        f"--memory {machine.memory_bytes / GIB:.0f}G: one row of data.max_tokens "
        f"{recipe.data.max_tokens} needs {need:.1f} GiB; shorten it, or lower data.num_anchors"
    )


def plan(recipe: Recipe, shapes: Shapes, machine: Machine, workload: Workload) -> dict[str, Any]:
    """Return the whole plan, JSON-ready: counts, FLOPs, hours, memory and disk by part."""
    stage, micro, parts = choose(shapes, recipe, machine)
    disk, share = _stored(shapes, recipe, workload)
    flops = flops_per_row(shapes, recipe, workload.mean_tokens, 1 - share)
    steps_by_epoch = max(1, workload.rows // recipe.train.global_batch)
    limits = [recipe.train.max_steps, (recipe.train.epochs or 0) * steps_by_epoch]
    steps = min(limit for limit in limits if limit)
    step_flops = sum(flops.values()) * recipe.train.global_batch
    step_s = step_flops / (machine.devices * machine.peak_flops * machine.mfu)
    return {
        "parameters": {"trainable": shapes.trainable, "target": shapes.target_parameters},
        "steps": steps,
        "flops_per_row": flops,
        "step_s": step_s,
        "hours": steps * step_s / 3600,
        "zero_stage": stage,
        "micro_batch": micro,
        "memory": parts,
        "store": {
            "bytes": disk,
            "fits": disk <= machine.disk_bytes,
            "read_bytes_per_s": disk / workload.rows * recipe.train.global_batch / step_s
            if share
            else 0.0,
        },
    }


def _stored(shapes: Shapes, recipe: Recipe, workload: Workload) -> tuple[int, float]:
    """Bytes of the store, of one of all rows where there is none, and the share of rows in it."""
    size, limit = store_bytes(shapes, recipe, workload), recipe.data.store_bytes
    if recipe.data.features == "mixed" and limit is not None:
        return min(size, limit), min(1.0, limit / size)
    return size, float(recipe.data.features == "store")


def run_plan(
    recipe: Recipe,
    machine: Machine,
    rows: int | None,
    mean_tokens: int | None,
    *,
    as_json: bool,
) -> None:
    """Print the plan of a recipe.  rows, mean_tokens: None counts the recipe's data.

    Of the target only config.json is needed. Raises UsageError where neither number nor data is
    there, and as `choose` does.
    """
    check_config(recipe.target.model / "config.json")
    target = load_config(recipe.target.model)
    mask = recipe.drafter.mask_token_id
    # Which token masks makes no difference to the sizes.
    config = setup.drafter_config(recipe, target, 0 if mask is None else mask, None)
    workload = _workload(recipe, config, rows, mean_tokens)
    result = plan(recipe, Shapes.of(target, config), machine, workload)
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        _print(result, machine)


def _workload(
    recipe: Recipe, config: DrafterConfig, rows: int | None, mean_tokens: int | None
) -> Workload:
    if rows is not None and mean_tokens is not None:
        return Workload(rows, mean_tokens)
    missing = [str(path) for path in recipe.data.continuations if not path.is_file()]
    if missing:
        raise UsageError(
            f"data.continuations {missing[0]}: not there yet; give --rows and --mean-tokens"
        )
    found, _ = load_rows(
        recipe.data.continuations,
        max_tokens=recipe.data.max_tokens,
        block_size=config.block_size,
        vocab_size=config.vocab_size,
    )
    if mean_tokens is not None:
        return Workload(len(found), mean_tokens)
    mean = fmean(len(row.token_ids) for row in found)
    prompt = fmean(max(1, row.prompt_len) for row in found)
    return Workload(rows or len(found), mean, prompt)


def _print(result: dict[str, Any], machine: Machine) -> None:
    table = Table(title="per device", title_justify="left")
    table.add_column("memory")
    table.add_column("GiB", justify="right")
    for name, size in result["memory"].items():
        table.add_row(name, f"{size / GIB:.2f}")
    total = sum(result["memory"].values())
    table.add_row("sum", f"{total / GIB:.2f} of {machine.memory_bytes / GIB:.0f}", style="bold")
    counts, store, flops = result["parameters"], result["store"], result["flops_per_row"]
    parts = ", ".join(f"{name} {value / 1e12:.2f}" for name, value in flops.items())
    lines = [
        f"trainable parameters {counts['trainable'] / 1e6:.1f} M, target "
        f"{counts['target'] / 1e9:.2f} B",
        f"TFLOP per row: {parts}",
        f"{result['steps']} steps of {result['step_s']:.2f} s, {result['hours']:.1f} hours: "
        f"{machine.devices} devices, {machine.mfu:.0%} of {machine.peak_flops / 1e12:g} TFLOP/s",
        f"set train.zero_stage={result['zero_stage']} train.micro_batch={result['micro_batch']}",
        f"feature store {readable(store['bytes'])}, "
        + ("fits" if store["fits"] else f"does not fit in {readable(machine.disk_bytes)}"),
    ]
    if store["read_bytes_per_s"]:
        lines.append(f"it is read at {readable(store['read_bytes_per_s'])}/s")
    console = Console(width=max(100, Console().width))
    for line in lines:
        console.print(line, highlight=False)
    console.print(table)
