# SPDX-License-Identifier: Apache-2.0
"""YAML files as nested dicts that remember the line of every key, and dotted overrides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Key = tuple[str, ...]
# Where the value of a key came from, as shown to the user: file:line, or the option.
Origins = dict[Key, str]


def read_mapping(path: Path) -> tuple[dict[str, Any], Origins]:
    """Values of the YAML mapping in `path`, and file:line of each of its keys.

    Raises UsageError for an unreadable file, bad YAML (file:line), anything but a mapping, or a key
    given twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"{path}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode):
            raise UsageError(f"{path}: need a mapping of sections, as in `target: {{model: ...}}`")
        return yaml.safe_load(text), {key: f"{path}:{line}" for key, line in _lines(root, path)}
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = getattr(problem, "problem", None) or problem
        raise UsageError(f"{where}: bad YAML: {reason}") from None


def _lines(node: yaml.MappingNode, path: Path, prefix: Key = ()) -> Iterator[tuple[Key, int]]:
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        name, line = str(key_node.value), key_node.start_mark.line + 1
        key = (*prefix, name)
        if name in seen:
            raise UsageError(
                f"{path}:{line}: key '{'.'.join(key)}' given twice, first in line {seen[name]}"
            )
        seen[name] = line
        yield key, line
        if isinstance(value_node, yaml.MappingNode):
            yield from _lines(value_node, path, key)


def parse_override(text: str) -> tuple[Key, Any]:
    """Key and value of `section.key=value`, the value being YAML; else raises UsageError."""
    dotted, equals, value = text.partition("=")
    key = tuple(part.strip() for part in dotted.split("."))
    if not equals or len(key) < 2 or not all(key):
        raise UsageError(f"--set {text}: need section.key=value, as in --set train.seed=1")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise UsageError(f"--set {text}: the value is not YAML; quote it") from None


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `change` replaced: mappings key by key, lists as a whole."""
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        merged[key] = (
            merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return merged
