# SPDX-License-Identifier: Apache-2.0
"""The training mixture of a recipe: sources, drops, draws, one shuffled pool, cut at `count`.

A row of a source meets, in this order: `where`, empty or unreadable, duplicate in its source, equal
to an evaluation prompt, too long, trigram share of an evaluation prompt. From what is left each
source draws its quota with a random stream of its own, so no source changes the draw of another.
Then the pool: a prompt that an earlier source drew too is dropped, the rest shuffled and cut.
"""

import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from treespark.data.formats import first_user_turn
from treespark.data.jsonl import (
    Row,
    check_out,
    encode,
    report_path,
    write_atomic,
    write_json_atomic,
)
from treespark.data.mixture_recipe import Mixture, SourceSection, load_mixture
from treespark.data.mixture_report import MixtureReport, SourceReport, print_report
from treespark.data.overlap import TrigramIndex, near_duplicates
from treespark.data.prompts import evaluation_prompts, prompt_key
from treespark.data.sources import check_sources, is_selected, prompt_row, read_source
from treespark.errors import UsageError
from treespark.target.template import load_tokenizer, render_prompt, user_turn_marks

_log = logging.getLogger(__name__)

NUM_EXAMPLES = 5


def run_mixture(path: Path) -> MixtureReport:
    """Write the mixture of the recipe `path` and its report; return the report.

    The file holds rows {id, source, category, prompt}; an id is the source's name and the row's
    number in it, from 0. Raises UsageError, and then neither file is written.
    """
    mixture = load_mixture(path)
    evaluation = mixture.decontamination.evaluation if mixture.decontamination else ()
    files = [file for source in mixture.sources for file in source.files]
    check_out(mixture.out, [path, *files, *evaluation], f"{path}: out")
    check_sources(mixture.sources)
    tokenizer = load_tokenizer(mixture.tokenizer)
    gate = _Gate(mixture, tokenizer)
    report = MixtureReport(mixture.model_dump(mode="json"))
    pool = []
    for source in mixture.sources:
        counts = SourceReport(source.name, source.category, source.quota)
        report.sources.append(counts)
        pool += _draw(list(_usable(source, counts, gate)), counts, mixture.seed)
    if not pool:
        raise UsageError(f"{path}: sources: no usable prompt: {_drops(report)}")
    rows = _cut(pool, mixture, report)
    _count_near_duplicates(rows, report)
    report.close(rows)
    if mixture.count is not None and len(rows) < mixture.count:
        _log.warning("%s: count %d: only %d prompts are left", path, mixture.count, len(rows))
    write_atomic(mixture.out, map(encode, rows))
    write_json_atomic(report_path(mixture.out), asdict(report))
    print_report(report, mixture.out)
    return report


@dataclass
class _Gate:
    """What a prompt has to pass: length and decontamination."""

    mixture: Mixture
    tokenizer: Any
    forbidden: set[Any] = field(init=False, default_factory=set)
    index: TrigramIndex = field(init=False)

    def __post_init__(self) -> None:
        rules, texts = self.mixture.decontamination, []
        for where, prompt in evaluation_prompts(rules.evaluation if rules else (), self.tokenizer):
            if not isinstance(prompt, str):
                raise UsageError(f"{where}: input_ids: a decontamination file needs text")
            texts.append(prompt)
        self.forbidden = {prompt_key(text) for text in texts}
        self.index = TrigramIndex(texts, rules.trigram_share if rules else 1.0)

    def refusal(self, prompt: str) -> str | None:
        """Return the count that a prompt falls under, None when it may be drawn."""
        if prompt_key(prompt) in self.forbidden:
            return "contaminated_exact"
        if len(render_prompt(self.tokenizer, prompt)) > self.mixture.max_prompt_tokens:
            return "too_long"
        return "contaminated_trigram" if self.index.refuses(prompt) else None


