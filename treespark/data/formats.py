# SPDX-License-Identifier: Apache-2.0
"""The row formats that hold a prompt, and the first user turn of each.

| key of the row           | first user turn                                                     |
|--------------------------|---------------------------------------------------------------------|
| `input_ids`, `loss_mask` | ids before the first supervised one; all ids without a mask         |
| `messages`               | content of the first `user` message; content is text or text parts  |
| `conversations`          | the same, or ShareGPT's `from: human` and `value`                   |
| `turns`                  | the first string                                                    |
| `prompt`                 | the string, or messages as above                                    |
| `instruction`, `input`   | instruction, then an empty line and the input when there is one     |
| `text`                   | the first user turn of a text already in the tokenizer's template   |

A row with several of these keys is read by the first one of the table that is not null. System
messages and later turns are left out: the prompt is what the target is asked first.
"""

from collections.abc import Callable
from typing import Any

from treespark.data.jsonl import Row
from treespark.errors import UsageError

# `prompter` is the role name of OASST trees.
_USER_ROLES = ("user", "human", "prompter")

UserTurnMarks = Callable[[], tuple[str, str]]


def first_user_turn(row: Row, where: str, marks: UserTurnMarks) -> str | list[int] | None:
    """Return the prompt of a row: text, token ids if it was tokenised, None without a user turn.

    where: `file:line` for messages. marks: the template's texts before and after a user turn,
    called for `text` rows only. Raises UsageError for an unknown format or a wrong type.
    """
    for key, read in _READERS.items():
        if row.get(key) is not None:
            return read(row, where)
    if row.get("text") is not None:
        return _from_text(_string(row, "text", where), where, marks)
    known = ", ".join([*_READERS, "text"])
    raise UsageError(f"{where}: no prompt among the keys {sorted(row)}; need one of {known}")


def _string(row: Row, key: str, where: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise UsageError(f"{where}: {key}: need a string, got {type(value).__name__}")
    return value


def _list(row: Row, key: str, where: str) -> list[Any]:
    value = row[key]
    if not isinstance(value, list):
        raise UsageError(f"{where}: {key}: need a list, got {type(value).__name__}")
    return value


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _from_input_ids(row: Row, where: str) -> list[int] | None:
    ids = _list(row, "input_ids", where)
    if not all(map(_is_id, ids)):
        raise UsageError(f"{where}: input_ids: need integers from 0 on")
    if row.get("loss_mask") is not None:
        mask = _list(row, "loss_mask", where)
        if len(mask) != len(ids) or any(value not in (0, 1) for value in mask):
            raise UsageError(f"{where}: loss_mask: need {len(ids)} values 0 or 1")
        ids = ids[: mask.index(1)] if 1 in mask else ids
    return ids or None


def _from_messages(key: str) -> Callable[[Row, str], str | None]:
    def read(row: Row, where: str) -> str | None:
        for message in _list(row, key, where):
            if not isinstance(message, dict):
                raise UsageError(f"{where}: {key}: need objects, got {type(message).__name__}")
            if message.get("role", message.get("from")) in _USER_ROLES:
                return _content(message.get("content", message.get("value")), key, where)
        return None

    return read


def _content(content: object, key: str, where: str) -> str:
    """Return the text of a message: a string, or OpenAI's list of parts of type `text`."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    found = [part.get("text") for part in parts if isinstance(part, dict)]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) != len(parts):
        raise UsageError(f"{where}: {key}: a user message holds something that is not text")
    return "".join(texts)


def _from_turns(row: Row, where: str) -> str | None:
    turns = _list(row, "turns", where)
    if any(not isinstance(turn, str) for turn in turns):
        raise UsageError(f"{where}: turns: need strings")
    return turns[0] if turns else None


def _from_prompt(row: Row, where: str) -> str | None:
    if isinstance(row["prompt"], list):
        return _from_messages("prompt")(row, where)
    return _string(row, "prompt", where)


def _from_instruction(row: Row, where: str) -> str:
    instruction = _string(row, "instruction", where)
    context = _string(row, "input", where) if row.get("input") is not None else ""
    return f"{instruction}\n\n{context}" if context.strip() else instruction


def _from_text(text: str, where: str, marks: UserTurnMarks) -> str:
    before, after = marks()
    start = text.find(before)
    if start < 0:
        raise UsageError(f"{where}: text: no user turn {before!r} of the tokenizer's template")
    # A text may end with its user turn, so the closing mark is optional.
    return text[start + len(before) :].partition(after)[0]


_READERS: dict[str, Callable[[Row, str], str | list[int] | None]] = {
    "input_ids": _from_input_ids,
    "messages": _from_messages("messages"),
    "conversations": _from_messages("conversations"),
    "turns": _from_turns,
    "prompt": _from_prompt,
    "instruction": _from_instruction,
}

# All keys that the table above names; `loss_mask` and `input` only go with another.
FORMAT_KEYS = (*_READERS, "text", "loss_mask", "input")
