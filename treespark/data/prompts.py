# SPDX-License-Identifier: Apache-2.0
"""Prompt files: read local JSONL of several formats, filter, mix by category, sample, shuffle.

The order is fixed: first user turn, empty, duplicate, equal to an evaluation prompt, too long, then
sampling. What was dropped and why is counted, printed and written to `<out>.report.json`.
"""

import math
import random
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.table import Table
from tqdm import tqdm

from treespark.data.formats import first_user_turn
from treespark.data.jsonl import (
    Row,
    UniqueIds,
    check_out,
    encode,
    iter_jsonl,
    label,
    report_path,
    write_atomic,
    write_json_atomic,
)
from treespark.data.terminal import plain_console
from treespark.errors import UsageError
from treespark.target.template import load_tokenizer, render_prompt, user_turn_marks

# Composition of the paper's 50,000 training prompts.
PAPER_SHARES = {"math": 0.2992, "code": 0.4015, "dialogue": 0.1994, "writing": 0.0999}

DROP_REASONS = (
    "no_user_turn",
    "empty",
    "duplicate",
    "equals_evaluation_prompt",
    "too_long",
    "category_without_share",
)

Prompt = str | list[int]


@dataclass
class PromptReport:
    """What a prompt file was made from; `read` is the sum of all drops, not_sampled and written."""

    inputs: list[str]
    evaluation: list[str]
    tokenizer: str
    max_prompt_tokens: int
    seed: int
    shares: dict[str, float] | None
    read: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DROP_REASONS, 0))
    not_sampled: int = 0
    written: int = 0
    usable_by_category: dict[str, int] = field(default_factory=dict)
    written_by_category: dict[str, int] = field(default_factory=dict)
    written_by_source: dict[str, int] = field(default_factory=dict)


def run_prompts(
    inputs: Sequence[Path],
    out: Path,
    tokenizer: Path,
    max_prompt_tokens: int = 2048,
    count: int | None = None,
    shares: Mapping[str, float] | None = None,
    seed: int = 42,
    evaluation: Sequence[Path] = (),
) -> PromptReport:
    """Write `out` and its report from local prompt files; return the report.

    out: rows {id, source, category, prompt}; a row that came tokenised has prompt null and keeps
    its `input_ids`. max_prompt_tokens: longest prompt kept, as rendered by the tokenizer's chat
    template. count: rows to write, None for as many as the shares allow. shares: category to
    fraction, None to sample from all rows alike. evaluation: files whose prompts must not occur.
    Raises UsageError, and then neither file is written.
    """
    _check_options(inputs, max_prompt_tokens, count, shares)
    check_out(out, [*inputs, *evaluation])
    report = PromptReport(
        [str(path) for path in inputs],
        [str(path) for path in evaluation],
        str(tokenizer),
        max_prompt_tokens,
        seed,
        dict(shares) if shares is not None else None,
    )
    loaded = load_tokenizer(tokenizer)
    rows = _read_rows(inputs, loaded, report)
    tokenised = any("input_ids" in row for row in rows)
    forbidden = _evaluation_keys(evaluation, loaded, tokenised)
    usable = _filter(rows, forbidden, loaded, report)
    chosen = _sample(usable, count, seed, report)
    write_atomic(out, map(encode, chosen))
    write_json_atomic(report_path(out), asdict(report))
    _print(report, out)
    return report


def parse_shares(text: str) -> dict[str, float]:
    """Return the shares that `paper` or `math=0.5,code=0.5` means; raises UsageError."""
    if text == "paper":
        return dict(PAPER_SHARES)
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {category.strip(): float(share) for category, share in pairs}
    except ValueError:
        raise UsageError(f"--shares {text}: need `paper` or category=fraction,...") from None


