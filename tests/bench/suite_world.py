# SPDX-License-Identifier: Apache-2.0
"""Run folders of `treespark bench suite`, written row by row: by hand, or seeded and plausible."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from typing import TYPE_CHECKING

from treespark.bench import suite_records as records
from treespark.bench.suite_records import (
    CellRow,
    DatasetRow,
    MethodRow,
    RequestRow,
    RoundRow,
    SuiteSetting,
    TraceRow,
)

if TYPE_CHECKING:
    from pathlib import Path

DEPTH = 7


def _method(name: str, title: str, kind: str, proposal: str = "conditioned") -> MethodRow:
    if kind == "autoregressive":
        return MethodRow(name=name, title=title, kind=kind, method=name)
    width, budget = (4, 32) if kind == "tree" else (1, DEPTH)
    return MethodRow(name=name, title=title, kind=kind, method=name, drafter=name,
                     proposal=proposal, priority="probability", stop="frontier", depth=DEPTH,
                     branching=width, budget=budget)  # fmt: skip


METHODS = {
    "autoregressive": _method("autoregressive", "Autoregressive", "autoregressive"),
    "eagle3": _method("eagle3", "EAGLE-3", "chain"),
    "dflash": _method("dflash", "DFlash", "chain", "marginal"),
    "dspark": _method("dspark", "DSpark", "chain"),
    "dspark-tree": _method("dspark-tree", "DSpark+Tree", "tree"),
    "treespark": _method("treespark", "TreeSpark", "tree"),
}
GENERAL = ("GSM8K", "MATH-500", "AIME25", "HumanEval", "MBPP", "LiveCodeBench", "MT-Bench",
           "Alpaca", "Arena-Hard")  # fmt: skip
WRITING = ("Academic", "Advertising", "Education", "Finance", "Literature", "Politics")
# Texts that would break out of markup, script or layout if they were not escaped.
HOSTILE = ("</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", '"quoted\'',
           "\u202eright to left", "😀👩‍👩‍👧", "שלום", "\u0000\u0007", "\u2028", "漢字", " \n\t",
           "&lt;b&gt;", "")  # fmt: skip


def dataset(title: str, group: str = "general") -> DatasetRow:
    """A dataset named after its title."""
    return DatasetRow(name=title.lower(), title=title, group=group, source=f"{title}.jsonl",
                      pool_size=100, subset_size=20, subset_sha256="ab" * 32)  # fmt: skip


def setting(datasets, methods, concurrencies=(1,), repeats=1, **changes) -> SuiteSetting:
    """A setting with the baseline and the control of the paper."""
    defaults = {
        "command": ["treespark", "bench", "suite", "my.yaml"], "time": "2026-01-01T00:00",
        "versions": {"treespark": "0.1.0", "packages": {"torch": "2.13.0"}}, "recipe": {},
        "target": {"path": "models/SmolLM2-135M-Instruct", "fingerprint": "f" * 64},
        "drafters": {"treespark": {"path": "drafters/treespark", "fingerprint": "d" * 64}},
        "max_tokens": 128, "seed": 980406, "dtype": "float32", "device": "cpu", "threads": 2,
        "baseline": "dspark", "control": "dspark-tree", "load_average": [0.5, 0.5, 0.5],
    }  # fmt: skip
    return SuiteSetting(datasets=list(datasets), methods=[METHODS[m] for m in methods],
                        concurrencies=list(concurrencies), repeats=repeats,
                        **(defaults | changes))  # fmt: skip


class RunWriter:
    """Collects the rows of a run and writes its folder."""

    def __init__(self, own: SuiteSetting) -> None:
        self.setting = own
        self.rows = {name: [] for name in (records.CELLS, records.REQUESTS, records.ROUNDS,
                                           records.TRACES)}  # fmt: skip

    def cell(self, key, wall_s, requests, phase_s=None, num_rounds=None, step_s=None) -> None:
        """One cell.

        key: (dataset, method, concurrency, repeat).  requests: (first_token_s, finished_s, rounds,
        answer), where a round is (num_committed, num_accepted, num_proposed, proposed_depth).
        """
        names = dict(zip(("dataset", "method", "concurrency", "repeat"), key, strict=True))
        tokens = 0
        for number, (first_s, end_s, rounds, answer) in enumerate(requests):
            prompt = f"{key[0]}-{number}"
            own_tokens = 1 + sum(r[0] for r in rounds)
            tokens += own_tokens
            self.rows[records.REQUESTS].append(RequestRow(
                **names, prompt_id=prompt, num_prompt_tokens=10, num_output_tokens=own_tokens,
                num_prefill_tokens=1, num_rounds=len(rounds), finish_reason="length",
                plain_decoding=None, arrival_s=0.0, admitted_s=0.0, first_token_s=first_s,
                finished_s=end_s, ids_sha256=answer))  # fmt: skip
            self.rows[records.ROUNDS] += [
                RoundRow(**names, prompt_id=prompt, round=i, num_committed=c, num_accepted=a,
                         num_proposed=p, proposed_depth=d)
                for i, (c, a, p, d) in enumerate(rounds)
            ]  # fmt: skip
        engine_rounds = sum(len(r[2]) for r in requests) if num_rounds is None else num_rounds
        self.rows[records.CELLS].append(CellRow(
            **names, wall_s=wall_s, num_requests=len(requests), num_output_tokens=tokens,
            num_rounds=engine_rounds, phase_s=phase_s or {}, step_s=step_s))  # fmt: skip

    def write(self, folder: Path) -> Path:
        """Write the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / records.SETTING).write_text(json.dumps(asdict(self.setting)))
        for name, rows in self.rows.items():
            lines = (json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
            (folder / name).write_text("".join(lines), encoding="utf-8")
        return folder


# ---------------------------------------------------------------------- seeded and plausible

# Chance of a draft token to be accepted, and the cost of a round at C = 1 in ms.
_CHANCE = {"autoregressive": 0.0, "eagle3": 0.45, "dflash": 0.5, "dspark": 0.56,
           "dspark-tree": 0.66, "treespark": 0.7}  # fmt: skip
_ROUND_MS = {"autoregressive": 30, "eagle3": 45, "dflash": 40, "dspark": 42, "dspark-tree": 49,
             "treespark": 49}  # fmt: skip


def plausible_run(folder: Path, *, concurrencies=(1, 12), repeats=3, num_requests=2,
                  num_traces=2, seed=7) -> Path:  # fmt: skip
    """All methods on all sets, with traces of the first prompts of two sets."""
    rng = random.Random(seed)
    datasets = [*map(dataset, GENERAL), *(dataset(title, "writing") for title in WRITING)]
    run = RunWriter(setting(datasets, METHODS, concurrencies, repeats))
    for own in datasets:
        ease = rng.uniform(0.85, 1.12) * (0.75 if own.group == "writing" else 1)
        for method in METHODS:
            rounds = [
                [_round(rng, method, _CHANCE[method] * ease) for _ in range(12)]
                for _ in range(num_requests)
            ]
            for concurrency in concurrencies:
                for repeat in range(repeats):
                    run_cell(run, rng, (own.name, method, concurrency, repeat), rounds)
    for own in (datasets[0], datasets[6], datasets[9]):
        for number in range(num_traces):
            for method in list(METHODS)[1:]:
                run.rows[records.TRACES] += plausible_trace(rng, own.name, method, number)
    return run.write(folder)


def run_cell(run, rng, key, rounds) -> None:
    """One cell of these rounds at a plausible speed."""
    concurrency = key[2]
    round_s = (
        _ROUND_MS[key[1]] / 1000 * (1 + 0.3 * math.log2(concurrency)) * rng.uniform(0.97, 1.03)
    )
    requests = [
        (0.1, 0.1 + round_s * len(own), own, f"{key[0]}-{i}") for i, own in enumerate(rounds)
    ]
    engine_rounds = max(1, sum(map(len, rounds)) // min(concurrency, len(rounds)))
    busy = engine_rounds * round_s
    shares = {"draft": 0.1, "expand": 0.15, "verify": 0.7, "commit": 0.03, "host": 0.02}
    phases = {phase: busy * share for phase, share in shares.items()} | {"prefill": 0.1}
    run.cell(key, (busy + 0.1) * 1.005, requests, phases, engine_rounds, busy + 0.1)


def _round(rng, method, chance):
    depth = 0
    while depth < DEPTH and rng.random() < min(chance * 1.1, 0.95) ** (1 + depth * 0.05):
        depth += 1
    if method == "autoregressive":
        return (1, 0, 0, 0)
    nodes = METHODS[method].budget
    return (depth + 1, depth, nodes, DEPTH if nodes <= DEPTH else rng.choice((5, 6, 7, 7)))


def plausible_trace(rng, name, method, number, num_rounds=9) -> list[TraceRow]:
    """A trace of trees with one accepted path each; hostile texts among the tokens."""
    words = [" the", " of", " tree", ".", ",", " eggs", "\n", " 16", " =", " so", " she", "ing",
             " per", " day", *HOSTILE]  # fmt: skip
    return [
        _traced_round(rng, words, name, method, f"{name}-{number}", index, num_rounds)
        for index in range(num_rounds)
    ]


def _traced_round(rng, words, name, method, prompt, index, num_rounds) -> TraceRow:
    is_tree = METHODS[method].kind == "tree"
    tokens, parents, depths, scores = [rng.randrange(len(words))], [-1], [0], [0.0]
    frontier = [0]
    for depth in range(1, DEPTH + 1):
        made = []
        for parent in frontier:
            for token in rng.sample(range(len(words)), 4 if is_tree else 1):
                if len(tokens) <= METHODS[method].budget:
                    tokens.append(token)
                    parents.append(parent)
                    depths.append(depth)
                    scores.append(scores[parent] - rng.expovariate(1.5))
                    made.append(len(tokens) - 1)
        frontier = sorted(made, key=lambda node: -scores[node])[:2]
    path = [0]
    while rng.random() < 0.6 and (below := [i for i, p in enumerate(parents) if p == path[-1]]):
        path.append(rng.choice(below))
    below = {tokens[i] for i, p in enumerate(parents) if p == path[-1]}
    bonus = rng.choice([t for t in range(len(words)) if t not in below])
    wanted = [*(tokens[node] for node in path[1:]), bonus]
    elsewhere = any((t, d) == (bonus, len(path)) for t, d in zip(tokens, depths, strict=True))
    reason = records.WRONG_PARENT if elsewhere else rng.choice(
        (records.NOT_IN_TOP_K, records.PRUNED, records.CUT))  # fmt: skip
    return TraceRow(
        dataset=name, method=method, prompt_id=prompt, round=index, num_rounds=num_rounds,
        prefix_text="A duck lays 16 eggs per day.", tokens=tokens, texts=[words[t] for t in tokens],
        parents=parents, depths=depths, scores=scores, accepted=path, wanted=wanted,
        wanted_texts=[words[t] for t in wanted],
        reason=records.DEPTH_LIMIT if len(path) > DEPTH else reason, num_committed=len(path),
        chain_committed=rng.randint(1, len(path)) if is_tree else None)  # fmt: skip
