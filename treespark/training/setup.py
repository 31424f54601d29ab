# SPDX-License-Identifier: Apache-2.0
"""From a recipe to the objects a training run needs: drafter, optimizer, schedule, settings,
export.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from typing import TYPE_CHECKING, Any

import torch

from treespark.data.jsonl import check_folder
from treespark.device import rank_device, resolve_dtype
from treespark.drafter.auto import DRAFTERS
from treespark.drafter.config import TreeSparkConfig, default_target_layer_ids
from treespark.drafter.eagle3 import NUM_DEFAULT_TAPS, Eagle3Config
from treespark.drafter.export import check_destination, recover_folder
from treespark.errors import UsageError
from treespark.recipe import LossWeights, Recipe, dump_recipe
from treespark.target.model import TargetModel
from treespark.training import checkpoint
from treespark.training.objective import Objective
from treespark.training.replay import CoverageSettings
from treespark.training.updates import PlainUpdates
from treespark.tree.policy import TreePolicy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from treespark.data.batches import Row
    from treespark.drafter.auto import AnyDrafter
    from treespark.drafter.config import DrafterConfig
    from treespark.training.checkpoint import Checkpoint
    from treespark.training.ranks import Ranks
    from treespark.training.updates import Updates

# Folder of the best drafter so far, beside `drafter`, the last one.
BEST = "best"
# Settings that may change between the parts of one run: they touch its result by rounding at most.
_FREE_TRAIN_KEYS = frozenset(
    {"save_every", "eval_every", "decode_every", "decode_prompts", "decode_tokens"}
    | {"chunk_rows", "keep_logits", "micro_batch", "zero_stage"}
)
# Keys that older checkpoints do not have, and their values in what those trained.
_NEWER_KEYS = {
    "architecture": "block",
    "anchor_predicts_next": True,
    "soft_ce": 0.0,
    "taps_dtype": "plain",
}
# Keys of the recipe's `drafter` that every architecture has, and those of block drafters.
_SHAPE = {
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_hidden_layers",
    "block_size",
}
_BLOCK_ONLY = {
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "anchor_predicts_next",
}


def load_target(recipe: Recipe) -> TargetModel:
    """The recipe's target with its taps set."""
    target = TargetModel.from_pretrained(
        recipe.target.model, dtype=recipe.target.dtype, device=rank_device()
    )
    target.set_taps(_target_layer_ids(recipe, target.num_layers))
    return target


def new_drafter(recipe: Recipe, target: TargetModel, rows: Sequence[Row]) -> AnyDrafter:
    """A freshly initialised drafter in the training dtype that shares the target's embedding and
    head.

    Raises UsageError when the mask token is one the target or the data uses.
    """
    mask = None
    if recipe.drafter.architecture == "block":
        mask = _mask_token_id(recipe, target, rows)
    config = drafter_config(recipe, target.config, mask, target.fingerprint)
    dtype = resolve_dtype(recipe.train.dtype, target.device)
    drafter = DRAFTERS[type(config)].init_from_target(
        config, target.embed_weight, target.head_weight, dtype
    )
    return drafter.train()


def drafter_config(
    recipe: Recipe, target: Any, mask_token_id: int | None, fingerprint: str | None
) -> DrafterConfig:
    """The config of the recipe's drafter.  target: the target's transformers config.

    mask_token_id: of a block drafter.
    """
    section = recipe.drafter
    shared = {
        **section.model_dump(include=_SHAPE),
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_target_layers": target.num_hidden_layers,
        "target_layer_ids": _target_layer_ids(recipe, target.num_hidden_layers),
        "rope_theta": section.rope_theta or _rope_theta(target),
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        "tree": recipe.policy.model_dump(include={"depth", "branching", "budget"}),
        "target_fingerprint": fingerprint,
    }
    if section.architecture == "eagle3":
        return Eagle3Config(**shared, step_loss_decay=math.exp(-1 / recipe.losses.gamma))
    return TreeSparkConfig(
        **shared,
        **section.model_dump(include=_BLOCK_ONLY),
        mask_token_id=mask_token_id,
        num_anchors=recipe.data.num_anchors,
    )


