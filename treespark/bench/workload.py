# SPDX-License-Identifier: Apache-2.0
"""What a measurement runs: prompts as ids by the target's chat template, and the tree policy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from treespark.data.formats import first_user_turn
from treespark.data.jsonl import read_jsonl
from treespark.errors import UsageError
from treespark.serving.checks import default_policy
from treespark.target.template import render_prompt, user_turn_marks
from treespark.tree.policy import TreePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from treespark.drafter.auto import Drafter
    from treespark.target.model import TargetModel


@dataclass(frozen=True)
class Prompt:
    """One prompt as the target sees it.  file: stem of its file.  name: its `id` or file:line.

    text: what was rendered, None for a prompt given as ids.
    category: its row's, None where it has none.
    """

    file: str
    name: str
    token_ids: list[int]
    text: str | None = None
    category: str | None = None

    @property
    def domain(self) -> str:
        """Its category, or the stem of its file."""
        return self.category or self.file


def load_prompts(
    files: Sequence[Path], target: TargetModel, count: int | None = None
) -> list[Prompt]:
    """Return the first `count` prompts of each file (None: all), files in the given order.

    Raises UsageError for a file that cannot be read, has no prompt, or shares its stem with another
    one, and `file:line: reason` for a bad row.
    """
    prompts: list[Prompt] = []
    stems = [path.stem for path in files]
    for path in files:
        if stems.count(path.stem) > 1:
            raise UsageError(f"--prompts {path}: two files are called {path.stem}; rename one")
        found = _read(path, target, count)
        if not found:
            raise UsageError(f"--prompts {path}: no prompt in it")
        prompts += found
    return prompts


def _read(path: Path, target: TargetModel, count: int | None) -> list[Prompt]:
    found: list[Prompt] = []
    tokenizer, vocab_size = target.tokenizer, target.vocab_size
    for number, row in read_jsonl(path):
        if count is not None and len(found) == count:
            break
        where = f"{path}:{number}"
        turn = first_user_turn(row, where, partial(user_turn_marks, tokenizer))
        if not turn or (isinstance(turn, str) and not turn.strip()):
            raise UsageError(f"{where}: the prompt is empty")
        ids = render_prompt(tokenizer, turn) if isinstance(turn, str) else turn
        if max(ids, default=0) >= vocab_size:
            raise UsageError(f"{where}: token id {max(ids)}, allowed: 0..{vocab_size - 1}")
        text, category = turn if isinstance(turn, str) else None, row.get("category")
        name, domain = str(row.get("id", where)), category if isinstance(category, str) else None
        found.append(Prompt(path.stem, name, ids, text, domain))
    return found


def batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Return the prompts in batches of at most `size`, none of which mixes files."""
    result: list[list[Prompt]] = []
    for prompt in prompts:
        if not result or len(result[-1]) == size or result[-1][0].file != prompt.file:
            result.append([])
        result[-1].append(prompt)
    return result


def needed_length(prompts: Sequence[Prompt], max_tokens: int, max_context: int) -> int:
    """Return the longest prompt plus answer in tokens.

    Raises UsageError naming the first prompt that leaves no room for `max_tokens`.
    """
    for prompt in prompts:
        if len(prompt.token_ids) + max_tokens > max_context:
            raise UsageError(
                f"prompt {prompt.name}: {len(prompt.token_ids)} tokens and --max-tokens "
                f"{max_tokens} exceed the target's context of {max_context}"
            )
    return max(len(prompt.token_ids) for prompt in prompts) + max_tokens


def changed_policy(
    drafter: Drafter | None, *, depth: int | None, branching: int | None, budget: int | None
) -> TreePolicy:
    """Return the drafter's own policy with the fields that were given replaced."""
    changes = _given(depth, branching, budget)
    return dataclasses.replace(default_policy(drafter), **changes)


def check_policy_options(
    drafter: Path | None, *, depth: int | None, branching: int | None, budget: int | None
) -> None:
    """Refuse, before anything is loaded, numbers out of range, and any where there is no tree."""
    given = _given(depth, branching, budget)
    TreePolicy(**given)
    if given and drafter is None:
        name, value = next(iter(given.items()))
        raise UsageError(
            f"--{name} {value}: shapes the draft tree, there is none without a drafter"
        )


def _given(depth: int | None, branching: int | None, budget: int | None) -> dict[str, int]:
    every = {"depth": depth, "branching": branching, "budget": budget}
    return {name: value for name, value in every.items() if value is not None}
