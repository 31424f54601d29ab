# SPDX-License-Identifier: Apache-2.0
"""Writes drafter folders: our own layout and the DeepSpec layout.

A folder is written beside its destination and renamed into place, so that a reader never sees half
of it. Other files of an existing drafter folder (model card, recipe) are kept, but not the training
record, which is of the weights that are replaced.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from treespark.drafter.base import DrafterModel
from treespark.drafter.config import DrafterConfig, TreeSparkConfig
from treespark.drafter.config_json import DEEPSPEC, DEEPSPEC_EAGLE3, layout_of
from treespark.drafter.eagle3 import Eagle3Config
from treespark.drafter.loading import RECORD, WEIGHTS_NAME, frozen_keys
from treespark.errors import UsageError


def save_own(drafter: DrafterModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write our layout: everything but embedding and head, which the target supplies on load.

    dtype: stored dtype, default that of the weights. Raises `UsageError` if `folder` exists and is
    not a drafter folder.
    """
    left_out = frozen_keys(drafter.config)
    tensors = {k: t for k, t in drafter.state_dict().items() if k not in left_out}
    tensors = storable(tensors, dtype)
    config = json.loads(drafter.config.to_json_string())
    config["architectures"] = [type(drafter).__name__]
    config["dtype"] = dtype_name(tensors)
    write_folder(folder, config, tensors)


def save_deepspec(drafter: DrafterModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a DeepSpec folder (Qwen3DSparkModel, Qwen3Eagle3Model) with embedding and head.

    Raises `UsageError` for the in-place layout, which that format cannot express, and where
    `save_own` does.
    """
    fields = deepspec_config(drafter.config)
    tensors = storable(dict(drafter.state_dict()), dtype)
    write_folder(folder, {**fields, "dtype": dtype_name(tensors)}, tensors)


def plain_fields(config: DrafterConfig) -> dict[str, Any]:
    """Return the fields of a config.json that all projects read: a Qwen3 config and the taps."""
    copied = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim hidden_act rms_norm_eps max_position_embeddings "
        "initializer_range target_layer_ids num_target_layers tie_word_embeddings"
    )
    fields: dict[str, Any] = {name: getattr(config, name) for name in copied.split()}
    return fields | {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
    }


def deepspec_config(config: DrafterConfig) -> dict[str, Any]:
    """Return the fields of a DeepSpec config.json: a Qwen3 config plus the drafter's own fields.

    Raises `UsageError` where the format has no field for what the drafter is.
    """
    fields = plain_fields(config)
    if isinstance(config, Eagle3Config):
        for field, value in (("qk_norm", True), ("norm_before_residual", False)):
            if getattr(config, field) is not value:
                raise UsageError(f"{field} is {not value}: DeepSpec's EAGLE-3 has it {value}")
        if config.has_own_head:
            raise UsageError(
                f"draft_vocab_size is {config.draft_vocab_size}: DeepSpec's EAGLE-3 has the "
                "target's head"
            )
        return fields | _deepspec_eagle3_fields(config)
    assert isinstance(config, TreeSparkConfig)
    return fields | _deepspec_block_fields(config)


def _deepspec_eagle3_fields(config: Eagle3Config) -> dict[str, Any]:
    return {
        "architectures": [DEEPSPEC_EAGLE3],
        "ttt_length": config.block_size,
        "step_loss_decay": config.step_loss_decay,
        "draft_num_hidden_layers": config.num_hidden_layers,
    }


def _deepspec_block_fields(config: TreeSparkConfig) -> dict[str, Any]:
    if not config.anchor_predicts_next:
        raise UsageError(
            "anchor_predicts_next is false: a DeepSpec config has no field for the in-place layout"
        )
    copied = "block_size mask_token_id num_anchors markov_rank enable_confidence_head"
    fields = {name: getattr(config, name) for name in copied.split()}
    fields["architectures"] = [DEEPSPEC]
    if config.markov_rank:
        fields["markov_head_type"] = config.markov_head_type
    if config.enable_confidence_head:
        fields["confidence_head_with_markov"] = config.confidence_head_with_markov
    return fields


def storable(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return detached CPU tensors that share no storage: a tied table is stored twice."""
    out: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
        stored = tensor.detach().to(device="cpu", dtype=kept).contiguous()
        if stored.data_ptr() in seen:
            stored = stored.clone()
        seen.add(stored.data_ptr())
        out[key] = stored
    return out


def dtype_name(tensors: dict[str, Tensor]) -> str:
    """Return the name of the weights' dtype, as config.json files spell it."""
    return str(tensors["fc.weight"].dtype).removeprefix("torch.")


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors to a temporary sibling and rename it to `folder`.

    Raises `UsageError`, and leaves `folder` as it was, where it cannot be written, as on a full
    disk.
    """
    check_destination(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        # mkdtemp makes a private folder; the result gets the usual permissions.
        work.chmod(0o777 & ~_umask())
        if folder.is_dir():
            # Neither the old weights and their record nor what a killed write left.
            left_out = shutil.ignore_patterns("*.safetensors*", RECORD, ".*.tmp")
            shutil.copytree(folder, work, dirs_exist_ok=True, ignore=left_out)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (work / "config.json").write_text(text, encoding="utf-8")
        save_file(tensors, work / WEIGHTS_NAME, metadata={"format": "pt"})
        # Nor is the file private that safetensors makes.
        (work / WEIGHTS_NAME).chmod(0o666 & ~_umask())
        for name in ("config.json", WEIGHTS_NAME):
            with (work / name).open("rb+") as file:
                os.fsync(file.fileno())
        replace_folder(work, folder)
    except (OSError, SafetensorError) as error:
        raise _unwritable(folder, error) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def check_destination(folder: Path, source: Path | None = None) -> None:
    """Allow a new or empty folder, or one that already holds another drafter than `source`.

    source: the folder that is exported, if any. Raises UsageError for any other destination.
    """
    try:
        folder.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(folder, error) from None
    if source is not None and os.path.exists(source) and folder.samefile(source):
        raise UsageError(f"--out {folder}: is the drafter that is exported; choose another folder")
    if not folder.is_dir():
        raise UsageError(f"drafter output {folder}: it is a file; need a folder")
    if not any(folder.iterdir()):
        return
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        known = layout_of(raw) is not None
    except (OSError, ValueError, AttributeError):
        known = False
    if not known:
        raise UsageError(
            f"drafter output {folder}: it exists and holds no drafter; choose a new or empty folder"
        )


def _unwritable(folder: Path, error: OSError | SafetensorError) -> UsageError:
    reason = getattr(error, "strerror", None) or error
    return UsageError(f"drafter output {folder}: cannot be written: {reason}")


def replace_folder(work: Path, folder: Path) -> None:
    """Rename `work` to `folder`, putting an existing folder aside first and removing it after.

    A kill between the two leaves the old one as `old` in a sibling `.NAME.old.*`.
    """
    if not folder.exists():
        work.rename(folder)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    folder.rename(aside / "old")
    try:
        work.rename(folder)
    except OSError:
        (aside / "old").rename(folder)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """Put back or remove what killed exports to `folder` left beside it; nobody else may write."""
    for aside in folder.parent.glob(f".{folder.name}.old.*/old"):
        if not folder.exists():
            aside.rename(folder)
    for rest in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(rest)