def _target_layer_ids(recipe: Recipe, num_layers: int) -> list[int]:
    section = recipe.drafter
    if section.target_layer_ids is not None:
        return list(section.target_layer_ids)
    is_block = section.architecture == "block"
    count = section.num_hidden_layers if is_block else NUM_DEFAULT_TAPS
    return default_target_layer_ids(num_layers, count)


def _rope_theta(target: Any) -> float:
    parameters = getattr(target, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or target.rope_theta)


def _mask_token_id(recipe: Recipe, target: TargetModel, rows: Sequence[Row]) -> int:
    chosen = recipe.drafter.mask_token_id
    if chosen is None:
        raise UsageError("drafter.mask_token_id: give the id of a token that never occurs in text")
    special = {
        name: getattr(target.tokenizer, f"{name}_token_id", None)
        for name in ("bos", "eos", "pad", "unk")
    }
    for name, value in special.items():
        if chosen == value or (name == "eos" and chosen in target.eos_token_ids):
            raise UsageError(
                f"drafter.mask_token_id {chosen}: it is the target's {name} token; "
                "choose an unused id"
            )
    if not 0 <= chosen < target.vocab_size:
        raise UsageError(f"drafter.mask_token_id {chosen}: allowed 0..{target.vocab_size - 1}")
    for row in rows:
        if (row.token_ids == chosen).any():
            raise UsageError(
                f"drafter.mask_token_id {chosen}: row {row.id} of the training data uses it"
            )
    return chosen


def objective(recipe: Recipe) -> Objective:
    """The recipe's losses without their weights."""
    losses = recipe.losses
    return Objective(
        policy=policy(recipe),
        coverage=CoverageSettings(losses.top_j, losses.margin, losses.cap, losses.gamma),
        confidence_stop_gradient=losses.confidence_stop_gradient,
        chunk_rows=recipe.train.chunk_rows,
        keep_logits=recipe.train.keep_logits,
        grows_trees=recipe.data.tree_anchors > 0,
    )


def policy(recipe: Recipe) -> TreePolicy:
    """The recipe's tree policy."""
    return TreePolicy(**recipe.policy.model_dump())


def check(recipe: Recipe) -> None:
    """Raise UsageError, before anything is loaded, for losses that cannot be trained together and
    for a place that the drafter cannot be written to.
    """
    output, losses = recipe.output.dir, recipe.losses
    check_folder(output, f"output.dir {output}")
    check_destination(output / "drafter")
    if recipe.train.decode_every:
        check_destination(output / BEST)
        _check_drafts_trees(recipe)
    for part in filter(None, (losses, losses.warmup)):
        tree = part.survival or part.coverage
        if tree and (chains := _chain_only(recipe)):
            raise UsageError(
                f"{chains}: drafts chains only; set losses.survival and losses.coverage to 0"
            )
        confidence = part.confidence and recipe.drafter.enable_confidence_head
        plain = part.ce or part.l1 or part.soft_ce or confidence
        if not (plain or (tree and recipe.data.tree_anchors)):
            where = "losses" if part is losses else "losses.warmup"
            raise UsageError(f"{where}: no positive weight of a loss that this recipe computes")


def _chain_only(recipe: Recipe) -> str | None:
    """The key by which the recipe's drafter has no trees."""
    section = recipe.drafter
    if section.architecture == "eagle3":
        return "drafter.architecture eagle3"
    if section.markov_head_type == "rnn" and section.markov_rank:
        return "drafter.markov_head_type rnn"
    return None


def _check_drafts_trees(recipe: Recipe) -> None:
    chains = _chain_only(recipe)
    if chains and recipe.policy.branching > 1:
        raise UsageError(
            f"train.decode_every {recipe.train.decode_every}: {chains} drafts "
            f"chains only; set policy.branching=1, now {recipe.policy.branching}"
        )


def loss_weights(recipe: Recipe, step: int, total_steps: int) -> dict[str, float]:
    """Weight of every term at `step`: the warm-up mix for its fraction of the steps, then the final
    one.
    """
    warmup = recipe.losses.warmup
    section = recipe.losses
    if warmup is not None and step < warmup_steps(recipe, total_steps):
        section = warmup
    weights = {name: getattr(section, name) for name in LossWeights.model_fields}
    if not recipe.drafter.enable_confidence_head:
        weights["confidence"] = 0.0
    return weights


