# SPDX-License-Identifier: Apache-2.0
"""Recipes: YAML files that become one typed, frozen object, with the place of every mistake named.

A recipe holds differences from the defaults below. `extends: base.yaml` takes another recipe's
values first, which may extend a third one; `--set a.b=c` replaces single values last. Paths in a
file are relative to that file, paths given with `--set` are relative to the current folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, model_validator

from treespark.errors import UsageError
from treespark.sections import ConflictError, Section, map_paths, resolve_paths, validate
from treespark.sizes import parse_bytes
from treespark.yaml_source import Key, Origins, absolute, merge, parse_override, read_mapping

if TYPE_CHECKING:
    from collections.abc import Sequence

_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _full_dtype_name(value: Any) -> Any:
    return _DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value


def _bytes(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


TargetDtype = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"], BeforeValidator(_full_dtype_name)
]
TrainDtype = Annotated[Literal["bfloat16", "float32"], BeforeValidator(_full_dtype_name)]
# Upper bounds are beyond any real use: a number with too many zeros should not end in an
# allocation or a week of work.
Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
BatchSize = Annotated[int, Field(ge=1, le=65536)]
Weight = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
ByteSize = Annotated[int, Field(ge=1, le=2**60), BeforeValidator(_bytes)]


class TargetSection(Section):
    """The verified model: a Hugging Face folder and the dtype it runs in."""

    model: Path
    dtype: TargetDtype = "auto"


class DrafterSection(Section):
    """Shape of the drafter. The four widths depend on the target and have no default.

    architecture: `block` drafts all depths in one pass (DFlash, DSpark, TreeSpark); `eagle3` drafts
    token by token, `block_size` of them.
    """

    architecture: Literal["block", "eagle3"] = "block"
    num_attention_heads: Annotated[int, Field(ge=1, le=1024)]
    num_key_value_heads: Annotated[int, Field(ge=1, le=1024)]
    head_dim: Annotated[int, Field(ge=2, le=4096, multiple_of=2)]
    intermediate_size: Annotated[int, Field(ge=1, le=1_000_000)]
    # Defaults from here on: the published 4B recipe (algorithms.md 1.1, 1.7).
    num_hidden_layers: Annotated[int, Field(ge=1, le=64)] = 5
    block_size: Annotated[int, Field(ge=1, le=64)] = 7
    markov_rank: Annotated[int, Field(ge=0, le=65536)] = 256
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    # False: the in-place layout of z-lab's DFlash (algorithms.md 1.2).
    anchor_predicts_next: bool = True
    target_layer_ids: tuple[Annotated[int, Field(ge=0, le=1000)], ...] | None = Field(
        None, min_length=1
    )
    mask_token_id: CountOrZero | None = None
    rope_theta: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _check_heads(self) -> DrafterSection:
        self._check_multiple("num_attention_heads", of="num_key_value_heads")
        return self


class PolicySection(Section):
    """The tree policy, for replay in training and for serving. `frontier` None is `branching`."""

    depth: Annotated[int, Field(ge=1, le=64)] = 7
    branching: Annotated[int, Field(ge=1, le=64)] = 4
    budget: Annotated[int, Field(ge=0, le=1024)] = 32
    frontier: Annotated[int, Field(ge=1, le=64)] | None = None


class DataSection(Section):
    """Continuations to train on, and how many anchors of each sequence are used."""

    continuations: tuple[Path, ...] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=2, le=10**9)] = 4096
    # mixed: the rows that fit into store_bytes are stored, the others computed for every batch.
    features: Literal["online", "store", "mixed"] = "online"
    store: Path | None = None
    store_bytes: ByteSize | None = None
    # Anything but plain rounds what the drafter sees of the target, wherever it comes from.
    taps_dtype: Literal["plain", "int8", "float8_e4m3"] = "plain"
    num_anchors: Annotated[int, Field(ge=1, le=65536)] = 512
    tree_anchors: Annotated[int, Field(ge=0, le=65536)] = 128
    holdout_rows: CountOrZero = 0

    @model_validator(mode="after")
    def _check_store(self) -> DataSection:
        if self.features != "online" and self.store is None:
            needs = f"features: {self.features} needs data.store, the folder of the feature store"
            raise ConflictError(needs, "features", "store")
        if self.features == "mixed" and self.store_bytes is None:
            needs = "features: mixed needs data.store_bytes, the size of the store, as 500G"
            raise ConflictError(needs, "features", "store_bytes")
        if self.tree_anchors > self.num_anchors:
            allowed = f"allowed 0..{self.num_anchors} (data.num_anchors)"
            message = f"tree_anchors {self.tree_anchors}: {allowed}"
            raise ConflictError(message, "tree_anchors", "num_anchors")
        return self


class LossWeights(Section):
    """Weight of each loss term; 0 turns a term off.

    ce takes the label, soft_ce the target's distribution (EAGLE-3).
    """

    ce: Weight = 0.1
    l1: Weight = 0.9
    confidence: Weight = 1.0
    survival: Weight = 0.1
    coverage: Weight = 0.1
    soft_ce: Weight = 0.0

    @model_validator(mode="after")
    def _check_some(self) -> LossWeights:
        if not any(getattr(self, name) for name in LossWeights.model_fields):
            message = "all loss weights are 0: at least one must be positive"
            raise ConflictError(message, *LossWeights.model_fields)
        return self


class WarmupSection(LossWeights):
    """Loss weights for the first `fraction` of the steps."""

    fraction: Annotated[float, Field(gt=0, lt=1)]


class LossesSection(LossWeights):
    """Loss weights, and the constants of algorithms.md 2.2 and 2.5."""

    gamma: Annotated[float, Field(gt=0)] = 4.0
    top_j: Annotated[int, Field(ge=1, le=1024)] = 4
    margin: Annotated[float, Field(ge=0)] = 1.0
    cap: Annotated[float, Field(gt=0)] = 4.0
    confidence_stop_gradient: bool = False
    warmup: WarmupSection | None = None


class OptimSection(Section):
    """AdamW with linear warmup and cosine decay to zero; defaults of algorithms.md 2.6."""

    lr: Annotated[float, Field(gt=0)] = 6e-4
    warmup_ratio: Fraction = 0.04
    weight_decay: Weight = 0.0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    schedule: Literal["cosine"] = "cosine"


class TrainSection(Section):
    """Length, batch and rhythm of a run; of `epochs` and `max_steps` the sooner one ends it."""

    epochs: Count | None = None
    max_steps: Count | None = None
    global_batch: BatchSize = 64
    micro_batch: BatchSize = 1
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    dtype: TrainDtype = "bfloat16"
    save_every: Count = 500
    eval_every: CountOrZero = 500
    # Every so many steps the engine decodes held-out prompts with the recipe's policy, and the best
    # drafter so far is kept as best/; 0 never does.
    decode_every: CountOrZero = 0
    # Rows of the hold-out whose prompts are decoded (None: all of them), and tokens of each answer.
    decode_prompts: Count | None = None
    decode_tokens: Annotated[int, Field(ge=2, le=10**6)] = 96
    # Rows of the vocabulary losses computed at a time: 64 blocks of 7 (training.md 4).
    chunk_rows: Count = 448
    # True stores the vocabulary logits between the passes: faster where memory allows it.
    keep_logits: bool = False
    # 0 keeps everything on every process; 1, 2, 3 let DeepSpeed spread optimizer state, gradients
    # and weights. None: 0 for one process, 1 for several.
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None

    @model_validator(mode="after")
    def _check_length(self) -> TrainSection:
        if self.epochs is None and self.max_steps is None:
            raise ConflictError("give epochs, max_steps or both", "epochs", "max_steps")
        self._check_multiple("global_batch", of="micro_batch")
        return self


class OutputSection(Section):
    """Where the run writes."""

    dir: Path


# The only values that an eagle3 drafter has: it is one layer without heads and masks, and has no
# trees, as each of its tokens is drafted from the state behind the one before.
_EAGLE3_ONLY: dict[Key, Any] = {
    ("drafter", "num_hidden_layers"): 1,
    ("drafter", "markov_rank"): 0,
    ("drafter", "enable_confidence_head"): False,
    ("drafter", "anchor_predicts_next"): True,
    ("drafter", "mask_token_id"): None,
    ("policy", "branching"): 1,
}


class Recipe(Section):
    """A whole training run."""

    target: TargetSection
    drafter: DrafterSection
    policy: PolicySection = PolicySection()
    data: DataSection
    losses: LossesSection = LossesSection()
    optim: OptimSection = OptimSection()
    train: TrainSection
    output: OutputSection

    @model_validator(mode="after")
    def _check_depth(self) -> Recipe:
        if self.policy.depth > self.drafter.block_size:
            allowed = f"allowed 1..{self.drafter.block_size} (drafter.block_size)"
            message = f"policy.depth {self.policy.depth}: {allowed}"
            raise ConflictError(message, "policy.depth", "drafter.block_size")
        return self

    @model_validator(mode="after")
    def _check_eagle3(self) -> Recipe:
        if self.drafter.architecture != "eagle3":
            return self
        for (section, name), only in _EAGLE3_ONLY.items():
            value = getattr(getattr(self, section), name)
            if value != only:
                word = str(only).lower().replace("none", "null")
                message = f"{section}.{name} {value}: allowed {word} (drafter.architecture eagle3)"
                raise ConflictError(message, f"{section}.{name}", "drafter.architecture")
        return self

    @model_validator(mode="after")
    def _check_decoding(self) -> Recipe:
        train, held = self.train, self.data.holdout_rows
        if train.decode_every and not held:
            message = f"train.decode_every {train.decode_every}: needs data.holdout_rows above 0"
            raise ConflictError(message, "train.decode_every", "data.holdout_rows")
        if train.decode_every and train.decode_prompts and train.decode_prompts > held:
            allowed = f"allowed 1..{held} (data.holdout_rows)"
            message = f"train.decode_prompts {train.decode_prompts}: {allowed}"
            raise ConflictError(message, "train.decode_prompts", "data.holdout_rows")
        return self


PATH_KEYS: tuple[Key, ...] = (
    ("target", "model"),
    ("data", "continuations"),
    ("data", "store"),
    ("output", "dir"),
)


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in the YAML file `path`, with `a.b=c` overrides applied and all paths absolute.

    Raises UsageError for a missing file, bad YAML, an unknown or doubled key, or a value out of
    range; the message starts with file:line, or with `--set`.
    """
    source = Path(path)
    values, origins = _read_all(source)
    for text in overrides:
        key, value = parse_override(text)
        change: Any = value
        for part in reversed(key):
            change = {part: change}
        origins[key] = "--set"
        if isinstance(value, dict):
            origins.update({(*key, name): "--set" for name in value})
        for length in range(1, len(key)):
            origins.setdefault(key[:length], "--set")
        resolve_paths(change, PATH_KEYS, Path.cwd(), origins)
        values = merge(values, change)
    return validate(Recipe, values, source, origins)


