# SPDX-License-Identifier: Apache-2.0
"""Verbs on drafter folders: `drafter inspect`, `export`, `doctor`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from treespark.cli.app import app
from treespark.cli.flags import AsJson, Device, Dtype, Out, Target

drafter = typer.Typer(help="Look at drafter folders.", rich_markup_mode=None)
app.add_typer(drafter, name="drafter")

DrafterFolder = Annotated[
    Path, typer.Argument(metavar="DRAFTER", help="Folder of a drafter, of any layout we read.")
]


@drafter.command()
def inspect(
    folder: DrafterFolder,
    target: Annotated[Path | None, typer.Option(help="Folder of a target it may fit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a drafter folder is, and whether it fits a target; exit code 1 if it does not."""
    from treespark.bench.drafter_folders import print_facts, target_weights
    from treespark.drafter.inspect import describe

    facts = describe(folder, None if target is None else target_weights(target))
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        print_facts(facts)
    if facts["misfits"]:
        raise typer.Exit(1)


@app.command()
def export(
    folder: DrafterFolder,
    target: Annotated[Path, typer.Option(help="Folder of its target.")],
    out: Out,
    to: Annotated[
        str, typer.Option(help="treespark, deepspec, dflash, eagle3 or speculators.")
    ] = "deepspec",
    verifier: Annotated[
        str | None,
        typer.Option(help="Target's name in a speculators config. Default: its folder."),
    ] = None,
) -> None:
    """Write a drafter in another layout; deepspec has the target's embedding and head in it."""
    from treespark.bench.drafter_folders import target_weights
    from treespark.drafter.convert import convert
    from treespark.drafter.export import check_destination

    check_destination(out, folder)
    convert(folder, out, to, target_weights(target), verifier=verifier or str(target))
    typer.echo(out)


@app.command()
def doctor(
    target: Target,
    folder: DrafterFolder,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="JSONL file of prompts. Default: built in.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts taken from it.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each answer.")] = 64,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Check that a drafter works with a target, and name the cause if it does not (exit code 1)."""
    from treespark.bench.doctor import run_doctor

    healthy = run_doctor(
        target,
        folder,
        prompts,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        dtype=dtype,
        device=device,
        as_json=as_json,
    )
    if not healthy:
        raise typer.Exit(1)
