# SPDX-License-Identifier: Apache-2.0
"""Where the time of each method goes, what the suite itself takes, and whether texts are equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from treespark.bench.report.table import MISSING, Row, Table, text_row
from treespark.bench.suite_records import UNKNOWN

if TYPE_CHECKING:
    from treespark.bench.report.results import CellSums, Results

# Reading prompts belongs to no round.
PREFILL = "prefill"


@dataclass(frozen=True)
class Profile:
    """Time of one method at one concurrency, over all its cells.

    phase_s: seconds by phase, prefill among them; empty unless the run kept them.  step_s: seconds
    inside the engine.  wall_s: what passed meanwhile.  num_rounds: of the engine.
    """

    method: str
    concurrency: int
    phase_s: dict[str, float]
    step_s: float
    wall_s: float
    num_rounds: int

    @property
    def round_ms(self) -> dict[str, float]:
        """Milliseconds a round by phase, without prefill."""
        rounds = max(self.num_rounds, 1)
        return {p: 1000 * s / rounds for p, s in self.phase_s.items() if p != PREFILL}

    @property
    def overhead_rate(self) -> float:
        """Share of the time that is outside the engine: the suite's own."""
        return 1 - self.step_s / self.wall_s


def profiles(results: Results) -> list[Profile]:
    """Return one profile for each method and concurrency that was measured in this process."""
    study = results.study
    return [
        _profile(method.title, concurrency, cells)
        for concurrency in study.concurrencies
        for method in study.methods
        if (cells := _timed_cells(results, method.name, concurrency))
    ]


def _timed_cells(results: Results, method: str, concurrency: int) -> list[CellSums]:
    return [
        cell
        for key, cell in results.cells.items()
        if (key.method, key.concurrency) == (method, concurrency) and cell.row.step_s is not None
    ]


def _profile(title: str, concurrency: int, cells: list[CellSums]) -> Profile:
    phase_s: dict[str, float] = {}
    for cell in cells:
        for phase, seconds in cell.row.phase_s.items():
            phase_s[phase] = phase_s.get(phase, 0.0) + seconds
    return Profile(
        title,
        concurrency,
        phase_s,
        sum(cell.row.step_s or 0.0 for cell in cells),
        sum(cell.row.wall_s for cell in cells),
        sum(cell.row.num_rounds for cell in cells),
    )


def profile_table(results: Results) -> Table | None:
    """Return milliseconds a round by phase, and what is not in a round; None if none is known."""
    found = profiles(results)
    if not found:
        return None
    phases = list(dict.fromkeys(phase for profile in found for phase in profile.round_ms))
    rows = []
    for profile in found:
        whole, prefill = sum(profile.round_ms.values()), profile.phase_s.get(PREFILL, 0.0)
        texts = [f"{profile.round_ms.get(phase, 0.0):.2f}" for phase in phases]
        if phases:
            texts += [f"{whole:.2f}", f"{prefill / profile.wall_s:.1%}"]
        texts.append(f"{profile.overhead_rate:.2%}")
        rows.append(text_row(profile.method, [str(profile.concurrency), *texts]))
    suite_s = sum(p.overhead_rate * p.wall_s for p in found) / sum(p.wall_s for p in found)
    return Table(
        key="profile",
        title="Where the time goes",
        columns=["method", "C", *phases, *(["round", "prefill"] if phases else []), "suite"],
        rows=rows,
        caption=(
            "Milliseconds a round of the engine by phase, then prefill's share of the time. "
            if phases
            else "Phases were not timed. "
        )
        + f"Suite: the share that passed outside the engine, {suite_s:.2%} in all.",
    )


def answers_table(results: Results) -> Table | None:
    """Return how many answers equal those of decoding without drafts; None if there are none."""
    study = results.study
    plain = next((m.name for m in study.methods if m.kind == "autoregressive"), None)
    rows: list[Row] = []
    for method in study.methods:
        counts = [_equal(results, plain, method.name, c) for c in study.concurrencies]
        if plain is not None and method.name != plain and any(count for count in counts):
            texts = [MISSING if not c else f"{c[0]} of {c[1]}" for c in counts]
            rows.append(text_row(method.title, texts))
    if not rows:
        return None
    why = (
        "In float32 all have to be equal."
        if study.setting.dtype == "float32"
        else f"{study.setting.dtype} rounds differently when a forward has more rows, so near ties "
        "may fall either way; only float32 has to be equal."
    )
    return Table(
        key="answers",
        title="Answers equal to decoding without drafts",
        columns=["method", *(f"C = {c}" for c in study.concurrencies)],
        rows=rows,
        caption=f"Token by token, all repeats of all prompts. {why}",
    )


def _equal(
    results: Results, plain: str | None, method: str, concurrency: int
) -> tuple[int, int] | None:
    """Return (equal, compared) answers over all cells that both methods have; None without one."""
    equal = compared = 0
    for key, cell in results.cells.items():
        if (key.method, key.concurrency) != (method, concurrency) or plain is None:
            continue
        base = results.cells.get(key._replace(method=plain))
        for prompt, answer in cell.answers.items() if base else ():
            if base and UNKNOWN not in (answer, base.answers.get(prompt, UNKNOWN)):
                compared += 1
                equal += answer == base.answers[prompt]
    return (equal, compared) if compared else None
