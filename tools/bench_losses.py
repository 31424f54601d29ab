# SPDX-License-Identifier: Apache-2.0
"""Memory and time of the training losses, beside an eager reference of the same losses.

    python tools/bench_losses.py [--part memory step] [--out FILE.json]

The reference below is the losses as one would first write them: whole [rows, vocabulary] tensors
under ordinary autograd.

memory: forward and backward of all losses on given block outputs, in float32, each way in a process
of its own. What counts is the peak of the resident memory above what it was before (VmHWM, reset
through /proc: Linux only): it holds what the products of the libraries need, too, which counting
tensors would miss, and the processes cannot influence each other. Gradients must agree to 1e-5 of
the largest entry of their tensor, else the exit code is 1.

step: whole optimizer steps, drafter included, of treespark (with the tree losses), dspark (the same
drafter without them) and the eager treespark, in turns in one process; and the FLOPs of their
matrix products, which no other load on the machine changes. `kept` and `recomputed` are
train.keep_logits true and false. The drafter's backbone has the paper's proportions for 4B at this
width: 5 layers, attention 2.4 times and MLP 3.8 times as wide as the hidden states.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from treespark.bench.flops import flop_counter
from treespark.bench.statistics import spread
from treespark.bench.tables import wide_console
from treespark.data.batches import Row, collate
from treespark.drafter.config import TreeSparkConfig
from treespark.drafter.modeling import TreeSparkDrafter
from treespark.errors import UsageError
from treespark.recipe import OptimSection
from treespark.training.losses import (
    LossTerm,
    base_terms,
    combine,
    cross_entropy_rows,
    depth_weights,
    l1_rows,
    validity,
)
from treespark.training.objective import MicroBatch, Objective, micro_batch_terms
from treespark.training.ranks import Ranks
from treespark.training.replay import CoverageSettings
from treespark.training.updates import PlainUpdates
from treespark.tree.policy import TreePolicy, expand, pack

WEIGHTS = {"ce": 0.1, "l1": 0.9, "confidence": 1.0, "survival": 0.1, "coverage": 0.1}
NO_TREES = {**WEIGHTS, "survival": 0.0, "coverage": 0.0}
MEMORY_AIM, STEP_AIM, GRADIENT_AIM = 1 / 8, 1.15, 1e-5


@dataclass(frozen=True)
class Sizes:
    """Shapes of one micro-batch of a single row, and of the drafter."""

    blocks: int = 64
    depth: int = 7
    vocab: int = 49152
    hidden: int = 576
    rank: int = 64
    tree_anchors: int = 16
    tokens: int = 256
    chunk_rows: int = 32

    def objective(self, keep_logits: bool) -> Objective:
        """Return the losses' options, with the published tree policy."""
        policy = TreePolicy(self.depth)
        return Objective(policy, CoverageSettings(), False, self.chunk_rows, keep_logits)


def eager_terms(
    drafter: TreeSparkDrafter, micro: MicroBatch, objective: Objective
) -> dict[str, LossTerm]:
    """Return every loss term of a micro-batch of one row, from whole tensors [A, B, V]."""
    batch, policy, gamma = micro.batch, objective.policy, objective.coverage.gamma
    hidden = drafter.training_blocks(batch.input_ids, micro.features, batch.anchors, batch.keep)[0]
    tokens, anchors = batch.input_ids[0], batch.anchors[0]
    last = len(tokens) - 1
    at = (anchors[:, None] + torch.arange(policy.depth)).clamp(max=last)
    parents, labels = tokens[at], tokens[(at + 1).clamp(max=last)]
    valid = validity(batch.loss_mask, batch.anchors, batch.keep, policy.depth)[0]
    logits = drafter.teacher_forced_logits(hidden, parents)
    teacher = drafter.base_logits(micro.last_hidden[0]).softmax(-1).detach()[at]
    ce = cross_entropy_rows(logits.flatten(0, 1), labels.flatten()).view_as(at)
    l1 = l1_rows(logits, teacher)
    confidence = drafter.confidence_logits(hidden, parents)
    terms = base_terms(ce, l1, depth_weights(valid, gamma), confidence)
    grows = batch.tree_keep[0]
    return terms | _eager_tree_terms(
        drafter, objective, hidden[grows], parents[grows, 0], teacher[grows], valid[grows]
    )


