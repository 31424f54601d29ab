# SPDX-License-Identifier: Apache-2.0
"""The verb `bench suite`: the paper's evaluation by a recipe."""

from pathlib import Path
from typing import Annotated

import typer

from treespark.cli.flags import Device
from treespark.cli.load import bench


@bench.command("suite")
def bench_suite(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="YAML recipe, as those in recipes/bench.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Run folder. Default: the recipe's `out`.")
    ] = None,
    keep_ids: Annotated[
        bool, typer.Option("--keep-ids", help="Keep the ids of all answers in the records.")
    ] = False,
    device: Device = None,
) -> None:
    """Measure methods on the paper's datasets; goes on where an earlier run was interrupted."""
    from treespark.bench.suite import run_suite

    run = run_suite(recipe, out=out, keep_ids=keep_ids, device=device)
    typer.echo(f"{len(run.cells)} cells in {run.folder}")
