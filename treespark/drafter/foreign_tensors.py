# SPDX-License-Identifier: Apache-2.0
"""Tensor names of other projects and ours, and the vocabulary maps of EAGLE-3 heads.

d2t [rows] int64: row i of a head stands for token i + d2t[i]. t2d [vocab_size] bool: whether a
token has a row. Source: SpecForge, speculators; loaders of SGLang and vLLM.
"""

from pathlib import Path

import torch
from torch import Tensor

from treespark.drafter.config import DrafterConfig
from treespark.drafter.config_json import (
    DFLASH,
    LLAMA_EAGLE3,
    SPECFORGE_DSPARK,
    SPECULATORS,
    VLLM_EAGLE3,
)
from treespark.drafter.eagle3 import Eagle3Config, head_tokens
from treespark.drafter.json_fields import refusal
from treespark.errors import UsageError

# SGLang loads the only layer under this name, vLLM under both.
SPECFORGE_LAYER, OWN_LAYER = "midlayer.", "layers.0."
# Prefixes of a layout's tensors and what they are here.
_RENAMED = {
    LLAMA_EAGLE3: {SPECFORGE_LAYER: OWN_LAYER},
    VLLM_EAGLE3: {SPECFORGE_LAYER: OWN_LAYER},
    DFLASH: {"logit_head.": ""},
    SPECFORGE_DSPARK: {"logit_head.": ""},
}
# Copies of the target's weights that training alone reads.
_DROPPED = {SPECULATORS: ("verifier_norm.weight", "verifier_lm_head.weight")}
_HEAD = "lm_head.weight"


def to_own_names(folder: Path, layout: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a folder's tensors by our names; raises `UsageError` where two get the same."""
    renamed: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if key in _DROPPED.get(layout, ()):
            continue
        name = key
        for theirs, ours in _RENAMED.get(layout, {}).items():
            if key.startswith(theirs):
                name = ours + key.removeprefix(theirs)
        if name in renamed:
            raise UsageError(f"drafter {folder}: tensor {key} is there twice, also as {name}")
        renamed[name] = tensor
    return renamed


def settle_vocabulary(
    folder: Path, config: DrafterConfig, tensors: dict[str, Tensor], target_head: Tensor | None
) -> None:
    """Check the vocabulary map of a foreign folder and decide whose head the drafter uses.

    Takes t2d, which says nothing that d2t does not, out of `tensors`; adds a d2t of zeros to a head
    of the whole vocabulary. An EAGLE-3 folder without a head, or with the target's, gets
    `draft_vocab_size` None. Raises `UsageError` naming d2t, t2d or draft_vocab_size.
    """
    t2d = tensors.pop("t2d", None)
    if not isinstance(config, Eagle3Config) or config.draft_vocab_size is None:
        _check_whole_map(folder, tensors.pop("d2t", None), t2d)
        return
    rows, vocab_size = config.draft_vocab_size, config.vocab_size
    if rows == vocab_size:
        tensors.setdefault("d2t", torch.zeros(rows, dtype=torch.long))
    elif "d2t" not in tensors:
        reason = f"of {vocab_size} tokens (vocab_size), but there is no tensor d2t to say which"
        raise refusal(folder, "draft_vocab_size", rows, reason)
    tensors["d2t"] = check_d2t(folder, tensors["d2t"], rows, vocab_size)
    _check_t2d(folder, t2d, tensors["d2t"], vocab_size)
    if rows < vocab_size:
        return
    whole = not tensors["d2t"].any()
    head = tensors.get(_HEAD)
    if whole and (head is None or (target_head is not None and _same(head, target_head))):
        config.draft_vocab_size = None
        tensors.pop("d2t")


def check_d2t(folder: Path, d2t: Tensor, rows: int, vocab_size: int) -> Tensor:
    """Return the map as int64 [rows]. Raises `UsageError` unless it names distinct tokens."""
    if tuple(d2t.shape) != (rows,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise UsageError(
            f"drafter {folder}: d2t is {list(d2t.shape)} {d2t.dtype}, need [{rows}] "
            "(draft_vocab_size) whole numbers"
        )
    d2t = d2t.long()
    tokens = head_tokens(d2t)
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside) or len(tokens.unique()) < rows:
        what = f"token {int(outside[0])}" if len(outside) else "a token twice"
        raise UsageError(
            f"drafter {folder}: d2t names {what}; row i stands for token i + d2t[i], distinct and "
            f"in 0..{vocab_size - 1}"
        )
    return d2t


def target_to_draft(d2t: Tensor, vocab_size: int) -> Tensor:
    """Return t2d [vocab_size] bool of a map."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[head_tokens(d2t).cpu()] = True
    return t2d


def _check_t2d(folder: Path, t2d: Tensor | None, d2t: Tensor, vocab_size: int) -> None:
    if t2d is not None and not torch.equal(t2d.bool(), target_to_draft(d2t, vocab_size)):
        raise UsageError(f"drafter {folder}: t2d and d2t name different tokens")


def _check_whole_map(folder: Path, d2t: Tensor | None, t2d: Tensor | None) -> None:
    for name, is_whole in (
        ("d2t", d2t is None or not d2t.any()),
        ("t2d", t2d is None or bool(t2d.all())),
    ):
        if not is_whole:
            raise UsageError(
                f"drafter {folder}: {name} maps a reduced vocabulary, which only EAGLE-3 drafters "
                "with draft_vocab_size have here"
            )


def _same(stored: Tensor, weight: Tensor) -> bool:
    return stored.shape == weight.shape and equal_when_rounded(stored, weight)


def equal_when_rounded(stored: Tensor, weight: Tensor) -> bool:
    """Whether tensors of one shape agree in the coarser of their two dtypes."""
    return torch.equal(stored.to(weight), weight) or torch.equal(weight.to(stored), stored)