def _eager_tree_terms(
    drafter: TreeSparkDrafter,
    objective: Objective,
    hidden: Tensor,
    anchors: Tensor,
    teacher: Tensor,
    valid: Tensor,
) -> dict[str, LossTerm]:
    """Return "survival" and "coverage" of T trees with the logits of all depths kept."""
    policy, settings = objective.policy, objective.coverage
    with torch.no_grad():
        pool = expand(drafter.node_logits(hidden.detach()), anchors, policy)
        index = pack(pool, policy.budget).pool_index
    rows, size = pool.tokens.shape
    packed = torch.zeros(rows, size + 1, dtype=torch.bool)
    packed.scatter_(1, torch.where(index < 0, size, index), True)
    weights = depth_weights(valid, settings.gamma)
    sums = torch.zeros(4)
    mass = torch.zeros(rows, 0)
    for d in range(1, policy.depth + 1):
        columns, frontier = pool.children_of(d), pool.frontiers[d - 1]
        parents = pool.tokens.gather(1, frontier.clamp(min=0)) if d > 1 else anchors[:, None]
        logits = drafter.base_logits(hidden[:, d - 1 : d])
        logits = logits + drafter.markov_bias(parents, hidden[:, d - 1 : d])
        children = pool.tokens[:, columns].view(*frontier.shape, -1)
        edges = logits.log_softmax(-1).gather(-1, children).flatten(1)
        probs = teacher[:, d - 1]
        above = mass.gather(1, pool.parents[:, columns]) if d > 1 else 1.0
        own = probs.gather(1, pool.tokens[:, columns]) * above
        mass = torch.cat([mass, own], 1)
        counted = own * packed[:, columns] * valid[:, d - 1 : d]
        top_probs, top = probs.topk(settings.top_j)
        top_logits = logits.gather(-1, top[:, None].expand(-1, frontier.shape[1], -1))
        boundary = logits.topk(policy.branching).values[..., -1:]
        phi = (settings.margin + boundary - top_logits).clamp(0, settings.cap)
        share = (weights[:, d - 1 : d] * top_probs)[:, None].expand_as(phi)
        parts = (-counted * edges, counted, share * phi, share)
        sums = sums + torch.stack([part.sum() for part in parts])
    return {
        "survival": LossTerm(sums[0], sums[1].detach()),
        "coverage": LossTerm(sums[2], sums[3].detach()),
    }


class GivenBlocks(TreeSparkDrafter):
    """A drafter whose block outputs are given, so that nothing but the losses is computed."""

    blocks: Tensor

    def training_blocks(self, *_: Any) -> Tensor:
        """Return the given outputs [1, A, B, H]."""
        return self.blocks


