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
    Dtype,
    MaxTokens,
    NoDrafter,
    Out,
    Target,
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
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Answer prompts; the text is the same with a drafter and without."""
    from treespark.bench.generate import run_generate

    run_generate(
        target=target,
        drafter=drafter_folder(drafter, no_drafter),
        prompts=texts or [],
        prompt_files=prompt_files or [],
        depth=depth,
        branching=branching,
        budget=budget,
        max_tokens=max_tokens,
        dtype=dtype,
        device=device,
        as_json=as_json,
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
def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a training run (output.dir).")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Page to write. Default: RUN/report.html.")
    ] = None,
) -> None:
    """Make an HTML page of a training run: losses, depths, acceptance, speed, settings."""
    from treespark.bench.training_report import write_training_report

    typer.echo(write_training_report(run, run / "report.html" if out is None else out))


@app.command()
def quickstart(
    out: Out = Path("runs/quickstart"),
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes of training at the end.")] = 2.0,
) -> None:
    """Fetch the embedded target, show a tree, compare, train for two minutes."""
    from treespark.bench.quickstart import run

    run(out, minutes)
