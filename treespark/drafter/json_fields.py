# SPDX-License-Identifier: Apache-2.0
"""JSON files of drafter folders: read safely, refused by field."""

import json
import os
from pathlib import Path
from typing import Any

from treespark.errors import UsageError


def refusal(folder: Path, field: str, value: object, reason: str) -> UsageError:
    """Return the error for a field of a drafter folder."""
    return UsageError(f"drafter {folder}: {field} is {value!r}; {reason}")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of a drafter folder; raises `UsageError`."""
    # Unlike Path.is_dir this says no, too, where the system refuses the name itself.
    if not os.path.isdir(folder):
        raise UsageError(f"drafter {folder}: no such folder")
    path = folder / name
    if not path.is_file():
        raise UsageError(f"drafter {folder}: {name} is missing; not a drafter folder")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise UsageError(f"drafter {folder}: {name} is nested too deeply") from None
    except OSError as error:
        raise UsageError(f"drafter {folder}: {name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"drafter {folder}: {name} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UsageError(f"drafter {folder}: {name} must hold one JSON object")
    try:
        json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # JSON can spell half a surrogate pair; no file and no terminal takes one.
        raise UsageError(f"drafter {folder}: {name} has a lone surrogate in a string") from None
    return raw


def needed(folder: Path, raw: dict[str, Any], field: str, within: str = "") -> Any:
    """Return the value of a field that must be there, in the object `within` if that is named."""
    if raw.get(field) is None:
        name = f"{within}.{field}" if within else field
        raise UsageError(f"drafter {folder}: {name} is missing in config.json")
    return raw[field]


def nested(folder: Path, raw: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the object in a field that must be there."""
    value = needed(folder, raw, field)
    if not isinstance(value, dict):
        raise refusal(folder, field, value, "need an object")
    return value


def layer_numbers(folder: Path, field: str, value: object, shift: int = 0) -> list[int]:
    """Return a list of layer numbers with `shift` added; refuses anything else by field."""
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise refusal(folder, field, value, "need a list of layer numbers")
    return [number + shift for number in value]
