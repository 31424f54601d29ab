# SPDX-License-Identifier: Apache-2.0
"""The one place that turns a prompt into token ids: training, serving and evaluation all call it.

A drafter learns on the ids that the target will see when it is served, so the chat template is
applied with the same switches everywhere: generation prompt on, thinking off, and no special
tokens but the template's own.
"""

import hashlib
import os
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
    if not os.path.isdir(folder):
        raise UsageError(f"tokenizer {folder}: no such folder")
    tokenizer = open_tokenizer(folder, "tokenizer")
    _chat_template(tokenizer)
    return tokenizer


def open_tokenizer(folder: Path, what: str) -> Any:
    """Return the tokenizer of a folder, with a chat template or without.

    what: the folder's role, for messages. Raises UsageError when it has no tokenizer that works.
    """
    from transformers import AutoTokenizer

    # Without any of these transformers makes up an empty tokenizer.
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    refusal = f"{what} {folder}: no usable tokenizer: cannot be loaded"
    if not any((folder / name).is_file() for name in names):
        raise UsageError(f"{refusal}: none of {', '.join(names)} is there")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # The tokenizers library raises plain Exception, and transformers' own conversions of a damaged
    # file raise whatever its fields lead to.
    except Exception as error:
        raise UsageError(f"{refusal}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return kind and message of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _chat_template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        raise UsageError("the tokenizer has no chat template: prompts cannot be rendered")
    return template


def _messages(prompt: str | Messages) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def render_text(tokenizer: Any, prompt: str | Messages, enable_thinking: bool = False) -> str:
    """Return the text that a prompt becomes, up to where the target's answer begins.

    prompt: the first user turn, or messages of `role` and `content`. enable_thinking: for a
    template that knows the variable; others never read it.
    """
    _chat_template(tokenizer)
    switches = {"add_generation_prompt": True, "enable_thinking": enable_thinking}
    return _apply(tokenizer, _messages(prompt), **switches)


def _apply(tokenizer: Any, messages: list[dict[str, str]], **switches: bool) -> str:
    """Return what the chat template makes of messages. Raises UsageError where it fails."""
    try:
        rendered: str = tokenizer.apply_chat_template(messages, tokenize=False, **switches)
    # A template is a program out of the folder: it can raise any error of jinja2 and of Python.
    except Exception as error:
        folder = getattr(tokenizer, "name_or_path", "")
        raise UsageError(
            f"tokenizer {folder}: its chat template cannot render the prompt: {_reason(error)}"
        ) from None
    return rendered


def check_utf8(what: str, text: str) -> None:
    """Raise UsageError for text that UTF-8 cannot spell, as bytes of a command line that were not
    UTF-8: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} {text!r}: is not UTF-8 text") from None


def render_prompt(tokenizer: Any, prompt: str | Messages) -> list[int]:
    """Return the token ids of a prompt, generation prompt included, as `render_text` spells it."""
    text = render_text(tokenizer, prompt)
    check_utf8("prompt", text)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


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
    text = _apply(tokenizer, [{"role": role, "content": content} for role, content in turns])
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