def make(sizes: Sizes, kind: type[TreeSparkDrafter], seed: int = 0) -> Any:
    """Return a random float32 drafter and a micro-batch of one row for it."""
    torch.manual_seed(seed)
    config = TreeSparkConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=round(3.8 * sizes.hidden),
        num_hidden_layers=5 if kind is TreeSparkDrafter else 1,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=2 * round(2.4 * sizes.hidden / 16),
        block_size=sizes.depth,
        markov_rank=sizes.rank,
        mask_token_id=0,
        target_layer_ids=[0, 1, 2, 3, 4],
        num_target_layers=7,
        max_position_embeddings=sizes.tokens + sizes.depth + 1,
    )
    # Logits of deviation 3 have a best token of some percent, as a language model's.
    head = torch.randn(sizes.vocab, sizes.hidden) * 3 / sizes.hidden**0.5
    drafter = kind.init_from_target(config, head, head).train()
    ids = np.random.default_rng(seed).integers(1, sizes.vocab, sizes.tokens)
    row = Row("row", ids, sizes.tokens - max(sizes.tokens // 2, sizes.blocks + sizes.depth + 1))
    batch = collate(
        [(0, row)], num_anchors=sizes.blocks, num_tree_anchors=sizes.tree_anchors, seed=seed
    )
    features = torch.randn(1, sizes.tokens, config.feature_size)
    return drafter, MicroBatch(batch, features, torch.randn(1, sizes.tokens, sizes.hidden))


def loss_of(drafter: Any, micro: Any, method: str, objective: Objective) -> Tensor:
    """Return the training loss: eager, treespark or dspark."""
    if method == "eager":
        return combine(eager_terms(drafter, micro, objective), WEIGHTS)[0]
    weights = NO_TREES if method == "dspark" else WEIGHTS
    found = micro_batch_terms(drafter, micro, objective, weights)
    return combine(found.terms, weights)[0]


def given_blocks(sizes: Sizes) -> Any:
    """Return a drafter with random block outputs, and a micro-batch for it."""
    drafter, micro = make(sizes, GivenBlocks)
    drafter.blocks = torch.randn(1, sizes.blocks, sizes.depth, sizes.hidden, requires_grad=True)
    return drafter, micro


def gradients(
    drafter: Any, micro: Any, method: str, objective: Objective
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss, and its gradients for block outputs and heads by name."""
    loss = loss_of(drafter, micro, method, objective)
    loss.backward()
    leaves = {"blocks": drafter.blocks, **dict(drafter.named_parameters())}
    return float(loss.detach()), {n: p.grad for n, p in leaves.items() if p.grad is not None}


def _status(field: str) -> int:
    """Bytes of a field of this process's memory report."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise UsageError(f"--part memory: /proc/self/status has no {field} here")


def memory_worker(sizes: Sizes, method: str, out: Path) -> None:
    """Measure one way in this process; write its gradients, print the rest as JSON."""
    small = Sizes(4, 3, vocab=512, hidden=32, rank=8, tree_anchors=2, tokens=32)
    gradients(*given_blocks(small), method, small.objective(keep_logits=False))
    inputs = given_blocks(sizes)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    loss, grads = gradients(*inputs, method, sizes.objective(keep_logits=False))
    peak = _status("VmHWM") - before
    save_file({name: grad.contiguous() for name, grad in grads.items()}, str(out))
    print(json.dumps({"peak_bytes": peak, "loss": loss}))


def measure_memory(sizes: Sizes) -> dict[str, Any]:
    """Run both ways in processes of their own and compare them."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in tqdm(("treespark", "eager"), desc="memory"):
            out = Path(folder) / f"{method}.safetensors"
            command = [sys.executable, __file__, "--worker", method, "--grads", str(out)]
            command += ["--sizes", json.dumps(asdict(sizes))]
            # Large tensors go back to the system when they are freed, not to a heap with holes.
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                raise UsageError(f"--part memory: {method} failed: {done.stderr[-500:]}")
            result[method] = json.loads(done.stdout.splitlines()[-1])
        ours, eager = (load_file(str(Path(folder) / f"{m}.safetensors")) for m in result)
    result["ratio"] = result["treespark"]["peak_bytes"] / result["eager"]["peak_bytes"]
    result["gradient_difference"] = largest_difference(ours, eager)
    return result


def largest_difference(ours: dict[str, Tensor], eager: dict[str, Tensor]) -> float:
    """Return the largest difference of two gradients, relative to their tensor's largest entry."""
    if ours.keys() != eager.keys():
        raise UsageError(f"gradients of other tensors: {sorted(ours.keys() ^ eager.keys())}")
    parts = [(ours[n] - e).abs().max() / e.abs().max().clamp(min=1e-30) for n, e in eager.items()]
    return float(torch.stack(parts).max())


STEPS = {
    "dspark, kept": ("dspark", True),
    "treespark, kept": ("treespark", True),
    "dspark, recomputed": ("dspark", False),
    "treespark, recomputed": ("treespark", False),
    "eager": ("eager", False),
}
RATIOS = {
    "treespark over dspark, kept": ("treespark, kept", "dspark, kept"),
    "treespark over dspark, recomputed": ("treespark, recomputed", "dspark, recomputed"),
    "eager over treespark, kept": ("eager", "treespark, kept"),
    "eager over treespark, recomputed": ("eager", "treespark, recomputed"),
}


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def measure_steps(sizes: Sizes, repeats: int, clock: str) -> dict[str, Any]:
    """Take steps of every kind in turns, each first in another turn; return times and ratios."""
    now = CLOCKS[clock]
    drafter, micro = make(sizes, TreeSparkDrafter)
    updates = PlainUpdates(drafter, OptimSection(), Ranks(0, 1, torch.device("cpu")), 1)
    times: dict[str, list[float]] = {name: [] for name in STEPS}
    flops: dict[str, int] = {}
    names = list(STEPS)
    # The first round warms up, and counts.
    for turn in tqdm(range(repeats + 1), desc="step"):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            method, keep = STEPS[name]
            objective = sizes.objective(keep)
            with contextlib.nullcontext() if turn else flop_counter() as counter:
                started = now()
                updates.backward(lambda m=method, o=objective: loss_of(drafter, micro, m, o))
                updates.step(1e-6)
                taken = now() - started
            if counter is None:
                times[name].append(taken)
            else:
                flops[name] = counter.get_total_flops()
    ratios = {
        title: spread([a / b for a, b in zip(times[one], times[other], strict=True)])
        for title, (one, other) in RATIOS.items()
    }
    return {
        "seconds": {name: spread(t) for name, t in times.items()},
        "ratios": ratios,
        "flops": flops,
        "flop_ratios": {title: flops[one] / flops[other] for title, (one, other) in RATIOS.items()},
    }


def _print(sizes: Sizes, result: dict[str, Any]) -> None:
    console = wide_console()
    console.print(f"{sizes}\n{torch.get_num_threads()} threads, torch {torch.__version__}, float32")
    table = Table(box=box.SIMPLE)
    for name in ("measure", "result", "range", "aim"):
        table.add_column(name, justify="left" if name == "measure" else "right")
    if memory := result.get("memory"):
        for method in ("treespark", "eager"):
            size = memory[method]["peak_bytes"] / 2**20
            table.add_row(f"peak memory, {method}", f"{size:.0f} MiB", "", "")
        aim = f"at most {MEMORY_AIM:.3f}"
        table.add_row("peak memory, treespark over eager", f"{memory['ratio']:.3f}", "", aim)
        gap = f"{memory['gradient_difference']:.1e}"
        table.add_row("gradients, largest relative difference", gap, "", f"at most {GRADIENT_AIM}")
    step = result.get("step", {"seconds": {}, "ratios": {}, "flops": {}, "flop_ratios": {}})
    for title, part in {**step["seconds"], **step["ratios"]}.items():
        unit = " s" if title in step["seconds"] else ""
        aim = f"at most {STEP_AIM}" if "over dspark" in title else "above 1" if not unit else ""
        limits = f"{part['min']:.3f} to {part['max']:.3f}"
        table.add_row(title, f"{part['median']:.3f}{unit}", limits, aim)
    for title, flops in step["flops"].items():
        table.add_row(f"{title}, products", f"{flops / 1e9:.1f} GFLOP", "", "")
    for title, ratio in step["flop_ratios"].items():
        table.add_row(f"{title}, products", f"{ratio:.3f}", "", "")
    console.print(table)


def main() -> int:
    """Run the tool; return its exit code."""
    parser = argparse.ArgumentParser(description="Memory and time of the training losses.")
    parser.add_argument("--part", nargs="+", choices=("memory", "step"), default=["memory", "step"])
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=sorted(CLOCKS), default="wall", help="cpu: a busy machine"
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON, too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--grads", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.worker:
        memory_worker(Sizes(**args.sizes), args.worker, args.grads)
        return 0
    sizes = Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
    if sizes.tokens <= sizes.blocks + sizes.depth + 1:
        raise UsageError(f"--tokens {sizes.tokens}: need more than --blocks + --depth + 1")
    result: dict[str, Any] = {"sizes": asdict(sizes), "threads": args.threads, "clock": args.clock}
    if "memory" in args.part:
        result["memory"] = measure_memory(sizes)
    if "step" in args.part:
        result["step"] = measure_steps(sizes, args.repeats, args.clock)
    _print(sizes, result)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(result.get("memory", {}).get("gradient_difference", 0.0) > GRADIENT_AIM)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
