# SPDX-License-Identifier: Apache-2.0
"""The verb `workers`: several servers behind one router."""

from pathlib import Path
from typing import Annotated

import typer

from treespark.cli.app import app
from treespark.cli.serving import Host


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def workers(
    context: typer.Context,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TARGET [OPTIONS OF SERVE]...]", help="Target and what `serve` takes."
        ),
    ] = None,
    num_workers: Annotated[int, typer.Option("--workers", help="Processes, one card each.")] = 3,
    slots: Annotated[int, typer.Option(help="Requests decoded at a time per worker.")] = 12,
    router: Annotated[str, typer.Option(help="auto, haproxy, smg or none.")] = "auto",
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the router.")] = 8000,
    worker_port: Annotated[int, typer.Option(help="Port of the first worker.")] = 8100,
    device: Annotated[
        str | None, typer.Option(help="Kind of device. Default: see `treespark env`.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads per worker. Default: the cores shared out.")
    ] = None,
    queue_timeout: Annotated[
        int, typer.Option(help="Seconds that a request waits for a slot before 503.")
    ] = 60,
    start_timeout: Annotated[int, typer.Option(help="Seconds that loading may take.")] = 600,
    shutdown_timeout: Annotated[
        int, typer.Option(help="Seconds that running requests get after SIGTERM.")
    ] = 30,
    worker_url: Annotated[
        list[str] | None,
        typer.Option(help="Worker on another host, as http://host:8100; repeatable."),
    ] = None,
    run_dir: Annotated[
        Path, typer.Option(help="Where the router's file and the process numbers are written.")
    ] = Path("runs/workers"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands only.")] = False,
) -> int:
    """Run several servers on one machine behind HAProxy or sglang-router."""
    from treespark.serving.workers import WorkersOptions, run_workers

    return run_workers(
        WorkersOptions(
            serve_args=(() if target is None else (str(target),)) + tuple(context.args),
            run_dir=run_dir,
            workers=num_workers,
            slots=slots,
            router=router,
            host=host,
            port=port,
            worker_port=worker_port,
            device=device,
            threads=threads,
            queue_timeout=queue_timeout,
            start_timeout=start_timeout,
            shutdown_timeout=shutdown_timeout,
            worker_url=tuple(worker_url or ()),
            dry_run=dry_run,
        )
    )
