# SPDX-License-Identifier: Apache-2.0
"""Time the operators: right first, then measured here, then modelled for a 910B.

    python tools/bench_ops.py [--device cpu] [--repeats 5] [--out runs/bench-ops]

1. Correctness gate: every operator's active implementation on every device against its reference.
   A difference ends the tool with exit code 1 before anything is timed.
2. Measured: the shapes of the paper (Qwen3-4B, 1 and 12 requests) and of SmolLM2-135M, in
   bfloat16, on the usable devices; median, least and most of the repeats.
3. Modelled, NOT measured: bytes and operations counted by npu_ops/roofline.py over the peak rates
   of 910B1 to 910B4. Nothing here ran on an NPU.

With --out it writes ops.json, ops.svg and ops.png.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.table import Table

import npu_ops
from npu_ops import roofline
from npu_ops.markov_topk import SPEC as MARKOV_TOPK
from npu_ops.pack_tree import SPEC as PACK_TREE
from npu_ops.tree_attention import SPEC as TREE_ATTENTION
from treespark.bench.plot import check_matplotlib
from treespark.bench.tables import wide_console
from treespark.data.jsonl import write_json_atomic
from treespark.device import available_devices, report, resolve_device, synchronize
from treespark.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from torch import Tensor

SPECS = {spec.name: spec for spec in (MARKOV_TOPK, TREE_ATTENTION, PACK_TREE)}
# One rounding of a probability and one of the result to bfloat16, each 2^-9 of values around 1.
ATTENTION_TOLERANCE = 1e-2
# float32 sums in another order.
LSE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """One call at one shape: arguments on a device, and the least work it is."""

    op: str
    title: str
    arguments: Callable[[torch.device], list[Any]]
    work: roofline.Work


def markov_case(title: str, num_requests: int, vocab: int, rank: int, k: int = 4) -> Case:
    """Return one depth of an expansion: k parents per request share a row of base logits.

    Values are small whole numbers: sums are exact in any order, so ties are ties and indices equal.
    """
    num_rows = num_requests * k

    def arguments(device: torch.device) -> list[Any]:
        torch.manual_seed(1)
        base = torch.randint(-8, 9, (num_requests, vocab)).bfloat16()
        base_row = torch.arange(num_requests, dtype=torch.int32).repeat_interleave(k)
        latent = torch.randint(-2, 3, (num_rows, rank)).bfloat16()
        w2 = torch.randint(-2, 3, (vocab, rank)).bfloat16()
        return [*(tensor.to(device) for tensor in (base, base_row, latent, w2)), k]

    work = roofline.markov_topk_work(num_rows, num_requests, vocab, rank, k)
    return Case("markov_topk", title, arguments, work)


def attention_case(
    title: str, num_requests: int, heads: tuple[int, int], head_dim: int, prefix: int, rows: int
) -> Case:
    """Return one layer of a verification; heads: of queries, of keys and values."""

    def arguments(device: torch.device) -> list[Any]:
        torch.manual_seed(2)
        query = torch.randn(num_requests, rows, heads[0], head_dim)
        cache = torch.randn(2, num_requests, prefix + rows, heads[1], head_dim)
        seq_lens = torch.full((num_requests,), prefix, dtype=torch.int32)
        mask = torch.zeros(rows, rows, dtype=torch.bool)
        for row in range(rows):
            mask[row] = mask[(row - 1) // 2] if row else False
            mask[row, row] = True
        words = npu_ops.words_from_mask(mask).expand(num_requests, -1, -1)
        halves = (tensor.bfloat16() for tensor in (query, *cache))
        return [tensor.to(device) for tensor in (*halves, seq_lens, words)]

    sizes = (num_requests, rows, *heads, head_dim, prefix)
    return Case("tree_attention", title, arguments, roofline.tree_attention_work(*sizes))


def pack_case(title: str, num_requests: int, depth: int = 7, k: int = 4, n: int = 32) -> Case:
    """Return the packing of pools of k + (depth - 1) k^2 candidates; scores tie often."""
    num_candidates = k + (depth - 1) * k * k

    def arguments(device: torch.device) -> list[Any]:
        torch.manual_seed(3)
        columns = torch.arange(num_candidates)
        depths = (columns - k).div(k * k, rounding_mode="floor").clamp_min(-1) + 2
        # The frontier of each depth: the first k candidates of the one above.
        first = (k + (depths - 3) * k * k).clamp_min(0)
        parents = torch.where(depths == 1, -1, first + (columns - k) % (k * k) // k)
        edges = -torch.randint(0, 4, (num_requests, num_candidates)).float()
        shape = (num_requests, -1)
        counts = torch.full((num_requests,), num_candidates)
        whole = (parents.expand(shape), depths.expand(shape), counts)
        bias = torch.zeros(depth + 1)
        return [t.to(device) for t in (edges, *(x.int() for x in whole), bias)] + [n]

    work = roofline.pack_tree_work(num_requests, num_candidates, n)
    return Case("pack_tree", title, arguments, work)


CASES = [
    markov_case("48 rows, V 151936, r 256", 12, 151936, 256),
    markov_case("4 rows, V 151936, r 256", 1, 151936, 256),
    markov_case("4 rows, V 49152, r 64", 1, 49152, 64),
    attention_case("B 12, Q 33, 32/8 x 128, prefix 4096", 12, (32, 8), 128, 4096, 33),
    attention_case("B 1, Q 33, 32/8 x 128, prefix 4096", 1, (32, 8), 128, 4096, 33),
    attention_case("B 1, Q 33, 9/3 x 64, prefix 512", 1, (9, 3), 64, 512, 33),
    pack_case("B 12, 100 candidates, 32 kept", 12),
    pack_case("B 1, 100 candidates, 32 kept", 1),
]
# Small enough for the references, which are written to be read.
GATES = [
    markov_case("12 rows, V 1000, r 32", 3, 1000, 32),
    markov_case("1 row, V 17, r 16", 1, 17, 16, k=1),
    attention_case("B 3, Q 33, 8/2 x 128, prefix 129", 3, (8, 2), 128, 129, 33),
    attention_case("B 1, Q 1, 9/3 x 64, prefix 0", 1, (9, 3), 64, 0, 1),
    pack_case("B 5, 100 candidates, 32 kept", 5),
    pack_case("B 1, 4 candidates, 127 kept", 1, depth=1, n=127),
]


def call(case: Case, arguments: list[Any]) -> tuple[Tensor, ...]:
    """Run the operator as the dispatcher has it."""
    return tuple(getattr(torch.ops.treespark, case.op).default(*arguments))


def difference(case: Case, device: torch.device) -> str | None:
    """Return what is wrong with the active implementation, or None."""
    arguments = case.arguments(device)
    results, expected = call(case, arguments), SPECS[case.op].reference(*arguments)
    for number, (found, wanted) in enumerate(zip(results, expected, strict=True)):
        tolerance = ATTENTION_TOLERANCE if found.dtype == torch.bfloat16 else LSE_TOLERANCE
        if found.is_floating_point():
            same = torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)
        else:
            same = torch.equal(found, wanted)
        if not same:
            return f"{case.op} ({case.title}) on {device}: result {number} is not the reference's"
    return None


def measure(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return seconds of one call: median, min and max of the repeats, after two calls apart."""
    arguments, seconds = case.arguments(device), []
    for number in range(repeats + 2):
        synchronize(device)
        started = time.perf_counter()
        call(case, arguments)
        synchronize(device)
        if number >= 2:
            seconds.append(time.perf_counter() - started)
    times = {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
    return {"op": case.op, "shape": case.title, "device": str(device), **times}


def modelled(case: Case) -> dict[str, Any]:
    """Return the modelled times of a case on every chip, with the counts they rest on."""
    times = {chip.name: asdict(roofline.modelled_time(case.work, chip)) for chip in roofline.CHIPS}
    return {"op": case.op, "shape": case.title, "work": asdict(case.work), "modelled": times}


def measured_table(rows: list[dict[str, Any]], repeats: int) -> Table:
    """Return milliseconds per call, one line per case and device."""
    title = f"measured: ms per call, median (min..max) of {repeats}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name in ("operator", "shape", "device"):
        table.add_column(name)
    table.add_column("ms", justify="right")
    for row in rows:
        low, high = row["min_s"] * 1e3, row["max_s"] * 1e3
        spread = f"{row['median_s'] * 1e3:.3f} ({low:.3f}..{high:.3f})"
        table.add_row(row["op"], row["shape"], row["device"], spread)
    return table


def modelled_table(rows: list[dict[str, Any]]) -> Table:
    """Return microseconds per call by chip, and what bounds them."""
    title = "MODELLED, not measured: us per call at peak rates, and the unit that bounds it"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("operator")
    table.add_column("shape")
    for chip in roofline.CHIPS:
        table.add_column(chip.name, justify="right")
    for row in rows:
        cells = [f"{t['seconds'] * 1e6:.1f} {t['bound_by']}" for t in row["modelled"].values()]
        table.add_row(row["op"], row["shape"], *cells)
    return table


def plot(result: dict[str, Any], path: Path) -> None:
    """Write times of all cases as bars on a logarithmic axis; modelled ones are hatched."""
    from matplotlib.figure import Figure

    series = {f"{device} (measured)": {} for device in result["devices"]}
    for row in result["measured"]:
        series[f"{row['device']} (measured)"][row["op"], row["shape"]] = row["median_s"]
    for chip in roofline.CHIPS:
        series[f"{chip.name} (modelled)"] = {
            (row["op"], row["shape"]): row["modelled"][chip.name]["seconds"]
            for row in result["modelled"]
        }
    cases = [(row["op"], row["shape"]) for row in result["modelled"]]
    figure = Figure(figsize=(10, 1.5 + 0.7 * len(cases)), layout="constrained")
    axes = figure.subplots()
    height = 0.85 / len(series)
    for number, (name, times) in enumerate(series.items()):
        places = [i + (number - (len(series) - 1) / 2) * height for i in range(len(cases))]
        milliseconds = [times[case] * 1e3 for case in cases]
        hatch = "//" if "modelled" in name else None
        axes.barh(places, milliseconds, height, label=name, hatch=hatch)
    axes.set_yticks(range(len(cases)), [f"{op}\n{shape}" for op, shape in cases], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms per call; 910B times are modelled from a roofline, not measured")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def run(devices: list[torch.device], repeats: int, console: Console) -> dict[str, Any] | None:
    """Gate, measure and model; returns the result, or None if the gate is shut."""
    wrong = [text for case in GATES for d in devices if (text := difference(case, d)) is not None]
    for text in wrong:
        console.print(f"WRONG: {text}")
    if wrong:
        return None
    console.print(f"correct: {len(GATES)} cases on {', '.join(map(str, devices))}")
    measured = [measure(case, device, repeats) for case in CASES for device in devices]
    models = [modelled(case) for case in CASES]
    console.print(measured_table(measured, repeats))
    console.print(modelled_table(models))
    return {
        "environment": report(),
        "devices": list(map(str, devices)),
        "repeats": repeats,
        "measured": measured,
        "modelled": models,
        "note": "modelled: roofline at peak rates; nothing ran on an NPU",
    }


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="kind of device; default: all that are usable")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for ops.json, ops.svg and ops.png")
    options = parser.parse_args()
    try:
        if options.repeats < 1:
            raise UsageError(f"--repeats {options.repeats}: need at least 1")
        if options.out is not None:
            check_matplotlib("bench_ops")
        names = [options.device] if options.device else available_devices()
        devices = [resolve_device(name) for name in names]
    except UsageError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    result = run(devices, options.repeats, wide_console())
    if result is None:
        return 1
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_json_atomic(options.out / "ops.json", result)
        for suffix in ("svg", "png"):
            plot(result, options.out / f"ops.{suffix}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