def warmup_steps(recipe: Recipe, total_steps: int) -> int:
    """Steps of a run with the weights of `losses.warmup`; 0 without."""
    warmup = recipe.losses.warmup
    return 0 if warmup is None else math.ceil(warmup.fraction * total_steps)


def total_steps(recipe: Recipe, num_rows: int) -> int:
    """Optimizer steps of the whole run; the rows of a last, smaller batch are drawn in the next
    epoch.
    """
    limits = [recipe.train.max_steps] if recipe.train.max_steps else []
    if recipe.train.epochs:
        limits.append(max(1, recipe.train.epochs * num_rows // recipe.train.global_batch))
    return min(limits)


def updates(recipe: Recipe, drafter: AnyDrafter, ranks: Ranks) -> Updates:
    """The optimizer: `train.zero_stage` 0 is the plain one, 1-3 DeepSpeed's.

    Raises UsageError where the step cannot be shared evenly among the ranks.
    """
    train = recipe.train
    per_round = train.micro_batch * ranks.world_size
    if train.global_batch % per_round:
        raise UsageError(
            f"train.global_batch {train.global_batch}: must be a multiple of train.micro_batch x "
            f"processes = {train.micro_batch} x {ranks.world_size}"
        )
    count = train.global_batch // per_round
    stage = train.zero_stage
    if stage is None:
        stage = 0 if ranks.world_size == 1 else 1
    if stage == 0:
        return PlainUpdates(drafter, recipe.optim, ranks, count)
    if "RANK" not in os.environ:
        raise UsageError(
            f"train.zero_stage {stage}: DeepSpeed needs processes started by torchrun "
            "(launch/train_910b.sh); without, set train.zero_stage=0"
        )
    from treespark.training.zero import ZeroUpdates

    return ZeroUpdates(
        drafter, recipe.optim, ranks, count, stage=stage, micro_batch=train.micro_batch
    )


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Linear warmup to the peak, then cosine to zero; never above the peak."""
    warmup = max(1, round(recipe.optim.warmup_ratio * steps))
    if step < warmup:
        factor = (step + 1) / warmup
    else:
        factor = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    return recipe.optim.lr * factor


def settings(recipe: Recipe, target: TargetModel, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that decides a run's result, flat; a checkpoint continues only under equal
    settings.
    """
    dumped = recipe.model_dump(mode="json", exclude={"output": True, "target": {"model"}})
    for key in _FREE_TRAIN_KEYS:
        dumped["train"].pop(key)
    for key in ("continuations", "store", "store_bytes", "features"):
        dumped["data"].pop(key)
    losses = dumped["losses"]
    for section in (dumped["drafter"], dumped["data"], losses, losses["warmup"] or {}):
        for key in [k for k, old in _NEWER_KEYS.items() if section.get(k) == old]:
            section.pop(key)
    flat = {
        f"{section}.{key}": value
        for section, values in dumped.items()
        for key, value in values.items()
    }
    content = hashlib.sha256()
    for row in rows:
        content.update(f"{row.prompt_len} {len(row.token_ids)} ".encode() + row.token_ids.tobytes())
    flat["data.continuations (sha256)"] = content.hexdigest()
    return {**flat, "target.fingerprint": target.fingerprint}


@contextlib.contextmanager
def output_folder(recipe: Recipe, ranks: Ranks) -> Iterator[None]:
    """Hold the run's folder for its processes; raises UsageError where it is not free for them."""
    with checkpoint.claim(recipe.output.dir) if ranks.is_first else contextlib.nullcontext():
        if ranks.is_first:
            recover_folder(recipe.output.dir / "drafter")
        yield


def start(output: Path, run_settings: dict[str, Any], resume: str) -> Checkpoint | None:
    """The checkpoint to go on from, if any."""
    if resume not in ("auto", "never"):
        raise UsageError(f"--resume {resume}: allowed auto, never")
    if resume == "never" and checkpoint.saved_steps(output):
        raise UsageError(
            f"--resume never: {output} holds a run; delete it or choose another output.dir"
        )
    return checkpoint.load_latest(output, settings=run_settings)


def export(recipe: Recipe, drafter: AnyDrafter, folder: Path) -> Path:
    """Write the trained drafter as a loadable bfloat16 folder with its recipe; return it."""
    drafter.save_pretrained(folder, dtype=torch.bfloat16)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe, folder))
    return folder