def _usable(source: SourceSection, counts: SourceReport, gate: _Gate) -> Iterator[Row]:
    """Yield the rows of a source that may be drawn; counts every other one.

    Raises UsageError when not one row has a prompt, and for a `where` column that no row has.
    """
    marks = cache(partial(user_turn_marks, gate.tokenizer))
    seen: set[Any] = set()
    missing = set(source.where)
    rows = tqdm(read_source(source), desc=source.name, unit="row", disable=None)
    for index, (where, row) in enumerate(rows):
        counts.read += 1
        missing -= row.keys()
        reason: str | None
        if not is_selected(row, source):
            reason = "filtered_out"
        elif (prompt := _prompt(prompt_row(row, source), where, marks, counts)) is None:
            reason = "bad_or_empty"
        elif (key := prompt_key(prompt)) in seen:
            reason = "duplicate"
        else:
            seen.add(key)
            reason = gate.refusal(prompt)
        if reason is not None:
            setattr(counts, reason, getattr(counts, reason) + 1)
            continue
        yield {
            "id": f"{source.name}-{index}",
            "source": source.name,
            "category": source.category,
            "prompt": prompt,
        }
    if counts.read and missing:
        raise UsageError(f"source {source.name}: where: no row has a column {sorted(missing)[0]!r}")
    if counts.bad_or_empty and counts.bad_or_empty == counts.read - counts.filtered_out:
        raise UsageError(f"source {source.name}: no row has a prompt: {counts.first_bad}")


def _prompt(row: Row, where: str, marks: Any, counts: SourceReport) -> str | None:
    """Return the first user turn of a row, None for one that has none or is wrong."""
    try:
        prompt = first_user_turn(row, where, marks)
        reason = f"{where}: no user turn, or an empty one"
        if isinstance(prompt, list):
            reason = f"{where}: input_ids: a mixture needs text"
        elif prompt is not None and prompt.strip():
            return prompt
    # A public set may hold single odd rows: they are counted, and the report names the first.
    except UsageError as problem:
        reason = str(problem)
    counts.first_bad = counts.first_bad or reason
    return None


def _draw(usable: list[Row], counts: SourceReport, seed: int) -> list[Row]:
    """Return the quota of a source, or all there is."""
    counts.drawn = min(counts.quota, len(usable))
    counts.not_drawn = len(usable) - counts.drawn
    return random.Random(f"{seed}:source:{counts.name}").sample(usable, counts.drawn)


def _cut(pool: list[Row], mixture: Mixture, report: MixtureReport) -> list[Row]:
    """Return the mixture: each prompt once, shuffled, at most `count`; counts what is left out."""
    first: dict[Any, Row] = {}
    for row in pool:
        first.setdefault(prompt_key(row["prompt"]), row)
    rows = list(first.values())
    random.Random(f"{mixture.seed}:shuffle").shuffle(rows)
    kept = rows[: mixture.count]
    left = rows[len(kept) :]
    written, cut = (Counter(row["source"] for row in part) for part in (kept, left))
    for counts in report.sources:
        counts.written, counts.cut = written[counts.name], cut[counts.name]
        counts.duplicate_of_other_source = counts.drawn - counts.written - counts.cut
    return kept


def _count_near_duplicates(rows: list[Row], report: MixtureReport) -> None:
    """Count pairs of near duplicates and the rows in them; they stay."""
    pairs = near_duplicates([row["prompt"] for row in rows])
    touched = Counter(rows[n]["source"] for n in {n for pair in pairs for n in pair})
    for counts in report.sources:
        counts.near_duplicates = touched[counts.name]
    report.near_duplicate_pairs = len(pairs)
    report.near_duplicate_examples = [
        [rows[i]["id"], rows[j]["id"]] for i, j in pairs[:NUM_EXAMPLES]
    ]


def _drops(report: MixtureReport) -> dict[str, dict[str, int]]:
    return {counts.name: counts.drops() for counts in report.sources}
