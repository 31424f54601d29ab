# SPDX-License-Identifier: Apache-2.0
"""The verbs `report train` and `report suite`: pages and tables of finished runs."""

from pathlib import Path
from typing import Annotated

import typer

from treespark.cli.app import app
from treespark.cli.flags import Out

report = typer.Typer(help="Make pages and tables of runs.", rich_markup_mode=None)
app.add_typer(report, name="report")


@report.command("train")
def report_train(
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


@report.command("suite")
def report_suite(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of `treespark bench suite`.")
    ],
    out: Out,
) -> None:
    """Make tables, figures and one page with a tree explorer from the records of a suite."""
    from treespark.bench.report.write import write_suite_report

    typer.echo(write_suite_report(runs, out))
