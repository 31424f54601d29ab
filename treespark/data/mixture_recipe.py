# SPDX-License-Identifier: Apache-2.0
"""Mixture recipes: YAML files that say from which sources a training mixture is made.

Paths are relative to the recipe. `recipes/mixture-paper.yaml` is one with all kinds of keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from treespark.data.formats import FORMAT_KEYS
from treespark.recipe import Count
from treespark.sections import ConflictError, Section, resolve_paths, validate
from treespark.yaml_source import Key, read_mapping

# Names stand in ids, in the report and in messages.
Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]


class DecontaminationSection(Section):
    """Files whose prompts must not occur, and the share of their trigrams that is too much."""

    evaluation: tuple[Path, ...] = Field(min_length=1)
    trigram_share: Annotated[float, Field(gt=0, le=1)] = 0.10


class SourceSection(Section):
    """One source: local JSONL files, or a data set that the `datasets` package reads.

    where: values that a row's columns must have. columns: for a source whose columns have other
    names than those of `treespark/data/formats.py`, {name there: name in the source}; other columns
    are not looked at then.
    """

    name: Name
    category: Name
    quota: Count
    files: tuple[Path, ...] = ()
    dataset: str | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    where: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    columns: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_origin(self) -> SourceSection:
        if bool(self.files) == (self.dataset is not None):
            message = f"source {self.name}: need either files or dataset"
            raise ConflictError(message, "files", "dataset")
        given = [k for k in ("config", "split", "revision") if k in self.model_fields_set]
        if self.files and given:
            message = f"{given[0]} {getattr(self, given[0])}: goes with dataset, not with files"
            raise ConflictError(message, given[0])
        wrong = [key for key in self.columns if key not in FORMAT_KEYS]
        if wrong:
            message = f"columns: {wrong[0]!r} is not allowed: need one of {', '.join(FORMAT_KEYS)}"
            raise ConflictError(message, "columns")
        return self


class Mixture(Section):
    """A whole mixture. The pool of all sources' draws is shuffled and cut at `count`."""

    out: Path
    tokenizer: Path
    max_prompt_tokens: Count = 2048
    count: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    decontamination: DecontaminationSection | None = None
    sources: tuple[SourceSection, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_sources(self) -> Mixture:
        names = [source.name for source in self.sources]
        for place, name in enumerate(names):
            if name in names[:place]:
                message = f"source name {name!r} given twice"
                raise ConflictError(message, f"sources.{place}.name")
        pool = sum(source.quota for source in self.sources)
        if self.count is not None and self.count > pool:
            message = f"count {self.count}: allowed 1..{pool}, the sum of all quotas"
            raise ConflictError(message, "count")
        return self


PATH_KEYS: tuple[Key, ...] = (
    ("out",),
    ("tokenizer",),
    ("decontamination", "evaluation"),
    ("sources", "*", "files"),
)


def load_mixture(path: Path) -> Mixture:
    """Return the mixture in the YAML file `path`, all paths absolute.

    Raises UsageError, begun by file:line, as `treespark.recipe.load_recipe` does.
    """
    values, origins = read_mapping(path)
    resolve_paths(values, PATH_KEYS, path.parent, origins)
    return validate(Mixture, values, path, origins)
