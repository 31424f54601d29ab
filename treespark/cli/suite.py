# SPDX-License-Identifier: Apache-2.0
"""The verb `bench suite`: the paper's evaluation by a recipe."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from treespark.cli.flags import Device
from treespark.cli.load import bench
from treespark.errors import UsageError


@bench.command("suite")
def bench_suite(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="YAML recipe, as those in recipes/bench.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Run folder. Default: the recipe's `out`.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the datasets' files. Default: the recipe's `data`."),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(help="Measure this dataset of the recipe alone; can be repeated."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Server to measure instead, with --method and --concurrency."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Method of the recipe by which the server decodes.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time on the server.")
    ] = None,
    keep_ids: Annotated[
        bool, typer.Option("--keep-ids", help="Keep the ids of all answers in the records.")
    ] = False,
    device: Device = None,
) -> None:
    """Measure methods on the paper's datasets; goes on where an earlier run was interrupted."""
    if url is None:
        for option, value in (("--method", method), ("--concurrency", concurrency)):
            if value is not None:
                raise UsageError(f"{option} {value}: goes with --url")
        from treespark.bench.suite import run_suite

        run = run_suite(
            recipe, out=out, data=data, datasets=dataset or (), keep_ids=keep_ids, device=device
        )
    else:
        if method is None or concurrency is None:
            raise UsageError(f"--url {url}: needs --method and --concurrency")
        from treespark.bench.suite_server import run_server_suite

        run = run_server_suite(
            recipe, url, method, concurrency, out=out, data=data, datasets=dataset or ()
        )
    typer.echo(f"{len(run.cells)} cells in {run.folder}")
    typer.echo(f"tables and figures: treespark report suite {quote(str(run.folder))} --out FOLDER")
