# SPDX-License-Identifier: Apache-2.0
"""Training rows, their order, and the anchors drawn from them.

Everything random here is a pure function of (seed, position), so a resumed run sees the same rows
and anchors as an uninterrupted one without saving a generator. Shapes: S rows of a micro-batch, L
padded length, A anchors, B draft depths.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treespark.data.jsonl import UniqueIds, read_jsonl
from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt with the target's continuation; tokens from `prompt_len` on are supervised."""

    id: str
    token_ids: np.ndarray  # [L] int64
    prompt_len: int

    def loss_mask(self) -> np.ndarray:
        """[L] bool, True on the continuation."""
        return np.arange(len(self.token_ids)) >= self.prompt_len


@dataclasses.dataclass
class Batch:
    """A padded micro-batch with its anchors.

    input_ids [S, L] int64 (0 on padding), lengths [S] int64, loss_mask [S, L] bool, anchors [S, A]
    int64 ascending (0 where dummy), keep [S, A] bool, tree_keep [S, A] bool subset of keep.
    """

    rows: list[Row]
    input_ids: Tensor
    lengths: Tensor
    loss_mask: Tensor
    anchors: Tensor
    keep: Tensor
    tree_keep: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`."""
        moved = {
            f.name: getattr(self, f.name).to(device)
            for f in dataclasses.fields(self)
            if f.name != "rows"
        }
        return dataclasses.replace(self, **moved)


def load_rows(
    paths: Sequence[Path],
    *,
    max_tokens: int,
    block_size: int,
    vocab_size: int,
    max_context: int | None = None,
    fingerprint: str | None = None,
) -> tuple[list[Row], Counter[str]]:
    """Read continuation files into rows cut at `max_tokens`, and count what was dropped and why.

    Rows with fewer than 2 * block_size supervised tokens teach little. Rows with the tokens of an
    earlier one could be trained on and held out at once. max_context: of the target, which knows
    no positions beyond. fingerprint: of the target, for rows that say whose answers they are.
    Raises UsageError for a `max_tokens` above it, unreadable files, an id that is no string or
    integer or comes twice, token ids outside the vocabulary, answers of another target, or when
    nothing is left.
    """
    if max_context is not None and max_tokens > max_context:
        raise UsageError(
            f"data.max_tokens {max_tokens}: allowed 2..{max_context} (context of the target)"
        )
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    ids, contents = UniqueIds(), set[bytes]()
    for path in paths:
        for line_number, record in read_jsonl(path):
            where = f"{path}:{line_number}"
            row_id = str(record.get("id", where))
            ids.add(row_id, path, line_number)
            _check_maker(record, where, fingerprint)
            prompt = _token_ids(record, "prompt_token_ids", where, vocab_size)
            output = _token_ids(record, "output_token_ids", where, vocab_size)
            token_ids = np.asarray((prompt + output)[:max_tokens], dtype=np.int64)
            if len(token_ids) - len(prompt) < 2 * block_size:
                dropped["too few supervised tokens"] += 1
            elif token_ids.tobytes() in contents:
                dropped["same tokens as an earlier row"] += 1
            else:
                contents.add(token_ids.tobytes())
                rows.append(Row(row_id, token_ids, len(prompt)))
    if not rows:
        reasons = ", ".join(f"{count} {why}" for why, count in dropped.items())
        names = ", ".join(map(str, paths))
        raise UsageError(
            f"data.continuations {names}: 0 of {sum(dropped.values())} rows usable"
            f" ({reasons or 'nothing in the files'})"
        )
    return rows, dropped


def _check_maker(record: dict[str, Any], where: str, fingerprint: str | None) -> None:
    """Refuse another target's answer: its ids may mean other tokens, and it is another text."""
    gen = record.get("gen")
    made_by = gen.get("fingerprint") if isinstance(gen, dict) else None
    # A server does not say which weights it runs.
    if fingerprint is None or made_by in (None, "server", fingerprint):
        return
    raise UsageError(
        f"{where}: answer of the target {str(made_by)[:16]} ({gen.get('model')}), this target is "
        f"{fingerprint[:16]}; let it answer itself (`treespark continuations`)"
    )


def _token_ids(record: dict[str, Any], field: str, where: str, vocab_size: int) -> list[int]:
    """One list of ids of a row. Raises UsageError naming the line and the field."""
    if field not in record:
        raise UsageError(f"{where}: no field {field} (`treespark continuations` writes it)")
    values = record[field]
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise UsageError(f"{where}: {field} must be a list of token ids")
    outside = [value for value in values if not 0 <= value < vocab_size]
    if outside:
        raise UsageError(f"{where}: {field}: id {outside[0]}, allowed 0..{vocab_size - 1}")
    return values


def split_holdout(rows: list[Row], count: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Training rows and `count` held-out rows, the same split for every run with this seed."""
    if count >= len(rows):
        raise UsageError(f"data.holdout_rows {count}: only {len(rows)} rows are usable")
    order = np.random.default_rng([seed, 1]).permutation(len(rows))
    held = set(order[:count].tolist())
    return [r for i, r in enumerate(rows) if i not in held], [rows[i] for i in order[:count]]


def rows_of_step(
    rows: Sequence[Row], step: int, global_batch: int, seed: int
) -> list[tuple[int, Row]]:
    """The `global_batch` (draw number, row) pairs of one optimizer step; every epoch is one
    permutation.
    """
    return [_draw(rows, step * global_batch + i, seed) for i in range(global_batch)]


def _draw(rows: Sequence[Row], number: int, seed: int) -> tuple[int, Row]:
    epoch, index = divmod(number, len(rows))
    return number, rows[_epoch_order(len(rows), seed, epoch)[index]]


@functools.lru_cache(maxsize=4)
def _epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, 2, epoch]).permutation(count)


def valid_anchors(loss_mask: np.ndarray) -> np.ndarray:
    """Positions whose own and next token are both supervised (algorithms.md 2.1), ascending."""
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:])


def sample_anchors(
    loss_mask: np.ndarray, num_anchors: int, num_tree_anchors: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Anchors uniformly without replacement, ascending, and which of them also grow a tree
    (bool).
    """
    positions = valid_anchors(loss_mask)
    chosen = np.sort(rng.choice(positions, size=min(num_anchors, len(positions)), replace=False))
    tree = np.zeros(len(chosen), dtype=bool)
    tree[rng.choice(len(chosen), size=min(num_tree_anchors, len(chosen)), replace=False)] = True
    return chosen, tree


def collate(
    draws: Sequence[tuple[int, Row]], *, num_anchors: int, num_tree_anchors: int, seed: int
) -> Batch:
    """Pad rows to one batch and draw their anchors; padding slots are dummies with keep False."""
    rows = [row for _, row in draws]
    length = max(len(row.token_ids) for row in rows)
    shape = (len(rows), num_anchors)
    input_ids = np.zeros((len(rows), length), dtype=np.int64)
    loss_mask = np.zeros((len(rows), length), dtype=bool)
    anchors, keep, tree = (
        np.zeros(shape, dtype=np.int64),
        np.zeros(shape, dtype=bool),
        np.zeros(shape, dtype=bool),
    )
    for i, (number, row) in enumerate(draws):
        size = len(row.token_ids)
        input_ids[i, :size] = row.token_ids
        loss_mask[i, :size] = row.loss_mask()
        rng = np.random.default_rng([seed, 3, number])
        chosen, grows = sample_anchors(loss_mask[i, :size], num_anchors, num_tree_anchors, rng)
        anchors[i, : len(chosen)], keep[i, : len(chosen)], tree[i, : len(chosen)] = (
            chosen,
            True,
            grows,
        )
    return Batch(
        rows=rows,
        input_ids=torch.from_numpy(input_ids),
        lengths=torch.tensor([len(row.token_ids) for row in rows]),
        loss_mask=torch.from_numpy(loss_mask),
        anchors=torch.from_numpy(anchors),
        keep=torch.from_numpy(keep),
        tree_keep=torch.from_numpy(tree),
    )


def micro_batches(
    draws: Sequence[tuple[int, Row]], size: int
) -> Iterator[Sequence[tuple[int, Row]]]:
    """Split the draws of one step into groups of at most `size`."""
    for start in range(0, len(draws), size):
        yield draws[start : start + size]
