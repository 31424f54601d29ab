# SPDX-License-Identifier: Apache-2.0
"""`treespark doctor`: does a drafter work with a target, and if not, why.

Checks what can be read off the two folders, lets the target answer prompts, and measures on its
answers how far the drafts reach: as the drafter's config says, and with one thing changed at a time
(`doctor_probes.py`). A change that reaches clearly further is the cause.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.text import Text
from tqdm import tqdm

from treespark.bench.doctor_checks import Check, check_folders, check_views
from treespark.bench.doctor_probes import acceptance, nearby_layers, probes
from treespark.bench.views import Views, view
from treespark.bench.workload import Prompt, load_prompts, needed_length
from treespark.data.batches import Row
from treespark.drafter.auto import DRAFTERS
from treespark.drafter.config_json import read_config
from treespark.drafter.inspect import training_record
from treespark.drafter.loading import TargetWeights, load_folder, misfits
from treespark.errors import UsageError
from treespark.serving.checks import default_policy
from treespark.serving.llm import LLM, SamplingParams
from treespark.target.model import TargetModel
from treespark.target.template import render_prompt, render_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from treespark.drafter.auto import AnyDrafter

# Tokens a round below which something is wrong: a wrong drafter reaches 1.0, the smallest that we
# ship 1.4 where it is worst.
LOW = 1.1
# A change is the cause if drafts add this many times as many tokens to a round, and this many more:
# on so few prompts layers one up or down may reach a tenth of a token further by chance.
_FACTOR, _MORE = 1.25, 0.1
# Part of what drafts added on held-out rows below which a drafter is worse than it was trained.
# Unlike text costs much: our SmolLM2 drafter adds 0.88 tokens there, 0.38 in dialogue.
_RECORDED_PART = 0.3
_PROBE_ROWS, _MAX_NUM_SEQS = 8, 8
_QUESTIONS = (
    "What is 17 + 25?",
    "Name three fruits.",
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "How many minutes are in three hours?",
    "Translate 'good morning' to French.",
    "What is the capital of Japan?",
    "Explain what a prime number is.",
    "Write a short poem about rain.",
    "A train goes 60 km an hour. How far does it go in two hours?",
    "List the days of the week.",
    "What does a compiler do?",
    "Tom has 5 apples and eats 2. How many are left?",
    "Give me a recipe for pancakes.",
    "What is the difference between a list and a tuple in Python?",
    "Who wrote Romeo and Juliet?",
    "Summarise in one sentence why sleep matters.",
    "Write an email that asks for a day off.",
    "What is half of 84?",
    "How does a bicycle stay upright?",
)


@dataclass
class Diagnosis:
    """What was found.  acceptance: tokens a round by policy.  probes: with one thing changed."""

    checks: list[Check]
    acceptance: dict[str, float]
    probes: list[dict[str, Any]]
    causes: list[str]

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.causes and all(check.passed for check in self.checks)


def run_doctor(
    target: Path,
    folder: Path,
    prompts: Path | None = None,
    *,
    num_prompts: int = 20,
    max_tokens: int = 64,
    dtype: str | None = "auto",
    device: str | None = None,
    as_json: bool = False,
) -> bool:
    """Examine a pair of folders, print what was found, and return whether it works.

    Raises UsageError for a folder that cannot be read at all, or prompts that cannot.
    """
    if prompts is None and num_prompts > len(_QUESTIONS):
        raise UsageError(
            f"--num-prompts {num_prompts}: {len(_QUESTIONS)} are built in; give more by --prompts"
        )
    # Before the target is loaded, which takes longer; how deep it is does not matter yet.
    read_config(folder, 1 << 10)
    training_record(folder)
    model = TargetModel.from_pretrained(target, dtype=dtype, device=device)
    asked = (
        [_asked(model, number, text) for number, text in enumerate(_QUESTIONS[:num_prompts])]
        if prompts is None
        else load_prompts([prompts], model, num_prompts)
    )
    found = examine(model, folder, asked, max_tokens)
    if as_json:
        facts = {"healthy": found.healthy, **dataclasses.asdict(found)}
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        _print(Console(), found)
    return found.healthy


def _asked(model: TargetModel, number: int, text: str) -> Prompt:
    return Prompt("", str(number), render_prompt(model.tokenizer, text), text)


def examine(
    model: TargetModel, folder: Path, asked: Sequence[Prompt], max_tokens: int
) -> Diagnosis:
    """Return the diagnosis of a drafter's folder beside its target."""
    weights = TargetWeights(
        model.embed_weight, model.head_weight, model.fingerprint, model.num_layers
    )
    config, _ = read_config(folder, model.num_layers)
    record = training_record(folder)
    checks = check_folders(model, config, record, weights)
    if any(field != "target_fingerprint" for field, _, _ in misfits(config, weights)):
        return Diagnosis(checks, {}, [], ["another target: its sizes differ, see above"])
    # Another fingerprint is reported, and then measured all the same.
    unnamed = dataclasses.replace(weights, fingerprint=None)
    drafter = load_folder(folder, DRAFTERS, unnamed)
    # By number: names of prompts may come twice.
    numbered = [(str(number), p.token_ids) for number, p in enumerate(asked, 1)]
    rows = target_answers(model, numbered, max_tokens)
    views = view(model, rows, nearby_layers(model, drafter))
    checks += check_views(model, drafter, views)
    reached = {"chain": acceptance(drafter, views)}
    if drafter.config.chain_only is None:
        policy = default_policy(drafter)
        reached[f"tree of {policy.budget}"] = acceptance(drafter, views, policy)
    found = Diagnosis(checks, reached, [], [])
    _probe(found, model, drafter, views)
    _judge(found, model, asked, record, drafter, max_tokens)
    return found


