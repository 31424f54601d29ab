# SPDX-License-Identifier: Apache-2.0
"""Run folders that belong together: one target, one setting, no cell twice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from treespark.bench.suite_records import CellKey, SuiteRun
from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treespark.bench.suite_records import DatasetRow, MethodRow, SuiteSetting

# The method whose gains the paper is about, by its name in treespark/bench/suite_methods.py.
TREESPARK = "treespark"
# What the runs of one study must have in common, for their numbers to stand in one table.
_COMMON = ("max_tokens", "dtype", "device", "threads", "seed", "baseline", "control")


@dataclass(frozen=True)
class Study:
    """Runs of one target.  name: the last part of the target's path."""

    name: str
    runs: list[SuiteRun]

    @property
    def setting(self) -> SuiteSetting:
        """The setting of the first run; the others agree in all that numbers depend on."""
        return self.runs[0].setting

    @cached_property
    def datasets(self) -> list[DatasetRow]:
        """All datasets, in the order of the runs."""
        return list({d.name: d for run in self.runs for d in run.setting.datasets}.values())

    @cached_property
    def methods(self) -> list[MethodRow]:
        """All methods, in the order of the runs."""
        return list({m.name: m for run in self.runs for m in run.setting.methods}.values())

    @cached_property
    def concurrencies(self) -> list[int]:
        """All concurrencies, in ascending order."""
        return sorted({c for run in self.runs for c in run.setting.concurrencies})

    @property
    def repeats(self) -> int:
        """The largest number of repeats."""
        return max(run.setting.repeats for run in self.runs)

    @property
    def depth(self) -> int:
        """The largest number of draft depths."""
        return max((method.depth for method in self.methods), default=0)

    @property
    def machines(self) -> list[tuple[SuiteRun, list[DatasetRow]]]:
        """One run of each machine, with the datasets that were measured there."""
        found: list[tuple[SuiteRun, list[DatasetRow]]] = []
        for run in self.runs:
            names = {key.dataset for key in run.finished}
            own = [dataset for dataset in run.setting.datasets if dataset.name in names]
            same = [s for r, s in found if r.setting.machine == run.setting.machine]
            if same:
                same[0].extend(dataset for dataset in own if dataset not in same[0])
            else:
                found.append((run, own))
        return found

    @property
    def num_missing(self) -> int:
        """Cells that the settings ask for and no run has finished."""
        wanted: set[CellKey] = set()
        for run in self.runs:
            own = run.setting
            measured = {(key.method, key.concurrency) for key in run.finished}
            # Further concurrencies are those of a server, which has one method.
            asked = own.recipe.get("concurrencies", own.concurrencies)
            pairs = [
                (method.name, concurrency)
                for method in own.methods
                for concurrency in own.concurrencies
                if concurrency in asked or (method.name, concurrency) in measured
            ]
            wanted |= {
                CellKey(dataset.name, *pair, repeat)
                for dataset in own.datasets
                for pair in pairs
                for repeat in range(own.repeats)
            }
        return len(wanted.difference(*(run.finished for run in self.runs)))

    def method(self, name: str | None) -> MethodRow | None:
        """Return the method of that name; None if there is none."""
        return next((method for method in self.methods if method.name == name), None)

    @property
    def trees(self) -> list[MethodRow]:
        """The methods that draft trees."""
        return [method for method in self.methods if method.kind == "tree"]

    @property
    def treespark(self) -> MethodRow | None:
        """The method TreeSpark; where there are several (ablations), the one of that name."""
        own = [method for method in self.trees if method.method == TREESPARK]
        return next((m for m in own if m.name == TREESPARK), next(iter(own), None))

    @property
    def subject(self) -> MethodRow | None:
        """The method to tell of first: TreeSpark, else the first tree."""
        return self.treespark or next(iter(self.trees), None)

    def group(self, name: str) -> list[DatasetRow]:
        """Return the datasets that are averaged together under that name."""
        return [dataset for dataset in self.datasets if dataset.group == name]


def read_studies(folders: Sequence[Path]) -> list[Study]:
    """Return the runs, grouped by target.

    Raises UsageError for a folder that is no run or has no finished cell, for runs of one target
    whose settings differ, and for a cell that is in two of them.
    """
    groups: dict[str, list[SuiteRun]] = {}
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UsageError(f"RUN {' '.join(map(str, folders))}: one folder is given twice")
    for folder in folders:
        run = SuiteRun(folder)
        if not run.cells:
            raise UsageError(
                f"{folder}: no cell of this run is finished; see treespark bench suite"
            )
        target = run.setting.target
        groups.setdefault(str(target.get("fingerprint") or target.get("path")), []).append(run)
    for runs in groups.values():
        for run in runs[1:]:
            _check_pair(runs[0], run)
        _check_machines(runs)
        _check_cells(runs)
    return [Study(_target_name(runs[0].setting), runs) for runs in groups.values()]


def _target_name(setting: SuiteSetting) -> str:
    return Path(str(setting.target.get("path", "target"))).name


def _check_pair(first: SuiteRun, other: SuiteRun) -> None:
    """Raise UsageError unless the numbers of both runs may stand in one table."""
    for name in _COMMON:
        ours, theirs = getattr(other.setting, name), getattr(first.setting, name)
        if ours != theirs:
            raise UsageError(f"{other.folder}: {name} {ours}, but {theirs} in {first.folder}")
    for name, facts in other.setting.drafters.items():
        known_facts = first.setting.drafters.get(name, facts)
        if known_facts.get("fingerprint") != facts.get("fingerprint"):
            raise UsageError(f"{other.folder}: drafter {name} is not the one of {first.folder}")
    for kind in ("datasets", "methods"):
        known = {row.name: row.content for row in getattr(first.setting, kind)}
        for row in getattr(other.setting, kind):
            if known.get(row.name, row.content) != row.content:
                raise UsageError(
                    f"{other.folder}: {kind[:-1]} {row.name} is not the one of {first.folder}"
                )


def _check_cells(runs: Sequence[SuiteRun]) -> None:
    owners: dict[object, Path] = {}
    for run in runs:
        for key in run.finished:
            if key in owners:
                raise UsageError(f"{run.folder}: {tuple(key)} is also in {owners[key]}")
            owners[key] = run.folder


def _check_machines(runs: Sequence[SuiteRun]) -> None:
    """Raise UsageError unless each dataset was measured on one machine, so that gains are fair."""
    owners: dict[str, SuiteRun] = {}
    for run in runs:
        for dataset in sorted({key.dataset for key in run.finished}):
            first = owners.setdefault(dataset, run)
            for name, ours in run.setting.machine.items():
                theirs = first.setting.machine[name]
                if ours != theirs:
                    raise UsageError(
                        f"{run.folder}: dataset {dataset} with {name} {ours}, but {theirs} in "
                        f"{first.folder}: a set has to be measured on one machine"
                    )
