# SPDX-License-Identifier: Apache-2.0
"""Flags that several verbs share; names and meanings as in vLLM where it has them."""

from pathlib import Path
from typing import Annotated

import typer

from treespark.errors import UsageError
from treespark.sizes import parse_bytes

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
Temperature = Annotated[
    float, typer.Option(help="0 is greedy; above it tokens are drawn, without drafts. At most 2.")
]
TopP = Annotated[float, typer.Option(help="Draw among the fewest tokens of this total share.")]
TopK = Annotated[int, typer.Option(help="Draw among the k best tokens; 0: all.")]
MinP = Annotated[
    float, typer.Option(help="Draw among tokens at least this fraction as likely as the best.")
]
DrawSeed = Annotated[
    int | None, typer.Option("--seed", help="Makes draws repeatable. Default: others each time.")
]
Stop = Annotated[
    list[str] | None, typer.Option(help="Text that ends an answer, cut from it; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]


def drafter_folder(folder: Path | None, no_drafter: bool) -> Path | None:
    """The drafter's folder, or None for decoding without one, which has to be said."""
    if folder is not None and no_drafter:
        raise UsageError(f"--no-drafter: contradicts --drafter {folder}; give one of the two")
    if folder is None and not no_drafter:
        raise UsageError("--drafter: missing; give the drafter's folder, or --no-drafter")
    return folder


def integers(option: str, text: str) -> list[int]:
    """The numbers of a comma-separated list."""
    parts = [part.strip() for part in text.split(",")]
    # Python refuses to read thousands of digits.
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise UsageError(f"{option} {text}: need whole numbers separated by commas, as in 8,16,32")
    return [int(part) for part in parts]


def byte_size(option: str, text: str) -> int:
    """Bytes of a size as people write it: 64G, 1.5T; powers of 1024."""
    try:
        return parse_bytes(text)
    except ValueError as problem:
        raise UsageError(f"{option} {text}: {problem}") from None
