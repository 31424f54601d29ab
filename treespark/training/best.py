# SPDX-License-Identifier: Apache-2.0
"""The best drafter of a run, judged by really decoding held-out prompts with it.

What a tree is worth in serving is the number of tokens a round commits, and no loss says that. So a
drafter is exported as at the end of the run, loaded as a server loads it, and decodes greedily with
the recipe's policy. The best one so far stays in the run's folder as `best/`; its `treespark.json`
says which step it is of and what it reached.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from typing import TYPE_CHECKING, Any

from treespark.data.jsonl import write_json_atomic
from treespark.drafter.export import recover_folder, replace_folder
from treespark.drafter.loading import RECORD
from treespark.errors import UsageError
from treespark.serving.llm import LLM, SamplingParams
from treespark.target.checks import read_json
from treespark.training import setup
from treespark.training.record import maker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from treespark.data.batches import Row
    from treespark.drafter.auto import AnyDrafter
    from treespark.recipe import Recipe
    from treespark.target.model import TargetModel
    from treespark.tree.policy import TreePolicy

logger = logging.getLogger(__name__)

_MAX_NUM_SEQS = 8


def decoded_acceptance(
    target: TargetModel,
    drafter: Path,
    prompts: Sequence[list[int]],
    policy: TreePolicy,
    max_tokens: int,
) -> float:
    """Return committed tokens per round of decoding token-id prompts with a drafter's folder.

    The bonus counts, the token that prefill yields does not (algorithms.md 3.5); 0 without a round.
    """
    longest = max(len(prompt) for prompt in prompts) + max_tokens
    llm = LLM(
        target,
        drafter,
        policy,
        max_num_seqs=min(_MAX_NUM_SEQS, len(prompts)),
        max_model_len=min(longest, target.max_context),
    )
    answers = llm.generate(prompts, SamplingParams(max_tokens))
    rounds = [round_ for answer in answers for round_ in answer.metrics.rounds]
    return sum(round_.num_committed for round_ in rounds) / max(1, len(rounds))


class BestDrafter:
    """Keeps `best/` of a run; only the first rank calls its methods.

    run_settings: those of the run's checkpoints; a `best/` of other settings is another run's.
    Raises UsageError for a held-out row without a prompt.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: TargetModel,
        holdout: Sequence[Row],
        run_settings: dict[str, Any],
    ) -> None:
        self.folder = recipe.output.dir / setup.BEST
        self.record: dict[str, Any] | None = None
        self._recipe, self._target = recipe, target
        rows = holdout[: recipe.train.decode_prompts]
        for row in rows:
            if not row.prompt_len:
                raise UsageError(
                    f"train.decode_every {recipe.train.decode_every}: held-out row {row.id} has "
                    "no prompt to decode"
                )
        self._prompts = [row.token_ids[: row.prompt_len].tolist() for row in rows]
        text = json.dumps(run_settings, sort_keys=True)
        # Values compare only where the same prompts were decoded as far.
        self._measure = {
            "num_prompts": len(rows),
            "max_tokens": recipe.train.decode_tokens,
            "run": hashlib.sha256(text.encode()).hexdigest()[:16],
        }

    def resume(self, remembered: dict[str, Any] | None) -> None:
        """Go on with the `best/` that is there.  remembered: the record of the checkpoint, if any.

        `best/` may be ahead of the checkpoint, never behind it, so its own record counts.
        """
        recover_folder(self._candidate)
        recover_folder(self.folder)
        self.record = self._read()
        if remembered is not None and self.record is None:
            logger.warning(
                "%s: not what the checkpoint remembers, acceptance %.3f after step %d; the next "
                "decoded step takes its place",
                self.folder,
                remembered["acceptance"],
                remembered["step"],
            )

    def judge(self, drafter: AnyDrafter, step: int) -> float:
        """Decode with the drafter as it is after `step` steps, keep it if it is better than all
        before, and return its acceptance length.

        The weights must be whole. Training goes on untouched: what decodes is a copy.
        """
        candidate = setup.export(self._recipe, drafter, self._candidate)
        acceptance = decoded_acceptance(
            self._target,
            candidate,
            self._prompts,
            setup.policy(self._recipe),
            self._measure["max_tokens"],
        )
        if self.record is None or acceptance > self.record["acceptance"]:
            made = maker(self._recipe, self._target, drafter.config)
            self.record = {"step": step, "acceptance": acceptance, **self._measure, **made}
            write_json_atomic(candidate / RECORD, self.record)
            replace_folder(candidate, self.folder)
        else:
            shutil.rmtree(candidate)
        logger.info(
            "decoded acceptance length %.3f after step %d, best %.3f after step %d",
            acceptance,
            step,
            self.record["acceptance"],
            self.record["step"],
        )
        return acceptance

    @property
    def _candidate(self) -> Path:
        return self.folder.with_name(f".{setup.BEST}.new")

    def _read(self) -> dict[str, Any] | None:
        path = self.folder / RECORD
        if not path.is_file():
            return None
        record = read_json(path, "best drafter")
        same = all(record.get(key) == value for key, value in self._measure.items())
        return record if same and isinstance(record.get("acceptance"), float) else None
