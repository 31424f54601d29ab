# SPDX-License-Identifier: Apache-2.0
"""What `treespark bench suite` leaves behind, and nothing that follows from it.

A run folder holds `suite.json` (the setting, a `SuiteSetting`) and four files of one JSON row a
line: `cells.jsonl`, `requests.jsonl`, `rounds.jsonl`, `traces.jsonl`. A *cell* is one dataset by
one method at one concurrency in one repeat. Its rows come into the other files first and into
`cells.jsonl` last: a cell that has no row there never happened, whatever a kill left of it.

Every table and figure is computed from these rows; `treespark.bench.metrics` has the definitions.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from treespark.bench.typed_rows import check_types, row_of
from treespark.data.jsonl import iter_jsonl, parse_object
from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

SETTING, CELLS = "suite.json", "cells.jsonl"
REQUESTS, ROUNDS, TRACES = "requests.jsonl", "rounds.jsonl", "traces.jsonl"

# Finish reason and hash of an answer that a server gave, which tells neither.
UNKNOWN = "unknown"

# Why the token that the target wanted next was not in the tree; COMMITTED: none was missing, as the
# request ended inside its accepted path.
COMMITTED = "committed"
NOT_IN_TOP_K = "not in top-k"
PRUNED = "pruned from the frontier"
CUT = "cut by the budget"
WRONG_PARENT = "wrong parent"
DEPTH_LIMIT = "depth limit"
REASONS = (COMMITTED, NOT_IN_TOP_K, PRUNED, CUT, WRONG_PARENT, DEPTH_LIMIT)


class CellKey(NamedTuple):
    """One cell.  concurrency: requests at a time.  repeat: from 0."""

    dataset: str
    method: str
    concurrency: int
    repeat: int


class TraceKey(NamedTuple):
    """One traced prompt by one method."""

    dataset: str
    method: str
    prompt_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _InCell:
    """The fields that place a row in its cell."""

    dataset: str
    method: str
    concurrency: int
    repeat: int

    @property
    def key(self) -> CellKey:
        """The cell that the row belongs to."""
        return CellKey(self.dataset, self.method, self.concurrency, self.repeat)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRow(_InCell):
    """One finished cell.

    wall_s: seconds in which its requests ran, turns of other methods left out.  step_s: those of
    them inside the engine, the rest being the suite's own overhead.  num_output_tokens: of all its
    requests.  num_rounds: rounds of the engine, each shared by all requests that ran in
    it.  phase_s: seconds by phase (prefill, draft, expand, verify, commit, host), empty where a
    server was measured from outside.  load_average: of the machine over the last minute, at the
    cell's end.  file_sizes: bytes of the other files that belong to this and earlier cells.
    """

    wall_s: float
    num_requests: int
    num_output_tokens: int
    num_rounds: int
    phase_s: dict[str, float] = field(default_factory=dict)
    step_s: float | None = None
    load_average: float = 0.0
    file_sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow(_InCell):
    """One request.

    num_output_tokens = num_prefill_tokens + what its rounds committed.  finish_reason: stop, length
    or UNKNOWN.  plain_decoding: as `treespark.serving.records.RequestRecord` has it.  The four
    times are seconds on the cell's own clock, which stands still in turns of other methods.
    ids_sha256: of the output ids, equal for equal answers, or UNKNOWN.  token_ids: the ids, where
    they were to be kept.
    """

    prompt_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_prefill_tokens: int
    num_rounds: int
    finish_reason: str
    plain_decoding: str | None
    arrival_s: float
    admitted_s: float
    first_token_s: float
    finished_s: float
    ids_sha256: str
    token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow(_InCell):
    """One request's share of one round; the counts of `treespark.serving.records.RoundRecord`.

    round: from 0, within the request.
    """

    prompt_id: str
    round: int
    num_committed: int
    num_accepted: int
    num_proposed: int
    proposed_depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One round of a traced prompt, decoded alone and untimed.

    num_rounds: of the whole trace; with fewer rows it is incomplete.  prefix_text: the end of the
    text in front of the anchor.  tokens, texts, parents, depths, scores: the verified tree, node 0
    being the anchor (parent -1), parents before children; a score is a log-probability of the whole
    path, or what the method puts in its place.  accepted: nodes of the accepted path, 0 first.
    wanted, wanted_texts: the target's own next token after each accepted node; after the last one
    it is the bonus.  reason: one of REASONS, why that bonus was not a node of the tree.
    num_committed: tokens this round added.  chain_committed: what the same drafter's greedy chain
    would have added here; None for a method without a tree.
    """

    dataset: str
    method: str
    prompt_id: str
    round: int
    num_rounds: int
    prefix_text: str
    tokens: list[int]
    texts: list[str]
    parents: list[int]
    depths: list[int]
    scores: list[float]
    accepted: list[int]
    wanted: list[int]
    wanted_texts: list[str]
    reason: str
    num_committed: int
    chain_committed: int | None

    @property
    def key(self) -> TraceKey:
        """The trace that the row belongs to."""
        return TraceKey(self.dataset, self.method, self.prompt_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    """One dataset of a run.

    title: for tables.  group: datasets that are averaged together, "general" or "writing".  source:
    file or hub name.  pool_size: prompts there.  num_too_long: those of them that were left out of
    the draw for their length.  subset_size, subset_sha256: those measured, in their order, the same
    for every method.
    """

    name: str
    title: str
    group: str
    source: str
    pool_size: int
    subset_size: int
    subset_sha256: str
    num_too_long: int = 0

    @property
    def content(self) -> DatasetRow:
        """The row without its source: equal where equal prompts were measured."""
        return replace(self, source="")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    """One method of a run, as it was resolved.

    drafter: its name in the recipe, None for autoregressive decoding.  kind: autoregressive, chain
    or tree.  method: its name in `treespark/bench/suite_methods.py`.  proposal, priority, stop: the
    three axes of `treespark.tree.builder`, None without a drafter.  options: what else shapes its
    drafts.  layout: of a drafter's blocks, shifted, in-place or None.
    """

    name: str
    title: str
    kind: str
    method: str = ""
    drafter: str | None = None
    proposal: str | None = None
    priority: str | None = None
    stop: str | None = None
    depth: int = 0
    branching: int = 0
    budget: int = 0
    frontier: int | None = None
    layout: str | None = None
    options: dict[str, float] = field(default_factory=dict)

    @property
    def content(self) -> MethodRow:
        """The row, which has nothing that a measurement would not depend on."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteSetting:
    """What another person needs to repeat the run, and to read its tables.

    versions: `treespark env`.  recipe: with every default filled in.  target, drafters (by name):
    path, fingerprint, sizes.  baseline, control: methods that deltas are taken against (the chain;
    the tree without tree losses).  load_average: when the run began.
    """

    command: list[str]
    time: str
    versions: dict[str, Any]
    recipe: dict[str, Any]
    target: dict[str, Any]
    drafters: dict[str, dict[str, Any]]
    datasets: list[DatasetRow]
    methods: list[MethodRow]
    concurrencies: list[int]
    repeats: int
    max_tokens: int
    seed: int
    dtype: str
    device: str
    threads: int
    baseline: str | None = None
    control: str | None = None
    load_average: list[float] = field(default_factory=list)

    @property
    def machine(self) -> dict[str, str | None]:
        """What times depend on beside the device, by name; None where the run does not say."""
        packages = self.versions.get("packages", {})
        return {"torch": packages.get("torch"), "processor": self.versions.get("processor")}


# ---------------------------------------------------------------------- reading

AnyRow = TypeVar("AnyRow", CellRow, RequestRow, RoundRow, TraceRow)


class SuiteRun:
    """A run folder to read, finished or not: what its finished cells left.

    Raises UsageError for a folder without a setting, for rows of another shape, and where rows are
    missing, there twice or not of this setting: files that lost something give wrong numbers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # First: a run that goes on meanwhile writes its setting before any cell of it.
        self.cells = read_cells(folder / CELLS)
        self.setting = read_setting(folder)
        _check_covered(self.setting, self.cells, folder / CELLS)

    @property
    def finished(self) -> frozenset[CellKey]:
        """Keys of the finished cells."""
        return frozenset(cell.key for cell in self.cells)

    def requests(self) -> Iterator[RequestRow]:
        """Yield the requests of the finished cells."""
        wanted = Counter({cell.key: cell.num_requests for cell in self.cells})
        return self._finished_rows(REQUESTS, RequestRow, wanted)

    def rounds(self) -> Iterator[RoundRow]:
        """Yield the rounds of the finished cells."""
        wanted: Counter[CellKey] = Counter()
        for row in self.requests():
            # Single rounds of a server stay unknown.
            wanted[row.key] += 0 if row.finish_reason == UNKNOWN else row.num_rounds
        yield from self._finished_rows(ROUNDS, RoundRow, wanted)

    def traces(self) -> list[list[TraceRow]]:
        """Return the complete traces, each as its rounds in order."""
        return complete_traces(rows_of(self.folder / TRACES, TraceRow))

    def _finished_rows(
        self, name: str, kind: type[RequestRow] | type[RoundRow], wanted: Counter[CellKey]
    ) -> Iterator[Any]:
        finished, found = self.finished, Counter[CellKey]()
        for row in rows_of(self.folder / name, kind):
            if row.key in finished:
                found[row.key] += 1
                yield row
        for key in finished:
            if found[key] != wanted[key]:
                raise UsageError(
                    f"{self.folder / name}: {found[key]} rows of the cell {tuple(key)}, which has "
                    f"{wanted[key]}: the file was changed"
                )


def _check_covered(setting: SuiteSetting, cells: Iterable[CellRow], path: Path) -> None:
    known: tuple[Collection[Any], ...] = (
        {row.name for row in setting.datasets},
        {row.name for row in setting.methods},
        setting.concurrencies,
        range(setting.repeats),
    )
    for cell in cells:
        for name, value, values in zip(CellKey._fields, cell.key, known, strict=True):
            if value not in values:
                raise UsageError(f"{path}: a cell of {name} {value!r}, which {SETTING} lacks")


def read_cells(path: Path) -> list[CellRow]:
    """Return the finished cells of a file; raises UsageError for one that is there twice."""
    cells = list(rows_of(path, CellRow))
    for key, number in Counter(cell.key for cell in cells).items():
        if number > 1:
            raise UsageError(f"{path}: the cell {tuple(key)} is there {number} times")
    return cells


def rows_of(path: Path, kind: type[AnyRow]) -> Iterator[AnyRow]:
    """Yield the rows of a file, none where there is no file; a torn last line is left out."""
    if path.exists():
        for number, values in iter_jsonl(path, ignore_tail=True):
            yield row_of(kind, values, f"{path}:{number}")


def complete_traces(rows: Iterable[TraceRow]) -> list[list[TraceRow]]:
    """Return the traces that have all their rounds."""
    grouped: dict[TraceKey, list[TraceRow]] = {}
    for row in rows:
        grouped.setdefault(row.key, []).append(row)
    return [
        trace
        for trace in grouped.values()
        if sorted(row.round for row in trace) == list(range(trace[0].num_rounds))
    ]


def read_setting(folder: Path) -> SuiteSetting:
    """Return the setting of a run folder; raises UsageError without a readable one."""
    path = folder / SETTING
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    values = parse_object(data, str(path)) or {}
    names = {f.name for f in dataclasses.fields(SuiteSetting)}
    missing = sorted(names - values.keys()) + sorted(values.keys() - names)
    if missing:
        raise UsageError(f"{path}: not the setting of a suite: key {missing[0]!r}")
    for name, kind in (("datasets", DatasetRow), ("methods", MethodRow)):
        if not isinstance(values[name], list):
            raise UsageError(f"{path}: {name}: {values[name]!r} is not allowed: need a list")
        values[name] = [row_of(kind, row, f"{path}: {name}") for row in values[name]]
    check_types(SuiteSetting, values, str(path))
    return SuiteSetting(**values)
