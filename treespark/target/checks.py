# SPDX-License-Identifier: Apache-2.0
"""What the JSON files of a target folder may say: refusals by field, before anything is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from treespark.errors import UsageError
from treespark.target.families import check_model_type

if TYPE_CHECKING:
    from pathlib import Path

# Beyond every real model; a slip of the pen above it would exhaust memory before it is noticed.
_LARGEST, _MOST_LAYERS = 2**24, 1024
# transformers fills these in where they are absent, with the sizes of some other model.
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_DERIVED = ("num_key_value_heads", "head_dim")


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UsageError when there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{what} {path}: no such file") from None
    except RecursionError:
        raise UsageError(f"{what} {path}: not readable as JSON: nested too deeply") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{what} {path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{what} {path}: expected a JSON object")
    return content


def check_config(path: Path) -> None:
    """Refuse what can be told from config.json alone, and custom code. Raises UsageError."""
    config = read_json(path, "target")
    everything = dict(config)
    for other in ("tokenizer_config.json", "generation_config.json"):
        if (path.parent / other).is_file():
            everything = {**read_json(path.parent / other, "target"), **everything}
    if "auto_map" in everything:
        raise UsageError(f"target {path.parent}: auto_map asks for custom code, which is never run")
    if "quantization_config" in everything:
        raise UsageError(
            f"target {path}: quantization_config is set, only plain weights are supported"
        )
    check_model_type(config.get("model_type"))
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(
        str(name).endswith("ForCausalLM") for name in architectures[:1]
    ):
        raise UsageError(f"target {path}: architectures {architectures}, allowed: a ...ForCausalLM")
    _check_sizes(path, config)
    for field in ("dtype", "torch_dtype"):
        value = config.get(field)
        if value is not None and not isinstance(getattr(torch, str(value), None), torch.dtype):
            _refuse(path, field, value, "need the name of a torch dtype, as float32")


def _refuse(path: Path, field: str, value: object, allowed: str) -> None:
    raise UsageError(f"target {path}: {field} is {value!r}; {allowed}")


def _is_int(value: object, lowest: int, highest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest


def _check_sizes(path: Path, config: dict[str, Any]) -> None:
    for field in (*_NEEDED, *_DERIVED):
        value = config.get(field)
        if value is None and field in _DERIVED:
            continue
        if value is None:
            raise UsageError(f"target {path}: {field} is missing")
        most = _MOST_LAYERS if field == "num_hidden_layers" else _LARGEST
        if not _is_int(value, 1, most):
            _refuse(path, field, value, f"need an integer in 1..{most}")
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads and heads % kv_heads:
        _refuse(path, "num_key_value_heads", kv_heads, f"it must divide {heads} heads")
    # Negative ids count from the end of the table, as in some old configs.
    pad, size = config.get("pad_token_id"), config["vocab_size"]
    if pad is not None and not _is_int(pad, -size, size - 1):
        _refuse(path, "pad_token_id", pad, f"need at most {size - 1} (vocab_size {size})")


def token_id_set(path: Path, field: str, value: object) -> set[int]:
    """Return the ids in a field that holds one id, several or none.

    Raises UsageError naming file and field for anything but ids.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_int(i, 0, _LARGEST) for i in ids):
        _refuse(path, field, value, "need a token id, a list of them or null")
    return set(ids)