def _check_options(
    inputs: Sequence[Path],
    max_prompt_tokens: int,
    count: int | None,
    shares: Mapping[str, float] | None,
) -> None:
    if not inputs:
        raise UsageError("prompts: need at least one input file")
    if max_prompt_tokens < 1:
        raise UsageError(f"--max-prompt-tokens {max_prompt_tokens}: need at least 1")
    if count is not None and count < 1:
        raise UsageError(f"--count {count}: need at least 1")
    if shares is None:
        return
    # 1e-3: shares are given in hundredths of a percent and may be off by rounding.
    wrong = not all(0 < share <= 1 for share in shares.values())
    if wrong or abs(sum(shares.values()) - 1) > 1e-3:
        raise UsageError(f"--shares {dict(shares)}: need fractions above 0 that sum to 1")


def _read_rows(inputs: Sequence[Path], tokenizer: Any, report: PromptReport) -> list[Row]:
    """Return {id, source, category, prompt[, input_ids]} of each row that has a user turn."""
    marks, ids, rows = cache(partial(user_turn_marks, tokenizer)), UniqueIds(), []
    for path in inputs:
        for index, (number, row) in enumerate(iter_jsonl(path)):
            where = f"{path}:{number}"
            report.read += 1
            row_id = _label(row, "id", f"{path.stem}-{index}", where)
            ids.add(row_id, path, number)
            prompt = first_user_turn(row, where, marks)
            if prompt is None:
                report.dropped["no_user_turn"] += 1
                continue
            kept: Row = {
                "id": row_id,
                "source": _label(row, "source", path.stem, where),
                "category": _label(row, "category", "other", where),
                "prompt": prompt if isinstance(prompt, str) else None,
            }
            if not isinstance(prompt, str):
                _check_vocabulary(prompt, tokenizer, where)
                kept["input_ids"] = prompt
            rows.append(kept)
    return rows


def _label(row: Row, key: str, default: str, where: str) -> str:
    """Return a row's own id, source or category as a string, or the assigned one."""
    return default if row.get(key) in (None, "") else label(row, key, where)


def _check_vocabulary(ids: list[int], tokenizer: Any, where: str) -> None:
    if max(ids) >= len(tokenizer):
        raise UsageError(
            f"{where}: input_ids: {max(ids)} is outside the tokenizer's {len(tokenizer)} tokens"
        )


def _prompt(row: Row) -> Prompt:
    prompt: Prompt = row["input_ids"] if row["prompt"] is None else row["prompt"]
    return prompt


def prompt_key(prompt: Prompt) -> str | tuple[int, ...]:
    """Return what makes two prompts equal: line ends, outer space and Unicode form do not."""
    if isinstance(prompt, str):
        return unicodedata.normalize("NFC", prompt.replace("\r\n", "\n")).strip()
    return tuple(prompt)


def evaluation_prompts(paths: Sequence[Path], tokenizer: Any) -> Iterator[tuple[str, Prompt]]:
    """Yield (`file:line`, prompt) of each row of evaluation files that has a user turn."""
    marks = cache(partial(user_turn_marks, tokenizer))
    for path in paths:
        for number, row in iter_jsonl(path):
            where = f"{path}:{number}"
            prompt = first_user_turn(row, where, marks)
            if prompt is not None:
                yield where, prompt


def _evaluation_keys(
    paths: Sequence[Path], tokenizer: Any, tokenised: bool
) -> set[str | tuple[int, ...]]:
    """Return the keys of all evaluation prompts, as text and, if asked, as rendered ids."""
    keys = set()
    for _, prompt in evaluation_prompts(paths, tokenizer):
        keys.add(prompt_key(prompt))
        if tokenised:
            keys.add(prompt_key(_rendered(prompt, tokenizer)))
    return keys


def _rendered(prompt: Prompt, tokenizer: Any) -> list[int]:
    return render_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt


