# SPDX-License-Identifier: Apache-2.0
"""Rows of a mixture's source: local JSONL files, or a data set by the `datasets` package."""

from collections.abc import Iterator, Sequence
from typing import Any

from treespark.data.jsonl import Row, iter_jsonl
from treespark.data.mixture_recipe import SourceSection
from treespark.errors import UsageError


def check_sources(sources: Sequence[SourceSection]) -> None:
    """Raise UsageError for a file that cannot be read, and for a missing `datasets` package.

    Before any source is read: a missing last file should not cost the download of the others.
    """
    for source in sources:
        for path in source.files:
            next(iter_jsonl(path), None)
        if source.dataset is not None:
            _load_dataset(source)


def read_source(source: SourceSection) -> Iterator[tuple[str, Row]]:
    """Yield (where it stands, row) of each row of a source, in its order.

    Raises UsageError for a file or data set that cannot be read, and for a file of bad JSON.
    """
    if source.dataset is None:
        for path in source.files:
            for number, row in iter_jsonl(path):
                yield f"{path}:{number}", row
        return
    where = f"{source.dataset}[{source.split}]"
    try:
        rows = _load_dataset(source)(
            source.dataset, name=source.config, split=source.split, revision=source.revision
        )
    # What `datasets` raises for a name, configuration or split that does not exist, for a data set
    # that is a program (RuntimeError), and for a broken connection (an OSError).
    except (OSError, ValueError, RuntimeError) as problem:
        reason = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise UsageError(
            f"source {source.name}: dataset {where}: cannot be loaded: {reason}"
        ) from None
    for index, row in enumerate(rows):
        yield f"{where}:{index}", row


def _load_dataset(source: SourceSection) -> Any:
    """Return the package's `load_dataset`; raises UsageError without the package."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UsageError(
            f"source {source.name}: dataset {source.dataset}: needs the package `datasets`, which "
            "is not installed (pip install datasets); or name local JSONL with `files`"
        ) from None
    return load_dataset


def is_selected(row: Row, source: SourceSection) -> bool:
    """Return whether a row has the values that the source's `where` asks for; none is null."""
    # true is no 1 and 1 no true, as in the file.
    return all(
        row.get(key) == value and isinstance(row.get(key), bool) == isinstance(value, bool)
        for key, value in source.where.items()
    )


def prompt_row(row: Row, source: SourceSection) -> Row:
    """Return the row with the columns of `treespark/data/formats.py`."""
    if not source.columns:
        return row
    return {key: row.get(column) for key, column in source.columns.items()}
