# SPDX-License-Identifier: Apache-2.0
"""The verbs `prompts collect` and `prompts build`: training prompts from files, and by a recipe."""

from pathlib import Path
from typing import Annotated

import typer

from treespark.cli.app import app
from treespark.cli.flags import Out, Seed

prompts = typer.Typer(help="Make a file of training prompts.", rich_markup_mode=None)
app.add_typer(prompts, name="prompts")


@prompts.command()
def collect(
    inputs: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="JSONL files of prompts.")
    ],
    out: Out,
    tokenizer: Annotated[Path, typer.Option(help="Folder with the target's tokenizer.")],
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Longer prompts are dropped.")
    ] = 2048,
    count: Annotated[
        int | None, typer.Option(min=1, help="Prompts to write. Default: all.")
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option(help="Share of each category, as math=0.3,code=0.7; paper: the paper's."),
    ] = None,
    evaluation: Annotated[
        list[Path] | None, typer.Option(help="File whose prompts must not occur; repeatable.")
    ] = None,
    seed: Seed = 42,
) -> None:
    """Collect training prompts from JSONL files into one."""
    from treespark.data.prompts import parse_shares, run_prompts

    run_prompts(
        inputs=inputs,
        out=out,
        tokenizer=tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        count=count,
        shares=None if shares is None else parse_shares(shares),
        seed=seed,
        evaluation=evaluation or [],
    )


@prompts.command()
def build(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML recipe of a mixture.")],
) -> None:
    """Build a training mixture of named sources by a recipe."""
    from treespark.data.mixture import run_mixture

    run_mixture(recipe)