def dump_recipe(recipe: Recipe, folder: str | os.PathLike[str] | None = None) -> str:
    """YAML of every value of `recipe`, loadable again; paths relative to `folder` if given."""
    values = recipe.model_dump(mode="json")
    if folder is not None:
        for section, key in PATH_KEYS:
            values[section][key] = map_paths(
                values[section][key], lambda text: os.path.relpath(text, os.path.abspath(folder))
            )
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _read_all(source: Path) -> tuple[dict[str, Any], Origins]:
    """Values and origins of a recipe over those of the recipes that it extends, level by level."""
    values, origins, base = _read(source)
    read = {os.path.realpath(source)}
    extending = source
    while base is not None:
        if os.path.realpath(base) in read:
            raise UsageError(f"{extending}: extends: {base} extends this recipe in turn")
        read.add(os.path.realpath(base))
        base_values, base_origins, further = _read(base)
        values, origins = merge(base_values, values), {**base_origins, **origins}
        extending, base = base, further
    return values, origins


def _read(path: Path) -> tuple[dict[str, Any], Origins, Path | None]:
    """Values, origins, and the recipe that `extends` names, with all paths absolute."""
    values, origins = read_mapping(path)
    base = values.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise UsageError(f"{origins['extends',]}: extends: need the file name of one recipe")
    resolve_paths(values, PATH_KEYS, path.parent, origins)
    if base is None:
        return values, origins, None
    where = f"{origins['extends',]}: extends"
    return values, origins, Path(absolute(base, path.parent, where))
