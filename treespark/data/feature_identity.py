# SPDX-License-Identifier: Apache-2.0
"""What a feature store was computed with, written in its manifest: other stores are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

from treespark.data.feature_rows import RowLayout
from treespark.errors import UsageError
from treespark.target.template import template_fingerprint, tokenizer_fingerprint

if TYPE_CHECKING:
    from pathlib import Path

    from treespark.target.model import TargetModel

FORMAT = 1
MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Identity:
    """What every row of a store depends on.  The rest, its tokens, is in the row's key."""

    target: str
    tokenizer: str
    chat_template: str | None
    target_layer_ids: list[int]
    hidden_size: int
    dtype: str
    taps_dtype: str

    @classmethod
    def of(cls, target: TargetModel, taps_dtype: str) -> Identity:
        """Return the identity of rows that `target` computes with the taps it has now."""
        tokenizer = target.tokenizer
        has_template = getattr(tokenizer, "chat_template", None) is not None
        return cls(
            target.fingerprint,
            tokenizer_fingerprint(tokenizer),
            template_fingerprint(tokenizer) if has_template else None,
            list(target.target_layer_ids),
            target.hidden_size,
            str(target.dtype).removeprefix("torch."),
            taps_dtype,
        )

    @classmethod
    def read(cls, folder: Path) -> Identity:
        """Return the identity of the store in `folder`; raises UsageError where there is none."""
        path = folder / MANIFEST
        manifest = read_json(path)
        if manifest.get("format") != FORMAT:
            raise UsageError(
                f"feature store {path}: format {manifest.get('format')}, this version of treespark "
                f"reads {FORMAT}; delete {folder} to compute its rows anew, or use the version "
                "that wrote it"
            )
        try:
            identity = cls(**manifest["identity"])
            identity.layout.num_bytes(2, 1)
        except (KeyError, TypeError, AttributeError):
            raise DamagedFileError(path, "not the manifest of a store") from None
        return identity

    @property
    def layout(self) -> RowLayout:
        """The tensors of a row."""
        dtype = getattr(torch, self.dtype)
        return RowLayout(len(self.target_layer_ids), self.hidden_size, dtype, self.taps_dtype)

    @property
    def digest(self) -> str:
        """16 hex digits, in the .json of every shard."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of the store; raises UsageError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"feature store {path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise DamagedFileError(path, "not JSON") from None
    if not isinstance(value, dict):
        raise DamagedFileError(path, "not an object")
    return value


class DamagedFileError(UsageError):
    """The refusal of a file of a store.  path: of that file."""

    def __init__(self, path: Path, reason: str) -> None:
        names = path.parent if path.name == MANIFEST else f"{path.stem}.safetensors and .json"
        super().__init__(
            f"feature store: {path} is damaged ({reason}); delete {names} to compute its rows anew"
        )
        self.path = path
