# SPDX-License-Identifier: Apache-2.0
"""What the feature store keeps of a row, in which form, and how many bytes that is.

Training reads less than a target computes. A block sees the features before its anchor, and the
last anchor of a row is L - 2 (algorithms.md 2.1): features of positions 0 .. L-3 are kept, those of
the prompt too, for they are context. Teacher distributions are needed where a supervised token is
predicted: last hidden states of positions P-1 .. L-2 are kept. The rest reads as zeros.

Shapes: L tokens of a row, P of them its prompt, m taps, H target hidden size.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from treespark.data.batches import Row

Kept = dict[str, "Tensor"]
"""The stored tensors of one row by name, on the host, in the order of `RowLayout.tensors`."""

# Stored type of rounded taps, and the largest number that each token's values are scaled to.
_ROUNDED = {"int8": (torch.int8, 127.0), "float8_e4m3": (torch.float8_e4m3fn, 448.0)}


class RowFeatures(NamedTuple):
    """The target's view of a row.

    features: [n, m*H] of its first n tokens.  last_hidden: [k, H] of tokens start .. start + k - 1.
    """

    features: Tensor
    last_hidden: Tensor
    start: int


@dataclass(frozen=True)
class RowLayout:
    """The tensors of a stored row.  dtype: the target's.  taps_dtype: plain, which is the same,
    int8 or float8_e4m3, with one float32 scale for each token and tap.
    """

    num_taps: int
    hidden_size: int
    dtype: torch.dtype
    taps_dtype: str = "plain"

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return name -> dtype and shape of one token's part."""
        width = (self.num_taps, self.hidden_size)
        found = {
            "tokens": (torch.int32, ()),
            "taps": (self.dtype, width),
            "last_hidden": (self.dtype, width[1:]),
        }
        if self.taps_dtype != "plain":
            found["taps"] = (_ROUNDED[self.taps_dtype][0], width)
            found["scale"] = (torch.float32, width[:1])
        return found

    def counts(self, tokens: float, prompt: float) -> dict[str, float]:
        """Return name -> how many tokens of a row of `tokens`, `prompt` in front, are kept."""
        kept = {"tokens": tokens, "last_hidden": tokens - max(prompt, 1)}
        return {name: kept.get(name, tokens - 2) for name in self.tensors()}

    def num_bytes(self, tokens: float, prompt: float) -> float:
        """Return the bytes of a row; of mean numbers of tokens, the mean (prompt at least 1)."""
        counts = self.counts(tokens, prompt)
        return sum(
            counts[name] * dtype.itemsize * math.prod(shape)
            for name, (dtype, shape) in self.tensors().items()
        )

    def row_bytes(self, row: Row) -> int:
        """Return the bytes of `row`, without the headers of its file."""
        return int(self.num_bytes(len(row.token_ids), row.prompt_len))

    def keep(self, row: Row, features: Tensor, last_hidden: Tensor) -> Kept:
        """Return what is stored of features [L, m*H] and last hidden states [L, H]."""
        length, first = len(row.token_ids), max(row.prompt_len, 1) - 1
        taps = self._taps(features[: length - 2].cpu())
        kept = {
            "tokens": torch.from_numpy(row.token_ids.astype("int32")),
            "last_hidden": last_hidden[first : length - 1].cpu(),
        }
        if self.taps_dtype == "plain":
            kept["taps"] = taps
        else:
            kept["taps"], kept["scale"] = _rounded(taps, self.taps_dtype)
        return {name: kept[name].contiguous() for name in self.tensors()}

    def view(self, kept: Kept, device: torch.device) -> RowFeatures:
        """Return the view of a row that training gets from what is stored."""
        taps, hidden = kept["taps"], kept["last_hidden"]
        if self.taps_dtype == "plain":
            features = taps.to(device)
        else:
            features = _restored(taps, kept["scale"], self.dtype, device)
        start = len(kept["tokens"]) - 1 - len(hidden)
        return RowFeatures(features.flatten(1), hidden.to(device), start)

    def as_stored(self, features: Tensor) -> Tensor:
        """Return features [n, m*H] with the rounding that the store would give them."""
        if self.taps_dtype == "plain":
            return features
        values, scale = _rounded(self._taps(features.cpu()), self.taps_dtype)
        return _restored(values, scale, self.dtype, features.device).flatten(1)

    def _taps(self, features: Tensor) -> Tensor:
        return features.view(len(features), self.num_taps, self.hidden_size)


def _rounded(taps: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Values [n, m, H] and scales [n, m] float32 of taps; what is not finite makes its scale so.

    On the host: not every device has the types.
    """
    dtype, largest = _ROUNDED[kind]
    scale = taps.float().abs().amax(-1) / largest
    # Only zeros: any scale gives them back.
    scale = torch.where(scale == 0, 1.0, scale)
    values = (taps.float() / scale[..., None]).clamp(-largest, largest)
    return (values.round() if kind == "int8" else values).to(dtype), scale


def _restored(values: Tensor, scale: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if values.is_floating_point():
        # Holds each number of an 8-bit float exactly, and every device has it.
        values = values.to(torch.bfloat16)
    return (values.to(device).float() * scale.to(device)[..., None]).to(dtype)


def row_key(row: Row) -> str:
    """Return 32 hex digits of everything a stored row depends on beside the store's identity."""
    content = f"{row.prompt_len} ".encode() + row.token_ids.astype("<i8").tobytes()
    return hashlib.sha256(content).hexdigest()[:32]


def checksum(kept: Kept) -> str:
    """Return the crc32 of a stored row, hex."""
    value = 0
    for tensor in kept.values():
        value = zlib.crc32(memoryview(tensor.view(torch.uint8).numpy()), value)
    return f"{value:08x}"


def rows_that_fit(rows: Iterable[Row], layout: RowLayout, limit: int | None) -> list[Row]:
    """Return distinct rows in the order of their keys up to the first that exceeds `limit` bytes.

    The order of the keys is as good as random and the same for everyone, in whichever order the
    rows come. None: no limit.
    """
    chosen, total = [], 0
    for _, row in sorted({row_key(row): row for row in rows}.items()):
        total += layout.row_bytes(row)
        if limit is not None and total > limit:
            break
        chosen.append(row)
    return chosen
