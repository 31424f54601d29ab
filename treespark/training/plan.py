# SPDX-License-Identifier: Apache-2.0
"""`treespark plan`: what a recipe costs in parameters, time, memory and disk, before it runs.

`cost.py` has the arithmetic. What the allocator needs on top is not in it, so a plan leaves a tenth
of the memory free.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Table

from treespark.data.batches import load_rows
from treespark.data.terminal import plain_console
from treespark.errors import UsageError
from treespark.sizes import readable
from treespark.target.checks import check_config
from treespark.target.folder import load_config
from treespark.training import setup
from treespark.training.cost import (
    Shapes,
    Workload,
    decoding_flops,
    flops_per_row,
    memory,
    store_bytes,
)

if TYPE_CHECKING:
    from treespark.drafter.config import DrafterConfig
    from treespark.recipe import Recipe

GIB = 1 << 30
# Part of the memory that a plan may use; the rest is the allocator's.
_USABLE = 0.9
_STAGES = (1, 2, 3)


@dataclass(frozen=True)
class Machine:
    """What the run may use.  memory_bytes: of one device.  peak_flops: of one device, bfloat16.

    mfu: part of the peak that training reaches.  disk_bytes: for the feature store.
    """

    devices: int
    memory_bytes: int
    peak_flops: float
    mfu: float
    disk_bytes: int


def choose(shapes: Shapes, recipe: Recipe, machine: Machine) -> tuple[int, int, dict[str, float]]:
    """Return (zero_stage, micro_batch, memory by part): the largest micro-batch that fits, at the
    lowest stage.

    Rows are as long as data.max_tokens. Raises UsageError where not even one row fits at stage 3.
    """
    per_device = recipe.train.global_batch // machine.devices
    if per_device * machine.devices != recipe.train.global_batch or per_device == 0:
        raise UsageError(
            f"--devices {machine.devices}: cannot share train.global_batch "
            f"{recipe.train.global_batch} evenly"
        )
    sizes = [n for n in range(per_device, 0, -1) if per_device % n == 0]
    for micro in sizes:
        for stage in _STAGES if machine.devices > 1 else (0,):
            parts = memory(
                shapes,
                recipe,
                recipe.data.max_tokens,
                stage=stage,
                devices=machine.devices,
                micro_batch=micro,
            )
            if sum(parts.values()) <= _USABLE * machine.memory_bytes:
                return stage, micro, parts
    need = sum(parts.values()) / _USABLE / GIB
    raise UsageError(
        f"--memory {machine.memory_bytes / GIB:.0f}G: one row of data.max_tokens "
        f"{recipe.data.max_tokens} needs {need:.1f} GiB; shorten it, or lower data.num_anchors"
    )


def plan(recipe: Recipe, shapes: Shapes, machine: Machine, workload: Workload) -> dict[str, Any]:
    """Return the whole plan, JSON-ready: counts, FLOPs, hours, memory and disk by part."""
    stage, micro, parts = choose(shapes, recipe, machine)
    disk, share = _stored(shapes, recipe, workload)
    train, rate = recipe.train, machine.peak_flops * machine.mfu
    plans_apart = train.global_batch > machine.devices * micro
    flops = flops_per_row(shapes, recipe, workload.mean_tokens, 1 - share, plans_apart=plans_apart)
    steps_by_epoch = max(1, workload.rows // train.global_batch)
    limits = [train.max_steps, (train.epochs or 0) * steps_by_epoch]
    steps = min(limit for limit in limits if limit)
    step_s = sum(flops.values()) * train.global_batch / (machine.devices * rate)
    decodings, decoding_s = 0, 0.0
    if train.decode_every:
        decodings = -(-steps // train.decode_every)
        # One device decodes, the others wait.
        decoding_s = decoding_flops(shapes, recipe, workload.mean_tokens) / rate
    decoding_s *= decodings
    seconds = steps * step_s + decoding_s
    return {
        "parameters": {"trainable": shapes.trainable, "target": shapes.target_parameters},
        "steps": steps,
        "flops_per_row": flops,
        "step_s": step_s,
        "decoding": {"times": decodings, "s": decoding_s, "share": decoding_s / seconds},
        "hours": seconds / 3600,
        "zero_stage": stage,
        "micro_batch": micro,
        "memory": parts,
        "store": {
            "bytes": disk,
            "fits": disk <= machine.disk_bytes,
            "read_bytes_per_s": disk / workload.rows * train.global_batch / step_s
            if share
            else 0.0,
        },
    }


def _stored(shapes: Shapes, recipe: Recipe, workload: Workload) -> tuple[int, float]:
    """Bytes of the store, of one of all rows where there is none, and the share of rows in it."""
    size, limit = store_bytes(shapes, recipe, workload), recipe.data.store_bytes
    if recipe.data.features == "mixed" and limit is not None:
        return min(size, limit), min(1.0, limit / size)
    return size, float(recipe.data.features == "store")


def run_plan(
    recipe: Recipe,
    machine: Machine,
    rows: int | None,
    mean_tokens: int | None,
    *,
    as_json: bool,
) -> None:
    """Print the plan of a recipe.  rows, mean_tokens: None counts the recipe's data.

    Of the target only config.json is needed. Raises UsageError where neither number nor data is
    there, and as `choose` does.
    """
    check_config(recipe.target.model / "config.json")
    target = load_config(recipe.target.model)
    mask = recipe.drafter.mask_token_id
    # Which token masks makes no difference to the sizes.
    config = setup.drafter_config(recipe, target, 0 if mask is None else mask, None)
    workload = _workload(recipe, config, rows, mean_tokens)
    result = plan(recipe, Shapes.of(target, config), machine, workload)
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        _print(result, machine)


def _workload(
    recipe: Recipe, config: DrafterConfig, rows: int | None, mean_tokens: int | None
) -> Workload:
    if rows is not None and mean_tokens is not None:
        return Workload(rows, mean_tokens)
    missing = [str(path) for path in recipe.data.continuations if not path.is_file()]
    if missing:
        raise UsageError(
            f"data.continuations {missing[0]}: not there yet; give --rows and --mean-tokens"
        )
    found, _ = load_rows(
        recipe.data.continuations,
        max_tokens=recipe.data.max_tokens,
        block_size=config.block_size,
        vocab_size=config.vocab_size,
    )
    if mean_tokens is not None:
        return Workload(len(found), mean_tokens)
    mean = fmean(len(row.token_ids) for row in found)
    prompt = fmean(max(1, row.prompt_len) for row in found)
    return Workload(rows or len(found), mean, prompt)


def _print(result: dict[str, Any], machine: Machine) -> None:
    table = Table(title="per device", title_justify="left")
    table.add_column("memory")
    table.add_column("GiB", justify="right")
    for name, size in result["memory"].items():
        table.add_row(name, f"{size / GIB:.2f}")
    total = sum(result["memory"].values())
    table.add_row("sum", f"{total / GIB:.2f} of {machine.memory_bytes / GIB:.0f}", style="bold")
    counts, store, flops = result["parameters"], result["store"], result["flops_per_row"]
    parts = ", ".join(f"{name} {value / 1e12:.2f}" for name, value in flops.items())
    lines = [
        f"trainable parameters {counts['trainable'] / 1e6:.1f} M, target "
        f"{counts['target'] / 1e9:.2f} B",
        f"TFLOP per row: {parts}",
        f"{result['steps']} steps of {result['step_s']:.2f} s, {result['hours']:.1f} hours: "
        f"{machine.devices} devices, {machine.mfu:.0%} of {machine.peak_flops / 1e12:g} TFLOP/s",
        f"set train.zero_stage={result['zero_stage']} train.micro_batch={result['micro_batch']}",
        f"feature store {readable(store['bytes'])}, "
        + ("fits" if store["fits"] else f"does not fit in {readable(machine.disk_bytes)}"),
    ]
    decoding = result["decoding"]
    if decoding["times"]:
        lines.append(
            f"held-out prompts decoded {decoding['times']} times: {decoding['s'] / 3600:.1f} "
            f"hours, {decoding['share']:.1%} of the time"
        )
    if store["read_bytes_per_s"]:
        lines.append(f"it is read at {readable(store['read_bytes_per_s'])}/s")
    console = plain_console(max(100, plain_console().width))
    for line in lines:
        console.print(line, highlight=False)
    console.print(table)
