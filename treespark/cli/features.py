# SPDX-License-Identifier: Apache-2.0
"""The verbs `features build` and `features verify`: the store of target features."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from treespark.cli.app import app
from treespark.cli.flags import AsJson, Seed
from treespark.cli.training import Overrides, Recipe

features = typer.Typer(help="Fill and check a store of target features.", rich_markup_mode=None)
app.add_typer(features, name="features")


@features.command("build")
def build_features(
    recipe: Recipe,
    overrides: Overrides = None,
    on_bad_shard: Annotated[
        Literal["fail", "rebuild"],
        typer.Option(
            help="rebuild: read all shards, and compute the rows of the damaged ones again."
        ),
    ] = "fail",
) -> None:
    """Store the features of a recipe's rows before training; goes on after an interruption."""
    from treespark.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    from treespark.training.feature_runs import run_build

    typer.echo(run_build(loaded, on_bad_shard=on_bad_shard))


@features.command("verify")
def verify_features(
    source: Annotated[
        Path, typer.Argument(metavar="RECIPE_OR_STORE", help="YAML recipe, or folder of a store.")
    ],
    overrides: Overrides = None,
    target: Annotated[
        Path | None, typer.Option(help="Target of a store that is given by its folder.")
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="Random rows to compute again.")] = 8,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Read every shard, compute some rows again, name bad shards; exit code 1 if there are any."""
    from treespark.training.feature_runs import run_verify

    if not run_verify(
        source, overrides or [], target=target, num_rows=rows, seed=seed, as_json=as_json
    ):
        raise typer.Exit(1)
