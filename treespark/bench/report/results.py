# SPDX-License-Identifier: Apache-2.0
"""The numbers of a suite run: sums per cell, values per dataset, means and gains per suite.

Everything follows from the records. A value is kept unrounded until it is printed. The rules of
aggregation are the paper's (its evaluation section): the mean of a suite is unweighted, a
throughput is the mean of its repeats before anything else is done with it, and there are two ways
to sum up a gain, see `mean_of_gains` and `ratio_of_means`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from treespark.bench.metrics import PositionRates, tpot_s
from treespark.bench.suite_records import CellKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from treespark.bench.report.study import Study
    from treespark.bench.suite_records import CellRow, RequestRow, RoundRow

ByDataset = Mapping[str, float]
GainRule = Callable[[ByDataset, ByDataset], float]


@dataclass
class CellSums:
    """What the requests and rounds of one cell add up to.

    decode_s: seconds behind the first token, of all requests.  request_speeds: the requests' own
    tokens per second, those of fewer than two tokens left out.  accepted, proposed: rounds by
    accepted draft tokens and by depth of the deepest proposed node.  answers: prompt id -> hash of
    the output ids.  prompts: prompt id -> the same sums of that prompt alone.
    """

    row: CellRow
    num_output: int = 0
    decode_s: float = 0.0
    request_speeds: list[float] = field(default_factory=list)
    num_rounds: int = 0
    num_committed: int = 0
    num_proposed: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    proposed: Counter[int] = field(default_factory=Counter)
    committed: Counter[int] = field(default_factory=Counter)
    answers: dict[str, str] = field(default_factory=dict)
    prompts: dict[str, CellSums] = field(default_factory=dict)

    def of_prompt(self, name: str) -> CellSums:
        """Return the sums of one prompt, which begin at zero."""
        return self.prompts.setdefault(name, CellSums(self.row))

    def add_request(self, row: RequestRow) -> None:
        """Count one request."""
        self.num_output += row.num_output_tokens
        self.decode_s += row.finished_s - row.first_token_s
        self.answers[row.prompt_id] = row.ids_sha256
        seconds = tpot_s(row)
        if seconds:
            self.request_speeds.append(1 / seconds)

    def add_round(self, row: RoundRow) -> None:
        """Count one request's share of one round."""
        self.num_rounds += 1
        self.num_committed += row.num_committed
        self.num_proposed += row.num_proposed
        self.accepted[row.num_accepted] += 1
        self.proposed[row.proposed_depth] += 1
        self.committed[row.num_committed] += 1


@dataclass(frozen=True)
class Metric:
    """A number of a cell: numerator / denominator.

    is_pooled: repeats are added up before the division, as they are repetitions of the same rounds;
    else the value is the mean over the repeats.
    """

    name: str
    title: str
    unit: str
    digits: int
    is_pooled: bool
    numerator: Callable[[CellSums], float]
    denominator: Callable[[CellSums], float]

    def value(self, cells: Sequence[CellSums]) -> float | None:
        """Return the number of one dataset from the cells of its repeats; None if undefined."""
        if not self.is_pooled:
            values = [self.value_of(cell) for cell in cells]
            return fmean(v for v in values if v is not None) if all_known(values) else None
        below = sum(map(self.denominator, cells))
        return sum(map(self.numerator, cells)) / below if below else None

    def value_of(self, cell: CellSums) -> float | None:
        """Return the number of one repeat; None if undefined."""
        below = self.denominator(cell)
        return self.numerator(cell) / below if below else None


ACCEPTANCE = Metric(
    "acceptance_length",
    "acceptance length",
    "tokens a round",
    2,
    True,
    lambda cell: cell.num_committed,
    lambda cell: cell.num_rounds,
)
"""Committed tokens per round: sums over the dataset, not a mean of means. Paper E.2."""

SINGLE = Metric(
    "single_request",
    "single-request throughput",
    "tokens / s",
    1,
    False,
    lambda cell: cell.num_output,
    lambda cell: cell.decode_s,
)
"""Output tokens of one request at a time / accumulated time behind the first tokens."""

SYSTEM = Metric(
    "system",
    "system throughput",
    "tokens / s",
    1,
    False,
    lambda cell: cell.row.num_output_tokens,
    lambda cell: cell.row.wall_s,
)
"""Output tokens of all requests / elapsed time, prefill included, in a closed loop."""

PER_REQUEST = Metric(
    "per_request",
    "per-request throughput",
    "tokens / s",
    1,
    False,
    lambda cell: sum(cell.request_speeds),
    lambda cell: len(cell.request_speeds),
)
"""(output tokens - 1) / (finish - first token), averaged over the requests."""


@dataclass(frozen=True)
class Value:
    """A number and its smallest and largest over the repeats."""

    value: float
    low: float
    high: float


def all_known(values: Iterable[float | None]) -> bool:
    """Whether there is a value, and none of them is None."""
    some = list(values)
    return bool(some) and None not in some