def target_answers(
    model: TargetModel, asked: Sequence[tuple[str, list[int]]], max_tokens: int
) -> list[Row]:
    """Return the target's greedy answers to named prompts as rows, but those of a single token.

    Raises UsageError where none is longer, or a prompt leaves no room.
    """
    prompts = [Prompt("", name, ids) for name, ids in asked]
    length = needed_length(prompts, max_tokens, model.max_context)
    llm = LLM(model, max_num_seqs=min(_MAX_NUM_SEQS, len(prompts)), max_model_len=length)
    ids = [prompt.token_ids for prompt in prompts]
    outputs = llm.generate(ids, SamplingParams(max_tokens), progress=sys.stderr.isatty())
    rows = [
        Row(p.name, np.asarray(p.token_ids + out.token_ids, dtype=np.int64), len(p.token_ids))
        for p, out in zip(prompts, outputs, strict=True)
        if len(out.token_ids) > 1
    ]
    if not rows:
        raise UsageError("--prompts: the target ends every answer at once; give other prompts")
    return rows


def _probe(found: Diagnosis, model: TargetModel, drafter: AnyDrafter, views: Views) -> None:
    """Try every alternative on a few rows; those that reach further are causes, the best first."""
    few = dataclasses.replace(views, rows=views.rows[:_PROBE_ROWS])
    base = acceptance(drafter, few)
    found.probes.append({"cause": None, "change": "as the config says", "acceptance": base})
    better: list[tuple[float, str]] = []
    shown = sys.stderr.isatty()
    for probe in tqdm(list(probes(model, drafter)), desc="tried", disable=not shown):
        reached = acceptance(probe.drafter, few)
        found.probes.append({"cause": probe.cause, "change": probe.change, "acceptance": reached})
        if _is_cause(reached, base):
            said = f"{probe.cause}: with {probe.change} drafts reach {reached:.2f} tokens a round"
            better.append((reached, f"{said} instead of {base:.2f}"))
    found.causes += [text for _, text in sorted(better, reverse=True)]


