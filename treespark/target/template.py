# SPDX-License-Identifier: Apache-2.0
"""The one place that turns a prompt into token ids: training, serving and evaluation all call it.

A drafter learns on the ids that the target will see when it is served, so the chat template is
applied with the same switches everywhere: generation prompt on, thinking off, and no special
tokens but the template's own.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treespark.errors import UsageError

Messages = Sequence[Mapping[str, str]]

# Names an answer of the template in `split_text`; no template contains them.
_MARKS = ("treespark-a", "treespark-b", "treespark-c", "treespark-d")


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a local model folder.

    Raises UsageError when the folder is missing, holds no tokenizer or has no chat template.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise UsageError(f"tokenizer {folder}: no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"tokenizer {folder}: cannot be loaded: {reason}") from None
    _chat_template(tokenizer)
    return tokenizer


def _chat_template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        raise UsageError("the tokenizer has no chat template: prompts cannot be rendered")
    return template


def _messages(prompt: str | Messages) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def render_text(tokenizer: Any, prompt: str | Messages) -> str:
    """Return the text that a prompt becomes, up to where the target's answer begins.

    prompt: the first user turn, or messages of `role` and `content`. A template that knows
    `enable_thinking` gets it as False; others never read the variable.
    """
    _chat_template(tokenizer)
    rendered: str = tokenizer.apply_chat_template(
        _messages(prompt), tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return rendered


def render_prompt(tokenizer: Any, prompt: str | Messages) -> list[int]:
    """Return the token ids of a prompt, generation prompt included, as `render_text` spells it."""
    encoded = tokenizer(render_text(tokenizer, prompt), add_special_tokens=False)
    return list(encoded["input_ids"])


def template_fingerprint(tokenizer: Any) -> str:
    """Return 16 hex digits that change when the chat template or its rendering of a turn does."""
    ids = render_prompt(tokenizer, "0 1\n a")
    return hashlib.sha256(f"{_chat_template(tokenizer)}\0{ids}".encode()).hexdigest()[:16]


def user_turn_marks(tokenizer: Any) -> tuple[str, str]:
    """Return the template's texts right before and right after a user turn.

    Used to find the first user turn in a text that was formatted with the same template. Raises
    UsageError when the template sets a turn apart by nothing.
    """
    a, b, c, d = _MARKS
    turns = [("user", a), ("assistant", b), ("user", c), ("assistant", d)]
    text: str = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], tokenize=False
    )
    alone = render_text(tokenizer, a)
    before = _common_suffix(alone.partition(a)[0], text.partition(b)[2].partition(c)[0])
    after = _common_prefix(alone.partition(a)[2], text.partition(a)[2].partition(b)[0])
    if not before.strip() or not after.strip():
        raise UsageError("the chat template does not mark user turns: cannot split a `text` row")
    return before, after


def _common_prefix(x: str, y: str) -> str:
    size = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), None)
    return x[: min(len(x), len(y)) if size is None else size]


def _common_suffix(x: str, y: str) -> str:
    return _common_prefix(x[::-1], y[::-1])[::-1]