def mean_of_gains(ours: ByDataset, base: ByDataset) -> float:
    """Return the mean over datasets of ours / base - 1: how the paper sums up throughput gains."""
    return fmean(ours[name] / base[name] - 1 for name in base)


def ratio_of_means(ours: ByDataset, base: ByDataset) -> float:
    """Return mean(ours) / mean(base) - 1: the paper's gains in acceptance and between trees."""
    return fmean(ours[name] for name in base) / fmean(base.values()) - 1


class Results:
    """The cells of a study and the questions that tables and figures ask of them."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.cells: dict[CellKey, CellSums] = {}
        for run in study.runs:
            self.cells |= {cell.key: CellSums(cell) for cell in run.cells}
            for request in run.requests():
                cell = self.cells[request.key]
                cell.add_request(request)
                cell.of_prompt(request.prompt_id).add_request(request)
            for round_ in run.rounds():
                cell = self.cells[round_.key]
                cell.add_round(round_)
                cell.of_prompt(round_.prompt_id).add_round(round_)

    def repeats(self, dataset: str, method: str, concurrency: int) -> dict[int, CellSums]:
        """Return the measured repeats of one dataset by their number."""
        keys = (CellKey(dataset, method, concurrency, r) for r in range(self.study.repeats))
        return {key.repeat: self.cells[key] for key in keys if key in self.cells}

    def has(self, method: str, concurrency: int) -> bool:
        """Whether any dataset was measured with this method at this concurrency."""
        return any(key[1:3] == (method, concurrency) for key in self.cells)

    def value(self, metric: Metric, dataset: str, method: str, concurrency: int) -> Value | None:
        """Return the number of one dataset; None where it is undefined or was not measured."""
        cells = list(self.repeats(dataset, method, concurrency).values())
        value = metric.value(cells) if cells else None
        each = [v for cell in cells if (v := metric.value_of(cell)) is not None]
        return None if value is None else Value(value, min(each), max(each))

    def mean(
        self, metric: Metric, datasets: Sequence[str], method: str, concurrency: int
    ) -> Value | None:
        """Return the unweighted mean over datasets; None unless all of them were measured."""
        return self._over(
            lambda values: fmean(values.values()), metric, datasets, (method,), concurrency
        )

    def gain(
        self, metric: Metric, datasets: Sequence[str], method: str, base: str, concurrency: int
    ) -> Value | None:
        """Return method's gain over base; None unless both were measured on all datasets."""
        rule = self.gain_rule(metric, method, base)
        return self._over(rule, metric, datasets, (method, base), concurrency)

    def gain_rule(self, metric: Metric, method: str, base: str) -> GainRule:
        """Return the ratio of means between two trees and in acceptance, else the mean of gains."""
        trees = {row.name for row in self.study.trees}
        return ratio_of_means if metric.is_pooled or {method, base} <= trees else mean_of_gains

    def _over(
        self,
        rule: Callable[..., float],
        metric: Metric,
        datasets: Sequence[str],
        methods: Sequence[str],
        concurrency: int,
    ) -> Value | None:
        """Apply a rule to the datasets' values, and to each repeat of them for the spread."""
        cells = {(m, d): self.repeats(d, m, concurrency) for m in methods for d in datasets}
        if not all(cells.values()):
            return None
        whole = {key: metric.value(list(repeats.values())) for key, repeats in cells.items()}
        if not all_known(whole.values()):
            return None

        def applied(values: Mapping[tuple[str, str], float | None]) -> float:
            return rule(*({d: values[m, d] for d in datasets} for m in methods))

        shared = set.intersection(*(set(repeats) for repeats in cells.values()))
        each = [applied({key: metric.value_of(cells[key][r]) for key in cells}) for r in shared]
        value = applied(whole)
        return Value(value, min([*each, value]), max([*each, value]))

    def positions(
        self, datasets: Sequence[str], method: str, concurrency: int
    ) -> PositionRates | None:
        """Return the position-wise counts of all rounds on some datasets; None without a round."""
        cells = [c for d in datasets for c in self.repeats(d, method, concurrency).values()]
        num_rounds = sum(cell.num_rounds for cell in cells)
        if not num_rounds:
            return None
        depths = range(self.study.depth)
        return PositionRates(
            [sum(_above(cell.accepted, j) for cell in cells) for j in depths],
            [sum(_above(cell.proposed, j) for cell in cells) for j in depths],
            num_rounds,
        )

    def mean_nodes(self, datasets: Sequence[str], method: str, concurrency: int) -> float | None:
        """Return the mean number of verified nodes a round, the anchor excluded."""
        cells = [c for d in datasets for c in self.repeats(d, method, concurrency).values()]
        num_rounds = sum(cell.num_rounds for cell in cells)
        return sum(cell.num_proposed for cell in cells) / num_rounds if num_rounds else None


def _above(counts: Counter[int], position: int) -> int:
    return sum(number for depth, number in counts.items() if depth > position)
