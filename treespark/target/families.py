# SPDX-License-Identifier: Apache-2.0
"""Which target families run, what is special about them, and why others are refused.

A row is added when the parity tests of tests/target pass for a tiny random model of the family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treespark.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TargetFamily:
    """Decoder-only models of one model_type whose whole state is keys and values of full attention.

    traits: what the family adds to pre-norm attention with rotary positions and a gated MLP; all of
    it lives inside transformers' own modules, so no code here depends on it.
    """

    model_type: str
    traits: str = ""


FAMILIES = {
    row.model_type: row
    for row in (
        TargetFamily("llama"),
        TargetFamily("mistral", "a sliding window in some releases, which is refused"),
        TargetFamily("qwen2", "biases on queries, keys and values"),
        TargetFamily("qwen3", "head_dim free of hidden_size, a norm on each query and key head"),
    )
}

_LINEAR = (
    "its linear-attention layers keep a recurrent state, which a tree round cannot roll back yet"
)
_LATENT = "its cache holds compressed keys and values"
_SLIDING = "its sliding-window layers keep a ring of keys and values"
REFUSED = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "deepseek_v4": _LATENT,
    "falcon_h1": _LINEAR,
    "falcon_mamba": _LINEAR,
    "gemma2": _SLIDING,
    "gemma3": _SLIDING,
    "gemma3_text": _SLIDING,
    "gemma4": _SLIDING,
    "gemma4_text": _SLIDING,
    "gpt_oss": _SLIDING,
    "jamba": _LINEAR,
    "kimi_linear": _LINEAR,
    "mamba": _LINEAR,
    "mamba2": _LINEAR,
    "qwen3_5": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
}
_LAYER_REASONS = {
    "linear_attention": _LINEAR,
    "sliding_attention": _SLIDING,
    "chunked_attention": _SLIDING,
}
# These rescale the rotary frequencies by the longest position of a forward: the rows of a request
# would depend on what else is in the batch.
_REFUSED_ROPE = ("dynamic", "longrope")
_ROPE = ("default", "linear", "llama3", "yarn")
# Far above any real base or factor; also refuses infinity.
_LARGEST_ROPE_NUMBER = 1e15


def check_model_type(model_type: object) -> TargetFamily:
    """Return the family's row. Raises UsageError for a refused type, with the reason, or an unknown
    one."""
    # Anything may stand in a config, also what no dict can look up.
    name = model_type if isinstance(model_type, str) else ""
    if name in REFUSED:
        raise UsageError(f"target model_type {model_type!r}: refused, {REFUSED[name]}")
    if name not in FAMILIES:
        allowed = ", ".join(sorted(FAMILIES))
        raise UsageError(f"target model_type {model_type!r}: not supported, allowed: {allowed}")
    return FAMILIES[name]


def family_of(config: Any) -> TargetFamily:
    """Return the row of a transformers config's model_type.

    Raises UsageError for an unknown type and for state that is not plain keys and values, with the
    reason.
    """
    model_type = config.model_type
    family = check_model_type(model_type)
    name = f"target model_type {model_type!r}"
    for kind in sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"}):
        reason = _LAYER_REASONS.get(kind, "only full attention is supported")
        raise UsageError(f"{name}: refused, layer_types has {kind!r}: {reason}")
    window = getattr(config, "sliding_window", None)
    if window is not None:
        raise UsageError(f"{name}: refused, sliding_window {window} (allowed: null): {_SLIDING}")
    _check_rope(name, getattr(config, "rope_parameters", None) or {})
    return family


def _check_rope(name: str, rope: dict[str, Any]) -> None:
    """Refuse rotary positions that do not run or that have numbers without a meaning."""
    rope_type = rope.get("rope_type", "default")
    if rope_type in _REFUSED_ROPE:
        raise UsageError(
            f"{name}: refused, rope_type {rope_type!r} depends on the longest position in a batch"
        )
    if rope_type not in _ROPE:
        raise UsageError(
            f"{name}: rope_type {rope_type!r}: not supported, allowed: {', '.join(_ROPE)}"
        )
    for field, value in rope.items():
        switch = value is None or isinstance(value, bool)
        if field in ("rope_type", "type") or (switch and field != "rope_theta"):
            continue
        if switch or not isinstance(value, (int, float)) or not 0 < value <= _LARGEST_ROPE_NUMBER:
            raise UsageError(f"{name}: rope_parameters.{field} {value!r}: need a positive number")


def default_target_layer_ids(num_layers: int, num_taps: int) -> list[int]:
    """Return evenly spread tap layers, from the second to the third-last; one tap is the middle.

    Raises UsageError when the target has too few layers for so many distinct taps.  Source: the
    rule of the published DFlash and DSpark drafters.
    """
    steps = max(num_taps - 1, 1)
    ids = [round(1 + i * (num_layers - 4) / steps) for i in range(num_taps)]
    if num_taps == 1:
        ids = [num_layers // 2]
    if len(set(ids)) < max(num_taps, 1) or not 0 <= min(ids) <= max(ids) < num_layers - 1:
        raise UsageError(
            f"number of taps {num_taps}: needs as many distinct inner layers, "
            f"the target has {num_layers} layers"
        )
    return ids


def default_mask_token_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """Return a token id that no text contains, for a drafter's masked slots.

    The first embedding row without a token, else the last special token that neither ends, pads or
    begins a text nor stands in the chat template. Raises UsageError when there is none.
    """
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    used = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    template = str(tokenizer.chat_template or "")
    for token_id, added in sorted(tokenizer.added_tokens_decoder.items(), reverse=True):
        if added.special and added.content not in used and added.content not in template:
            return token_id
    raise UsageError("mask_token_id: the target's vocabulary has no unused id, name one")
