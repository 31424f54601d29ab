# SPDX-License-Identifier: Apache-2.0
"""YAML files as nested dicts that remember the line of every key, and dotted overrides."""

from __future__ import annotations

import os
import re
import reprlib
from typing import TYPE_CHECKING, Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Key = tuple[str, ...]
# Where the value of a key came from, as shown to the user: file:line, or the option.
Origins = dict[Key, str]

# A recipe is four levels deep; far beyond any number of one, and Python's own limits.
_MAX_DEPTH = 16
_MAX_BITS = 512

# A YAML string can spell half a surrogate pair, which no encoded name holds.
_NOT_IN_PATHS = re.compile("[\0\ud800-\udfff]")


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
        root, values = _parse(text)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UsageError(f"{where}: bad YAML: {_reason(problem)}") from None
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, dict):
        raise UsageError(f"{path}: need a mapping of sections, as in `target: {{model: ...}}`")
    return values, {key: f"{path}:{line}" for key, line in _lines(root, path)}


class _Loader(yaml.SafeLoader):
    """YAML whose keys are strings as written and whose every mistake is a YAMLError."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        # An alias may hold itself, or make of a short file more values than memory can take.
        if self.check_event(yaml.AliasEvent):
            raise ComposerError(None, None, "aliases (*) are not allowed", mark)
        if self._depth == _MAX_DEPTH:
            raise ComposerError(None, None, "nested too deeply", mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                key.tag = "tag:yaml.org,2002:str"
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            # Python refuses to print integers of thousands of digits, as a message has to.
            if isinstance(value, int) and value.bit_length() > _MAX_BITS:
                raise OverflowError
        except (ValueError, LookupError, AttributeError, OverflowError):
            # What PyYAML's own readers of numbers, dates and booleans raise for other texts.
            kind = node.tag.rpartition(":")[2]
            reason = f"{reprlib.repr(node.value)} cannot be read as {kind}"
            raise ConstructorError(None, None, reason, node.start_mark) from None
        return value


def _parse(text: str) -> tuple[yaml.Node | None, Any]:
    """Root node and value of a YAML document; raises YAMLError."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def _reason(problem: yaml.YAMLError) -> str:
    """What is wrong, on one line."""
    return " ".join(str(getattr(problem, "problem", None) or problem).split())


def _lines(node: yaml.MappingNode, path: Path, prefix: Key = ()) -> Iterator[tuple[Key, int]]:
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        name, line = str(key_node.value), key_node.start_mark.line + 1
        key = (*prefix, name)
        if name in seen:
            raise UsageError(
                f"{path}:{line}: key {'.'.join(key)!r} given twice, first in line {seen[name]}"
            )
        seen[name] = line
        yield key, line
        yield from _inner_lines(value_node, path, key)


def _inner_lines(node: yaml.Node, path: Path, key: Key) -> Iterator[tuple[Key, int]]:
    """Lines of what the value at `key` holds: of a mapping's keys, of a list's items."""
    if isinstance(node, yaml.MappingNode):
        yield from _lines(node, path, key)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            inner = (*key, str(index))
            yield inner, item.start_mark.line + 1
            yield from _inner_lines(item, path, inner)


def parse_override(text: str) -> tuple[Key, Any]:
    """Key and value of `section.key=value`, the value being YAML; else raises UsageError."""
    dotted, equals, value = text.partition("=")
    key = tuple(part.strip() for part in dotted.split("."))
    if not equals or len(key) < 2 or not all(key):
        raise UsageError(f"--set {text}: need section.key=value, as in --set train.seed=1")
    try:
        return key, _parse(value)[1]
    except yaml.YAMLError as problem:
        reason = _reason(problem)
        raise UsageError(f"--set {text}: the value is not YAML ({reason}); quote it") from None


def absolute(text: str, folder: Path, where: str) -> str:
    """The path that `text` means in `folder`; raises UsageError for one that no file can have."""
    if _NOT_IN_PATHS.search(text):
        raise UsageError(f"{where}: {text!r} is not allowed: a path has no such characters")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise UsageError(f"{where}: {text!r} is not allowed: no such user (a name is ./~name)")
    return os.path.abspath(folder / path)


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `change` replaced: mappings key by key, lists as a whole."""
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        merged[key] = (
            merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return merged
