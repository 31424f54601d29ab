# SPDX-License-Identifier: Apache-2.0
"""JSON objects as dataclasses: the keys and the types that their fields say, or a refusal."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from treespark.errors import UsageError

AnyRow = TypeVar("AnyRow")


def row_of(kind: type[AnyRow], values: Any, where: str) -> AnyRow:
    """Return a row as its dataclass; raises UsageError, begun by `where`, for any other shape."""
    if not isinstance(values, dict):
        raise UsageError(f"{where}: need an object, got {type(values).__name__}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for name in values:
        if name not in fields:
            raise UsageError(f"{where}: unknown key {name!r}")
    for name, f in fields.items():
        has_default = (f.default, f.default_factory) != (dataclasses.MISSING,) * 2
        if name not in values and not has_default:
            raise UsageError(f"{where}: missing key {name!r}")
    check_types(kind, values, where)
    return kind(**values)


def check_types(kind: type[Any], values: dict[str, Any], where: str) -> None:
    """Raise UsageError, begun by `where`, for a field whose value is not of its type."""
    try:
        _types_of(kind).model_validate(values)
    except ValidationError as problem:
        error = problem.errors(include_url=False)[0]
        name, told = ".".join(map(str, error["loc"])), error["msg"]
        raise UsageError(f"{where}: {name}: {error['input']!r} is not allowed: {told}") from None


@cache
def _types_of(kind: type[Any]) -> type[BaseModel]:
    """A model that only checks: None of its defaults is used, and nothing is converted."""
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    fields: dict[str, Any] = {name: (hint, None) for name, hint in get_type_hints(kind).items()}
    return create_model(kind.__name__, __config__=strict, **fields)
