# SPDX-License-Identifier: Apache-2.0
"""Sections of YAML recipes, training's and others': typed, frozen, with the place of every mistake.

`treespark/yaml_source.py` reads the file; a recipe's module names its sections and its paths.
"""

from __future__ import annotations

import difflib
import typing
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from treespark.errors import UsageError
from treespark.yaml_source import Key, Origins, absolute

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pydantic_core import ErrorDetails


class ConflictError(ValueError):
    """Values that do not go together, and the fields that hold them, from the section on."""

    def __init__(self, message: str, *fields: str) -> None:
        super().__init__(message)
        self.fields = fields


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic takes true for 1; in a recipe that is a slip of the pen.
        field = cls.model_fields[info.field_name] if info.field_name else None
        if isinstance(value, bool) and field and field.annotation is not bool:
            raise ValueError(f"{value} is not allowed: not a field for true or false")
        return value

    def _check_multiple(self, field: str, *, of: str) -> None:
        value, unit = getattr(self, field), getattr(self, of)
        if value % unit:
            raise ConflictError(f"{field} {value} must be a multiple of {of} {unit}", field, of)


AnySection = typing.TypeVar("AnySection", bound=Section)


def validate(
    root: type[AnySection], values: dict[str, Any], source: Path, origins: Origins
) -> AnySection:
    """The `root` section that `values` of the file `source` make; raises UsageError."""
    try:
        return root.model_validate(values)
    except ValidationError as problem:
        raise UsageError(_explain(problem, root, source, origins)) from None


def resolve_paths(
    values: Any, keys: Sequence[Key], folder: Path, origins: Origins, outer: Key = ()
) -> None:
    """Make the paths at `keys` of `values` absolute, in place; `*` stands for each of a list."""
    for name, *rest in keys:
        if name == "*":
            for index, item in enumerate(values if isinstance(values, list) else ()):
                resolve_paths(item, [tuple(rest)], folder, origins, (*outer, str(index)))
        elif isinstance(values, dict) and name in values:
            key = (*outer, name)
            if rest:
                resolve_paths(values[name], [tuple(rest)], folder, origins, key)
                continue
            where = f"{origins[key]}: {'.'.join(key)}"
            values[name] = map_paths(values[name], partial(absolute, folder=folder, where=where))


def map_paths(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to a path or each of a list; the rest is left for validation to refuse."""
    if isinstance(value, str):
        return change(value)
    return [map_paths(item, change) for item in value] if isinstance(value, list) else value


def _explain(
    problem: ValidationError, root: type[BaseModel], source: Path, origins: Origins
) -> str:
    """The first mistake on one line: where, which key, what is allowed."""
    errors = problem.errors(include_url=False)
    # A list whose items are wrong is called too short as well.
    places = [error["loc"] for error in errors]
    errors = [e for e in errors if not any(_is_inside(place, e["loc"]) for place in places)]
    # A misspelt key is the likely reason of other complaints, as that the right one is missing.
    error = min(errors, key=lambda e: e["type"] != "extra_forbidden")
    key = tuple(str(part) for part in error["loc"])
    where = _where(key, error, origins) or str(source)
    dotted = ".".join(key)
    if error["type"] == "extra_forbidden":
        fields = _section_fields(root, key[:-1])
        near = difflib.get_close_matches(key[-1], fields, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(fields)}"
        message = f"unknown key {dotted!r}: {hint}"
    elif error["type"] == "missing":
        message = f"missing key '{dotted}'"
    elif error["type"] == "value_error":
        message = ": ".join(filter(None, [dotted, error["msg"].removeprefix("Value error, ")]))
    else:
        message = f"{dotted}: {error['input']!r} is not allowed: {_allowed(root, key, error)}"
    return f"{where}: {message}" + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else "")


def _is_inside(place: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    return len(place) > len(outer) and place[: len(outer)] == outer


def _where(key: Key, error: ErrorDetails, origins: Origins) -> str | None:
    """Where the mistake at `key` was made; of several fields an option's is the likely culprit."""
    fields = getattr(error.get("ctx", {}).get("error"), "fields", ())
    parts = [(*key, *field.split(".")) for field in fields]
    prefixes = [key[:length] for length in range(len(key), 0, -1)]
    places = [origins[k] for k in (*parts, *prefixes) if k in origins]
    return "--set" if "--set" in places[: len(parts)] else next(iter(places), None)


def _section_fields(section: type[BaseModel], key: Key) -> dict[str, FieldInfo]:
    """Fields of the section at `key` below one; empty where `key` is not a section."""
    # The number of an item in a list of sections: all are alike.
    for part in (part for part in key if not part.isdigit()):
        info = section.model_fields.get(part)
        choices = () if info is None else (info.annotation, *typing.get_args(info.annotation))
        found = [c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)]
        if not found:
            return {}
        section = found[0]
    return section.model_fields


_NEEDS = {
    "tuple_type": "a list",
    "too_short": "a list that is not empty",
    "model_type": "a section of keys",
    "dict_type": "a section of keys",
    "path_type": "a path",
}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "a multiple of"}


def _allowed(root: type[BaseModel], key: Key, error: ErrorDetails) -> str:
    """What the field takes: its whole range where it is a number with bounds."""
    if error["type"] in _NEEDS:
        return f"need {_NEEDS[error['type']]}"
    info = _section_fields(root, key[:-1]).get(key[-1])
    metadata = [] if info is None else [*info.metadata]
    for choice in () if info is None else typing.get_args(info.annotation):
        # `int | None` keeps the bounds of `int` one level down.
        for part in getattr(choice, "__metadata__", ()):
            metadata += part.metadata if isinstance(part, FieldInfo) else [part]
    bounds = [
        f"{word} {getattr(part, name)}"
        for part in metadata
        for name, word in _BOUNDS.items()
        if hasattr(part, name)
    ]
    return "need " + " and ".join(bounds) if bounds else error["msg"][:1].lower() + error["msg"][1:]
