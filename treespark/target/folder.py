# SPDX-License-Identifier: Apache-2.0
"""A target's model folder: checks before anything is loaded, loading, and the fingerprint."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from treespark.errors import UsageError
from treespark.target.attention import ATTENTION_NAME
from treespark.target.families import check_model_type

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

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


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UsageError when there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{what} {path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{what} {path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{what} {path}: expected a JSON object")
    return content


def check_folder(path: Path) -> list[Path]:
    """Return the safetensors files of a model folder.

    Raises UsageError for a missing folder, a missing or unusable config.json, custom code
    (`auto_map`), weights that exist only as pickles, a missing shard, and a file that is not whole.
    """
    if not path.is_dir():
        raise UsageError(f"target {path}: no such folder (a local Hugging Face model is expected)")
    _check_config(path / "config.json")
    index = path / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        weight_map = read_json(index, "target").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UsageError(f"target {index}: weight_map is missing or empty")
        names = sorted({str(name) for name in weight_map.values()})
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


def _check_config(path: Path) -> None:
    """Refuse what can be told from config.json alone."""
    config = read_json(path, "target")
    for other in ("tokenizer_config.json", "generation_config.json"):
        if (path.parent / other).is_file():
            config = {**read_json(path.parent / other, "target"), **config}
    if "auto_map" in config:
        raise UsageError(f"target {path.parent}: auto_map asks for custom code, which is never run")
    if "quantization_config" in config:
        raise UsageError(
            f"target {path}: quantization_config is set, only plain weights are supported"
        )
    check_model_type(config.get("model_type"))
    architectures = config.get("architectures")
    if architectures and not str(architectures[0]).endswith("ForCausalLM"):
        raise UsageError(f"target {path}: architectures {architectures}, allowed: a ...ForCausalLM")


def load_config(path: Path) -> Any:
    """Return the folder's transformers config. Raises UsageError when its fields do not fit."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise UsageError(f"target {path / 'config.json'}: {_one_line(error)}") from None


def load_weights(path: Path, config: Any, dtype: torch.dtype) -> Any:
    """Return the causal LM with our attention. Raises UsageError when tensors do not fit."""
    from transformers import AutoModelForCausalLM

    with _no_progress_bar():
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
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise UsageError(
                f"target {path}: cannot load the weights: {_one_line(error)}"
            ) from None
    missing = sorted(info["missing_keys"])
    if missing:
        raise UsageError(f"target {path}: {len(missing)} tensors are missing, first {missing[0]}")
    return model


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the folder's tokenizer. Raises UsageError when it has none that works."""
    from transformers import AutoTokenizer

    # Without any of these transformers makes up an empty tokenizer.
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((path / name).is_file() for name in names):
        raise UsageError(f"target {path}: no usable tokenizer: none of {', '.join(names)}")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"target {path}: no usable tokenizer: {_one_line(error)}") from None


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing a bar: whoever calls the library decides what is shown."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _one_line(error: Exception) -> str:
    """Return the message without line breaks."""
    return " ".join(str(error).split())


def eos_token_ids(path: Path, config: Any) -> set[int]:
    """Return the ids that end an answer: of generation_config.json, else config.json, else none."""
    value = None
    if (path / "generation_config.json").is_file():
        value = read_json(path / "generation_config.json", "target").get("eos_token_id")
    if value is None:
        value = getattr(config, "eos_token_id", None)
    return (
        set()
        if value is None
        else {int(i) for i in (value if isinstance(value, list) else [value])}
    )


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