def _is_cause(reached: float, base: float) -> bool:
    return reached - 1 > _FACTOR * (base - 1) + _MORE


def _judge(
    found: Diagnosis,
    model: TargetModel,
    asked: Sequence[Prompt],
    record: dict[str, Any] | None,
    drafter: AnyDrafter,
    max_tokens: int,
) -> None:
    """Compare the acceptance with what was trained, and look further where it is near 1."""
    chain = found.acceptance["chain"]
    recorded = ((record or {}).get("held_out") or {}).get("chain")
    said = f"{chain:.2f} tokens a round by chains"
    passed = chain >= LOW
    if record is None:
        said += "; there is no training record to compare"
    elif recorded is None:
        said += "; the training record has no held-out rows to compare (data.holdout_rows)"
    else:
        said += f"; held-out rows reached {recorded:.2f} at the end of training"
        passed = passed and chain - 1 >= _RECORDED_PART * (recorded - 1)
    known = any(not check.passed for check in found.checks)
    found.checks.append(Check("acceptance", passed, said))
    if passed or found.causes:
        return
    if recorded is not None and recorded < LOW:
        found.causes.append("training: it had not learnt to draft when it ended")
        return
    found.causes += _other_templates(found, model, asked, drafter, max_tokens)
    if not known and not found.causes:
        nothing = "no change of layout, layers, mask, dtype or template helps"
        found.causes.append(
            f"training: {nothing}, and its fingerprint is this target's: not trained to the end"
            if drafter.config.target_fingerprint == model.fingerprint
            else f"another target: {nothing}, so the drafter was made for other weights of the "
            "same shape, or not trained to the end"
        )


def _other_templates(
    found: Diagnosis,
    model: TargetModel,
    asked: Sequence[Prompt],
    drafter: AnyDrafter,
    max_tokens: int,
) -> list[str]:
    """Ask the same in other words of the template; return those that reach further."""
    tokenizer, base = model.tokenizer, found.acceptance["chain"]
    renderings: dict[str, Callable[[str], str]] = {
        "without the chat template": lambda text: text,
        "with thinking on": lambda text: render_text(tokenizer, text, enable_thinking=True),
    }
    causes = []
    texts = [prompt for prompt in asked if prompt.text is not None][:_PROBE_ROWS]
    for name, render in renderings.items():
        again = [
            (str(number), list(tokenizer(render(p.text), add_special_tokens=False)["input_ids"]))
            for number, p in enumerate(texts, 1)
            if p.text is not None
        ]
        same = all(ids == p.token_ids for (_, ids), p in zip(again, texts, strict=True))
        if same:
            continue
        taps = drafter.config.target_layer_ids
        assert taps is not None
        reached = acceptance(drafter, view(model, target_answers(model, again, max_tokens), taps))
        found.probes.append({"cause": "template", "change": name, "acceptance": reached})
        if _is_cause(reached, base):
            causes.append(f"template: {name} drafts reach {reached:.2f} instead of {base:.2f}")
    return causes


def _print(console: Console, found: Diagnosis) -> None:
    lines = []
    for check in found.checks:
        mark = Text("ok      " if check.passed else "problem ", "green" if check.passed else "red")
        lines.append(mark + Text(f"{check.name}: {check.detail}"))
    for name, value in found.acceptance.items():
        lines.append(Text(f"        {name}: {value:.2f} tokens a round"))
    for probe in found.probes:
        lines.append(Text(f"        tried {probe['change']}: {probe['acceptance']:.2f}", "dim"))
    lines += [Text(f"cause   {cause}", "bold red") for cause in found.causes]
    if found.healthy:
        lines.append(Text("this drafter works with this target", "bold green"))
    elif not found.causes:
        problems = ", ".join(check.name for check in found.checks if not check.passed)
        text = f"nothing that was tried helps; the problems above are {problems}"
        lines.append(Text(text, "bold red"))
    for line in lines:
        console.print(line, soft_wrap=True)