def _filter(
    rows: list[Row], forbidden: set[str | tuple[int, ...]], tokenizer: Any, report: PromptReport
) -> list[Row]:
    """Return the rows that may be sampled; counts every drop in the report."""
    seen: set[str | tuple[int, ...]] = set()
    usable = []
    for row in tqdm(rows, desc="prompts", unit="row", disable=None):
        prompt = _prompt(row)
        key = prompt_key(prompt)
        if not key:
            reason = "empty"
        elif key in seen:
            reason = "duplicate"
        elif key in forbidden:
            reason = "equals_evaluation_prompt"
        elif report.shares is not None and row["category"] not in report.shares:
            reason = "category_without_share"
        elif len(_rendered(prompt, tokenizer)) > report.max_prompt_tokens:
            reason = "too_long"
        else:
            usable.append(row)
            seen.add(key)
            continue
        report.dropped[reason] += 1
        seen.add(key)
    if not usable:
        reasons = {reason: num for reason, num in report.dropped.items() if num}
        raise UsageError(f"prompts: 0 of {report.read} rows are usable: {reasons}")
    report.usable_by_category = dict(Counter(row["category"] for row in usable))
    return usable


def quotas(
    available: Mapping[str, int], shares: Mapping[str, float], count: int | None
) -> dict[str, int]:
    """Return rows per category: shares of `count`, rounded by largest remainder to its sum.

    count: None for the largest count that the available rows can serve. Raises UsageError naming
    the first category that has too few rows, and the largest count that is possible.
    """
    absent = [name for name in shares if not available.get(name)]
    if absent:
        raise UsageError(f"--shares: no usable prompt has category {absent[0]!r}")
    # A quota is less than one row above its share, which bounds the counts to try.
    bound = math.ceil(min((available[name] + 1) / share for name, share in shares.items()))
    fits = (n for n in range(bound, 0, -1) if not _short(available, _apportion(shares, n)))
    largest = next(fits, 0)
    if count is None and largest:
        return _apportion(shares, largest)
    wanted = _apportion(shares, count or 1)
    short = _short(available, wanted)
    if short is not None:
        raise UsageError(
            f"--count {count}: category {short} has {available[short]} usable prompts, its "
            f"share needs {wanted[short]}; the largest count for these shares is {largest}"
        )
    return wanted


def _short(available: Mapping[str, int], wanted: Mapping[str, int]) -> str | None:
    return next((name for name, num in wanted.items() if num > available[name]), None)


def _apportion(shares: Mapping[str, float], count: int) -> dict[str, int]:
    total = sum(shares.values())
    exact = {name: count * share / total for name, share in shares.items()}
    whole = {name: math.floor(value) for name, value in exact.items()}
    order = sorted(exact, key=lambda name: (whole[name] - exact[name], name))
    for name in order[: count - sum(whole.values())]:
        whole[name] += 1
    return whole


def _sample(usable: list[Row], count: int | None, seed: int, report: PromptReport) -> list[Row]:
    """Return the sampled rows in shuffled order; each category has its own random stream."""
    if report.shares is None:
        if count is not None and count > len(usable):
            raise UsageError(f"--count {count}: only {len(usable)} prompts are usable")
        chosen = random.Random(f"{seed}:sample").sample(usable, count or len(usable))
    else:
        by_category = defaultdict(list)
        for row in usable:
            by_category[row["category"]].append(row)
        wanted = quotas(report.usable_by_category, report.shares, count)
        chosen = []
        for category, num in wanted.items():
            stream = random.Random(f"{seed}:{category}")
            chosen += stream.sample(by_category[category], num)
    random.Random(f"{seed}:shuffle").shuffle(chosen)
    report.written, report.not_sampled = len(chosen), len(usable) - len(chosen)
    report.written_by_category = dict(Counter(row["category"] for row in chosen))
    report.written_by_source = dict(Counter(row["source"] for row in chosen))
    assert report.read == sum(report.dropped.values()) + report.not_sampled + report.written
    return chosen


def _print(report: PromptReport, out: Path) -> None:
    table = Table(title=f"{out}: {report.written} prompts", title_justify="left")
    table.add_column("rows")
    table.add_column("number", justify="right")
    table.add_row("read", str(report.read))
    for reason, num in report.dropped.items():
        table.add_row(f"dropped: {reason}", str(num))
    table.add_row("not sampled", str(report.not_sampled), end_section=True)
    for category, num in sorted(report.written_by_category.items()):
        share = f"{num} ({100 * num / report.written:.2f} %)"
        table.add_row(f"written: {category}", share)
    plain_console().print(table)
