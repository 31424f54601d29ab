# SPDX-License-Identifier: Apache-2.0
"""Verbs that decode and compare."""

from pathlib import Path
from typing import Annotated

import typer

from treespark.cli.app import app
from treespark.cli.flags import (
    AsJson,
    Branching,
    Budget,
    Depth,
    Device,
    DrafterDir,
    DrawSeed,
    Dtype,
    MaxTokens,
    MinP,
    NoDrafter,
    Out,
    Stop,
    Target,
    Temperature,
    TopK,
    TopP,
    drafter_folder,
    integers,
)
from treespark.errors import UsageError

_BUDGETS = "8,12,16,20,32"


@app.command()
def generate(
    target: Target,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Prompts.")
    ] = None,
    prompt_files: Annotated[
        list[Path] | None, typer.Option("--prompts", help="JSONL file of prompts; repeatable.")
    ] = None,
    drafter: DrafterDir = None,
    no_drafter: NoDrafter = False,
    depth: Depth = None,
    branching: Branching = None,
    budget: Budget = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: DrawSeed = None,
    stop: Stop = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on behind the target's own end of an answer.")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Answer prompts; greedy text is the same with a drafter and without."""
    folder = drafter_folder(drafter, no_drafter)
    from treespark.serving.params import SamplingParams

    params = SamplingParams(
        max_tokens,
        tuple(stop or ()),
        ignore_eos=ignore_eos,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
    )
    from treespark.bench.generate import run_generate

    run_generate(
        target=target,
        drafter=folder,
        prompts=texts or [],
        prompt_files=prompt_files or [],
        depth=depth,
        branching=branching,
        budget=budget,
        params=params,
        dtype=dtype,
        device=device,
        as_json=as_json,
    )


@app.command()
def chat(
    target: Target,
    drafter: DrafterDir = None,
    depth: Depth = None,
    branching: Branching = None,
    budget: Budget = None,
    system: Annotated[
        str | None, typer.Option(help="System message before the conversation.")
    ] = None,
    max_tokens: MaxTokens = 512,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Most tokens of conversation and answer. Default: the target's context."),
    ] = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: DrawSeed = None,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Talk to a target in a terminal; /reset starts over, /quit leaves, Ctrl-C stops an answer."""
    from treespark.serving.params import SamplingParams

    params = SamplingParams(
        max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
    )
    from treespark.bench.chat import run_chat

    run_chat(
        target=target,
        drafter=drafter,
        depth=depth,
        branching=branching,
        budget=budget,
        system=system,
        params=params,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
    )


@app.command()
def compare(
    target: Target,
    prompt_files: Annotated[
        list[Path], typer.Option("--prompts", help="JSONL file of prompts; repeatable.")
    ],
    out: Out,
    drafter: DrafterDir = None,
    no_drafter: NoDrafter = False,
    depth: Depth = None,
    branching: Branching = None,
    budget: Budget = None,
    budgets: Annotated[
        str | None,
        typer.Option(help=f"Budgets to compare, comma-separated. Default: {_BUDGETS}."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts taken from each file.")] = 8,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests decoded at a time.")] = 1,
    max_tokens: MaxTokens = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Measured repetitions.")] = 3,
    profile: Annotated[
        bool, typer.Option("--profile", help="Time of each phase of a round.")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Measure autoregressive decoding, chain, trees and plain HF generate on the same prompts."""
    loaded = drafter_folder(drafter, no_drafter)
    if budgets is not None and loaded is None:
        raise UsageError(f"--budgets {budgets}: contradicts --no-drafter; give one of the two")
    if budgets is not None and budget is not None:
        raise UsageError(f"--budgets {budgets}: contradicts --budget {budget}; give one of the two")
    chosen = integers("--budgets", _BUDGETS if budgets is None else budgets)
    from treespark.bench.compare import run_compare

    run_compare(
        target=target,
        drafter=loaded,
        prompts=prompt_files,
        num_prompts=num_prompts,
        depth=depth,
        branching=branching,
        budget=budget,
        budgets=chosen,
        batch_size=batch_size,
        max_tokens=max_tokens,
        repeats=repeats,
        profile=profile,
        dtype=dtype,
        device=device,
        out=out,
        as_json=as_json,
    )


@app.command()
def quickstart(
    out: Out = Path("runs/quickstart"),
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes of training at the end.")] = 2.0,
) -> None:
    """Fetch the embedded target, show a tree, compare, train for two minutes."""
    from treespark.bench.quickstart import run

    run(out, minutes)
