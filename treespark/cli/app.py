# SPDX-License-Identifier: Apache-2.0
"""The `treespark` command itself: logging, what it says of a mistake, exit codes."""

import errno
import io
import json
import logging
import os
import sys
from typing import Any

import typer

from treespark import __version__
from treespark.cli.flags import AsJson
from treespark.errors import UsageError

app = typer.Typer(
    name="treespark",
    help="Tree speculative decoding over block drafters: data, training, decoding, comparison.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


# As npu_ops.registry has them, which would load torch.
OPS_MODES = ("auto", "reference", "kernel")

_STDOUT = 1

# What the parser raises for every mistake on a command line: click's UsageError. From some release
# on typer brings its own copy of click, of which it names only this subclass.
_ParseError: Any = typer.BadParameter.__base__


@app.callback()
def _setup() -> None:
    """Configure logging once, at TREESPARK_LOG_LEVEL; refuse a TREESPARK_OPS that is none."""
    ops = os.environ.get("TREESPARK_OPS", "auto")
    if ops not in OPS_MODES:
        raise UsageError(f"TREESPARK_OPS={ops}: allowed: {', '.join(OPS_MODES)}")
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
    """Print versions, device, operators, and why not others: paste it into a bug report."""
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
    return "\n".join([*lines, _ops_as_text(facts["operators"])])


@app.command()
def ops(as_json: AsJson = False) -> None:
    """Print which implementation of each operator is active, by kind of device, and why."""
    from treespark.device import report

    facts = report()["operators"]
    typer.echo(json.dumps(facts, indent=2) if as_json else _ops_as_text(facts))


def _ops_as_text(facts: dict[str, Any]) -> str:
    lines = [f"operators     TREESPARK_OPS={facts['mode']}; {facts['reason'] or facts['library']}"]
    if facts["build"]:
        built = ", ".join(f"{name} {value}" for name, value in facts["build"].items())
        lines.append(f"  library built for {built}")
    for row in facts["operators"]:
        for kind, answer in row["devices"].items():
            why = f": {answer['reason']}" if answer["reason"] else ""
            lines.append(f"  {row['operator']:<15} {kind:<5} {answer['active']}{why}")
    return "\n".join(lines)


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
    """Run the command line; a mistake of the user is one line on stderr and exit code 2.

    So is an output that cannot be written, with code 1; of a closed pipe nothing is said.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks is spelled out and ends no verb.
        sys.stdout.reconfigure(errors="backslashreplace")
    code: Any = 1
    try:
        try:
            code = _run()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
    except OSError as problem:
        if not _is_output_broken():
            raise
        if problem.errno != errno.EPIPE:
            typer.echo(f"error: standard output: {problem.strerror}", err=True)
        code = 1
    sys.exit(code)


def _run() -> int:
    """Run a verb and say what is wrong with its call; return the exit code."""
    try:
        return app(standalone_mode=False) or 0
    except UsageError as problem:
        message = str(problem)
    except _ParseError as problem:
        if not sys.argv[1:]:
            # Called without a verb: the help, as the parser itself shows it.
            problem.show()
            return 2
        message = _parse_message(problem, sys.argv[1:])
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return 2


def _is_output_broken() -> bool:
    """Whether standard output fails again; if so, give up what waits in its buffer."""
    try:
        os.write(_STDOUT, b"\n")
    except OSError:
        # The interpreter would try once more at its end, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
        return True
    return False
