# SPDX-License-Identifier: Apache-2.0
"""A target's model folder: checks before anything is loaded, loading, and the fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from treespark.errors import UsageError
from treespark.target.attention import ATTENTION_NAME
from treespark.target.checks import check_config, read_json, token_id_set

if TYPE_CHECKING:
    from collections.abc import Iterator

# Config fields that change what the model computes; dtype and library version do not belong here.
_ESSENTIALS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
)


def check_folder(path: Path) -> list[Path]:
    """Return the safetensors files of a model folder.

    Raises UsageError for a missing folder, a missing or unusable config.json, custom code
    (`auto_map`), weights that exist only as pickles, a missing shard, and a file that is not whole.
    """
    # Unlike Path.is_dir this says no, too, where the system refuses the name itself.
    if not os.path.isdir(path):
        raise UsageError(f"target {path}: no such folder (a local Hugging Face model is expected)")
    check_config(path / "config.json")
    index = path / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        weight_map = read_json(index, "target").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UsageError(f"target {index}: weight_map is missing or empty")
        found = weight_map.values()
        if not all(isinstance(n, str) and Path(n).name == n for n in found):
            raise UsageError(f"target {index}: weight_map needs names of files in this folder")
        names = sorted(set(found))
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        pickles = sorted(
            p.name for kind in ("bin", "pt", "pth", "pkl") for p in path.glob(f"*.{kind}")
        )
        hint = f"; pickled weights ({pickles[0]}) are never loaded, convert them" if pickles else ""
        raise UsageError(f"target {path}: no {', '.join(missing)}{hint}")
    for name in names:
        try:
            with safe_open(path / name, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UsageError(
                f"target {path / name}: not a whole safetensors file: {error}"
            ) from None
    return [path / name for name in names]


def load_config(path: Path) -> Any:
    """Return the folder's transformers config. Raises UsageError when its fields do not fit."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.activations import ACT2FN

    with _quiet():
        try:
            config = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
            raise UsageError(f"target {path / 'config.json'}: {_one_line(error)}") from None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim < 2 or head_dim % 2:
        raise UsageError(
            f"target {path / 'config.json'}: head_dim is {head_dim}; rotary positions need an even "
            "number"
        )
    if config.hidden_act not in ACT2FN:
        raise UsageError(
            f"target {path / 'config.json'}: hidden_act is {config.hidden_act!r}; "
            "need an activation that transformers knows, as silu"
        )
    return config


def load_weights(path: Path, config: Any, dtype: torch.dtype) -> Any:
    """Return the causal LM with our attention.

    Raises UsageError when tensors do not fit or hold NaN or infinity.
    """
    from transformers import AutoModelForCausalLM

    with _quiet():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                # Listed in `info` instead of only in a report of many lines.
                ignore_mismatched_sizes=True,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise UsageError(
                f"target {path}: cannot load the weights: {_one_line(error)}"
            ) from None
    _check_tensors(path, info)
    for name, parameter in model.named_parameters():
        # One pass over the memory: a sum keeps every NaN and infinity.
        if not parameter.detach().sum(dtype=torch.float32).isfinite():
            raise UsageError(f"target {path}: {name} holds NaN or infinite values")
    return model


def _check_tensors(path: Path, info: dict[str, Any]) -> None:
    """Refuse tensors that are not exactly the model's: the rest would compute another model.

    info: what transformers lists, without what it leaves out on purpose (rotary tables, a tied
    head).
    """
    for names, word in ((info["missing_keys"], "missing"), (info["unexpected_keys"], "unexpected")):
        if names:
            raise UsageError(
                f"target {path}: {len(names)} tensors are {word}, first {min(names)}; "
                "config.json and weights must fit"
            )
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise UsageError(
            f"target {path}: {name} is {list(found)}, config.json asks for {list(wanted)}"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing bars and from logging reports of many lines.

    Whoever calls the library decides what is shown, and what is wrong here ends in a UsageError.
    """
    from transformers.utils import logging

    enabled, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if enabled:
            logging.enable_progress_bar()


def _one_line(error: Exception) -> str:
    """Return the message without line breaks."""
    return " ".join(str(error).split())


def eos_token_ids(path: Path, config: Any) -> set[int]:
    """Return the ids that end an answer: of generation_config.json, else config.json, else none.

    Raises UsageError naming the file when it holds anything but ids there.
    """
    file, value = path / "generation_config.json", None
    if file.is_file():
        value = read_json(file, "target").get("eos_token_id")
    if value is None:
        file, value = path / "config.json", getattr(config, "eos_token_id", None)
    return token_id_set(file, "eos_token_id", value)


def fingerprint(config: Any, files: list[Path]) -> str:
    """Return a sha256 (hex) of config essentials, tensor names and shapes, and sampled weights.

    Read from the files, so it does not depend on the dtype or device a model is loaded with. One
    row from the middle of each matrix and every vector are hashed after a cast to bfloat16: a
    bfloat16 copy of a float32 folder, or the same weights in other shards, have the same
    fingerprint.
    """
    digest = hashlib.sha256()
    essentials = {key: getattr(config, key, None) for key in _ESSENTIALS}
    digest.update(json.dumps(essentials, sort_keys=True).encode())
    rows = []
    for file in files:
        with safe_open(file, framework="pt") as weights:
            names = weights.keys()
            for name in names:
                if name == "lm_head.weight" and config.tie_word_embeddings:
                    continue
                tensor = weights.get_slice(name)
                shape = tensor.get_shape()
                is_matrix = len(shape) > 1 and shape[0]
                sample = tensor[shape[0] // 2] if is_matrix else weights.get_tensor(name)
                numbers = sample.to(torch.bfloat16).reshape(-1).view(torch.uint8).numpy()
                rows.append((name, str(list(shape)).encode(), numbers.tobytes()))
    for name, shape_text, numbers_bytes in sorted(rows):
        digest.update(name.encode() + shape_text + numbers_bytes)
    return digest.hexdigest()
