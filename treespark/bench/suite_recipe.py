# SPDX-License-Identifier: Apache-2.0
"""Recipes of `treespark bench suite`: YAML files that say what is measured, how, and where to.

Paths are relative to the recipe. `recipes/bench/` has examples.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from treespark.bench.workloads import HUB, WORKLOADS, select
from treespark.data.mixture_recipe import Name
from treespark.errors import UsageError
from treespark.recipe import Count, CountOrZero, TargetSection
from treespark.sections import ConflictError, Section, resolve_paths, validate
from treespark.yaml_source import Key, read_mapping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treespark.bench.workloads import Selection

# The default seed of DeepSpec's evaluation; the paper does not state its own (algorithms 6).
DEFAULT_SEED = 980406

Kind = Literal[
    "autoregressive",
    "eagle3",
    "dflash",
    "dspark",
    "dspark-threshold",
    "dspark-tree",
    "treespark",
    "ddtree",
    "calibrated",
    "best-first",
]


class DatasetSection(Section):
    """One workload of `treespark/bench/workloads.py`.

    count: None is the paper's. file: a JSONL file in place of the one in the `data` folder. hub:
    take it from the Hugging Face hub. traced_prompts: in place of the recipe's, as 0 for a set
    whose texts may not be shown to others.
    """

    name: Name
    count: Count | None = None
    file: Path | None = None
    hub: bool = False
    traced_prompts: CountOrZero | None = None

    @model_validator(mode="after")
    def _check(self) -> DatasetSection:
        if self.name not in WORKLOADS:
            message = f"{self.name!r} is not allowed: need one of {', '.join(WORKLOADS)}"
            raise ConflictError(message, "name")
        if self.hub and self.file is not None:
            raise ConflictError("give either file or hub", "file", "hub")
        return self


class MethodSection(Section):
    """One method; what is not given is as `treespark/bench/suite_methods.py` has it.

    method: what it is, None where its name says so. drafter: a name of the recipe's `drafters`.
    """

    name: Name
    method: Kind | None = None
    title: str | None = None
    drafter: Name | None = None
    depth: Annotated[int, Field(ge=1, le=64)] | None = None
    branching: Annotated[int, Field(ge=1, le=64)] | None = None
    budget: Annotated[int, Field(ge=0, le=1024)] | None = None
    frontier: Annotated[int, Field(ge=1, le=64)] | None = None
    proposal: Literal["conditioned", "marginal"] | None = None
    priority: Literal["probability", "survival"] | None = None
    stop: Literal["frontier", "budget", "threshold"] | None = None
    threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    alpha: Annotated[float, Field(gt=0)] | None = None
    beta: float | None = None
    min_confidence: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _check_title(self) -> MethodSection:
        if self.title is not None and not (self.title.strip() and self.title.isprintable()):
            message = f"title {self.title!r} is not allowed: need one line of printable characters"
            raise ConflictError(message, "title")
        return self


class SuiteRecipe(Section):
    """A whole evaluation.

    data: folder of the datasets' JSONL files. prompts_per_turn: with one request at a time the
    methods take turns after so many prompts of a dataset, otherwise (and where it is None) after
    the whole dataset. max_prompt_tokens: longer prompts are left out, none is cut. traced_prompts:
    first prompts of each dataset whose trees are recorded, for traced_tokens each. profile: time
    the phases of a round, for which an accelerator has to wait at each of them. baseline, control:
    methods that deltas are taken against.
    """

    target: TargetSection
    drafters: dict[Name, Path] = Field(default_factory=dict)
    data: Path | None = None
    datasets: tuple[DatasetSection, ...] = Field(min_length=1)
    methods: tuple[MethodSection, ...] = Field(min_length=1)
    concurrencies: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field((1,), min_length=1)
    repeats: Annotated[int, Field(ge=1, le=1000)] = 3
    max_tokens: Annotated[int, Field(ge=2, le=10**6)] = 2048
    max_prompt_tokens: Count | None = None
    prompts_per_turn: Count | None = None
    traced_prompts: CountOrZero = 0
    traced_tokens: Annotated[int, Field(ge=2, le=10**6)] = 64
    profile: bool = True
    keep_ids: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**32)] = DEFAULT_SEED
    baseline: Name | None = None
    control: Name | None = None
    out: Path

    @model_validator(mode="after")
    def _check_names(self) -> SuiteRecipe:
        for section in ("datasets", "methods"):
            names = [item.name for item in getattr(self, section)]
            for place, name in enumerate(names):
                if name in names[:place]:
                    message = f"{section}: name {name!r} given twice"
                    raise ConflictError(message, f"{section}.{place}.name")
        if len(set(self.concurrencies)) < len(self.concurrencies):
            message = f"concurrencies {list(self.concurrencies)}: one is given twice"
            raise ConflictError(message, "concurrencies")
        for place, method in enumerate(self.methods):
            if method.drafter is not None and method.drafter not in self.drafters:
                known = ", ".join(self.drafters) or "none"
                message = f"method {method.name}: drafter {method.drafter!r}: drafters: {known}"
                raise ConflictError(message, f"methods.{place}.drafter")
        return self

    @model_validator(mode="after")
    def _check_baselines(self) -> SuiteRecipe:
        names = [method.name for method in self.methods]
        for field in ("baseline", "control"):
            value = getattr(self, field)
            if value is not None and value not in names:
                message = f"{field} {value!r}: need one of the methods {', '.join(names)}"
                raise ConflictError(message, field)
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> SuiteRecipe:
        for place, dataset in enumerate(self.datasets):
            if self.data is None and dataset.file is None and not dataset.hub:
                message = f"dataset {dataset.name}: need file, hub, or data for all datasets"
                raise ConflictError(message, f"datasets.{place}.name")
        return self

    def chosen(self, names: Sequence[str]) -> set[str]:
        """Return the names of datasets to measure, all for none given.

        Raises UsageError for one that the recipe lacks.
        """
        known = [dataset.name for dataset in self.datasets]
        for name in names:
            if name not in known:
                raise UsageError(f"--dataset {name}: the recipe has {', '.join(known)}")
        return set(names or known)

    def num_traced(self, name: str) -> int:
        """Return of how many prompts of the dataset `name` trees are recorded."""
        own = next(d.traced_prompts for d in self.datasets if d.name == name)
        return self.traced_prompts if own is None else own

    def source(self, dataset: DatasetSection) -> Path | str:
        """Return where a dataset comes from: file, folder or HUB."""
        if dataset.hub:
            return HUB
        if dataset.file is not None:
            return dataset.file
        assert self.data is not None
        return self.data


_PATH_KEYS: tuple[Key, ...] = (
    ("target", "model"),
    ("data",),
    ("datasets", "*", "file"),
    ("out",),
)


def load_suite_recipe(path: Path) -> SuiteRecipe:
    """Return the recipe in the YAML file `path`, all paths absolute.

    Raises UsageError, begun by file:line, as `treespark.recipe.load_recipe` does.
    """
    values, origins = read_mapping(path)
    drafters = values.get("drafters")
    names = [("drafters", name) for name in drafters] if isinstance(drafters, dict) else []
    resolve_paths(values, [*_PATH_KEYS, *names], path.parent, origins)
    return validate(SuiteRecipe, values, path, origins)


def select_prompts(recipe: SuiteRecipe, tokenizer: Any) -> list[Selection]:
    """Return the prompts of the datasets, in their order; raises UsageError as `select`."""
    return [
        select(
            WORKLOADS[section.name],
            recipe.source(section),
            tokenizer,
            count=section.count,
            seed=recipe.seed,
            max_prompt_tokens=recipe.max_prompt_tokens,
        )
        for section in recipe.datasets
    ]
