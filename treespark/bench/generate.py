# SPDX-License-Identifier: Apache-2.0
"""`treespark generate`: answer prompts and say how fast, and how much of it the drafter foresaw."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from treespark.bench.metrics import summarize
from treespark.bench.statistics import mean_nodes
from treespark.bench.workload import (
    Prompt,
    changed_policy,
    check_policy_options,
    load_prompts,
    needed_length,
)
from treespark.errors import UsageError
from treespark.serving.llm import LLM, SamplingParams, load_pair
from treespark.target.template import check_utf8, render_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from treespark.serving.scheduler import RequestOutput

_MAX_NUM_SEQS = 8


def run_generate(
    target: Path,
    drafter: Path | None,
    prompts: Sequence[str],
    prompt_files: Sequence[Path] = (),
    *,
    depth: int | None = None,
    branching: int | None = None,
    budget: int | None = None,
    params: SamplingParams | None = None,
    dtype: str | None = "auto",
    device: str | None = None,
    as_json: bool = False,
) -> None:
    """Print the answers to `prompts` and to the rows of `prompt_files`.

    Every prompt is one user turn of the chat template. params: None takes the defaults. Raises
    UsageError for bad input, before anything is decoded.
    """
    params = params or SamplingParams()
    if not prompts and not prompt_files:
        raise UsageError("PROMPT: missing; give a text, or a file with --prompts")
    for text in prompts:
        check_utf8("PROMPT", text)
        if not text.strip():
            raise UsageError(f"PROMPT {text!r}: is empty; give a text")
    check_policy_options(drafter, depth=depth, branching=branching, budget=budget)
    model, loaded = load_pair(target, drafter, dtype=dtype, device=device)
    policy = changed_policy(loaded, depth=depth, branching=branching, budget=budget)
    asked = [
        Prompt("", str(number), render_prompt(model.tokenizer, text))
        for number, text in enumerate(prompts)
    ]
    asked += load_prompts(prompt_files, model)
    llm = LLM(
        model,
        loaded,
        policy,
        max_num_seqs=min(_MAX_NUM_SEQS, len(asked)),
        max_model_len=needed_length(asked, params.max_tokens, model.max_context),
    )
    started_s = time.perf_counter()
    ids = [prompt.token_ids for prompt in asked]
    outputs = llm.generate(ids, params, progress=len(ids) > 1)
    wall_s = time.perf_counter() - started_s
    records = [output.metrics for output in outputs]
    summary = summarize(records, wall_s, policy.depth) | {"mean_nodes": mean_nodes(records)}
    # How many answers were decoded without drafts, by reason.
    summary["plain_decoding"] = Counter(r.plain_decoding for r in records if r.plain_decoding)
    if as_json:
        answers = [_answer(*pair) for pair in zip(asked, outputs, strict=True)]
        sys.stdout.write(json.dumps({"answers": answers, "summary": summary}, indent=2) + "\n")
    else:
        _print(Console(), outputs, summary)


def _answer(prompt: Prompt, output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": prompt.name,
        "file": prompt.file or None,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


def _print(console: Console, outputs: Sequence[RequestOutput], summary: dict[str, Any]) -> None:
    for output in outputs:
        # As Text: square brackets of an answer are no markup.
        console.print(Panel(Text(output.text), subtitle=str(output.finish_reason)))
    line = f"{summary['num_output_tokens']} tokens, {summary['output_throughput']:.1f} tokens/s"
    if "sampling" in summary["plain_decoding"]:
        line += ", without drafts: sampled"
    elif summary["acceptance_length"] is not None:
        line += (
            f", acceptance length {summary['acceptance_length']:.2f} tokens per round at "
            f"{summary['mean_nodes']:.1f} nodes"
        )
    console.print(Text(line))
