# SPDX-License-Identifier: Apache-2.0
"""Rounds of single prompts in full: the trees, what the target wanted, why it was missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treespark.bench.suite_records import (
    COMMITTED,
    CUT,
    DEPTH_LIMIT,
    NOT_IN_TOP_K,
    PRUNED,
    WRONG_PARENT,
    TraceRow,
)
from treespark.drafter.growing import Growth
from treespark.serving.engine import Engine
from treespark.serving.params import SamplingParams
from treespark.serving.scheduler import Request, RequestOutput

if TYPE_CHECKING:
    from torch import Tensor

    from treespark.bench.suite_methods import SuiteMethod
    from treespark.bench.workload import Prompt
    from treespark.drafter.auto import Drafter
    from treespark.serving.engine import Accepted, RoundBatch
    from treespark.target.model import TargetModel
    from treespark.tree.packed import PackedTree
    from treespark.tree.policy import CandidatePool, TreePolicy

_PREFIX_TOKENS = 64
# JSON has no -inf; a path of this log-probability has none to speak of.
_LOWEST_SCORE = -1e4


@dataclass(frozen=True)
class Draft:
    """What one round drafted: its candidates, the greedy chain, the deepest depth of use."""

    pool: CandidatePool
    chain: list[int]
    max_depth: int


@dataclass(frozen=True)
class TracedGrowth(Growth):
    """A growth that remembers what it grew, for one request at a time."""

    drafts: list[Draft] = field(default_factory=list)

    def grow(
        self,
        drafter: Drafter,
        hidden: Tensor,
        anchors: Tensor,
        policy: TreePolicy,
        max_depths: Tensor,
    ) -> tuple[CandidatePool, PackedTree]:
        """See `Growth.grow`."""
        pool, tree = super().grow(drafter, hidden, anchors, policy, max_depths)
        chain, _ = drafter.chain(hidden, anchors)
        deepest = min(policy.depth, int(max_depths[0]))
        self.drafts.append(Draft(pool, chain[0, :deepest].tolist(), deepest))
        return pool, tree


@dataclass
class _Round:
    """One verified round: its draft, if any, and where the output stood."""

    tree: PackedTree
    accepted: Accepted
    draft: Draft | None
    num_output: int


def trace(
    target: TargetModel, method: SuiteMethod, prompt: Prompt, max_tokens: int
) -> list[TraceRow]:
    """Decode one prompt alone; return its rounds, without rounds an empty list."""
    growth = method.growth_at(1)
    traced = TracedGrowth(growth.builder, growth.min_confidence, whole_pool=True)
    engine = Engine(
        target,
        method.drafter,
        method.policy,
        growth=traced,
        max_num_seqs=1,
        max_model_len=len(prompt.token_ids) + max_tokens,
    )
    rounds: list[_Round] = []

    def watch(batch: RoundBatch, tree: PackedTree, accepted: list[Accepted]) -> None:
        draft = traced.drafts.pop() if traced.drafts else None
        num_output = len(batch.requests[0].output_token_ids)
        rounds.append(_Round(tree, accepted[0], draft, num_output))

    engine.on_round = watch
    engine.add(Request(prompt.name, prompt.token_ids, SamplingParams(max_tokens)))
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    answer, has_tree = outputs[-1], method.policy.branching > 1
    return [
        _row(method, prompt, answer, rounds, number, target.tokenizer, has_tree)
        for number in range(len(rounds))
    ]


def _row(
    method: SuiteMethod,
    prompt: Prompt,
    answer: RequestOutput,
    rounds: list[_Round],
    number: int,
    tokenizer: Any,
    has_tree: bool,
) -> TraceRow:
    one = rounds[number]
    num_committed = answer.metrics.rounds[number].num_committed
    num_slots = int(one.tree.num_nodes[0]) + 1
    tokens, parents, depths, scores = (
        part[0, :num_slots].tolist()
        for part in (one.tree.tokens, one.tree.parents, one.tree.depths, one.tree.scores)
    )
    before = [*prompt.token_ids, *answer.token_ids[: one.num_output - 1]]
    rest = answer.token_ids[one.num_output :]
    wanted = one.accepted.tokens
    return TraceRow(
        dataset=prompt.file,
        method=method.row.name,
        prompt_id=prompt.name,
        round=number,
        num_rounds=len(rounds),
        prefix_text=tokenizer.decode(before[-_PREFIX_TOKENS:]),
        tokens=tokens,
        texts=[tokenizer.decode([token]) for token in tokens],
        parents=parents,
        depths=depths,
        scores=[round(max(score, _LOWEST_SCORE), 4) for score in scores],
        accepted=one.accepted.nodes,
        wanted=wanted,
        wanted_texts=[tokenizer.decode([token]) for token in wanted],
        reason=_reason(one, num_committed),
        num_committed=num_committed,
        chain_committed=chain_committed(one.draft, rest) if has_tree else None,
    )


def chain_committed(draft: Draft | None, rest: list[int]) -> int:
    """Return how many tokens of the output to come the greedy chain would have added at once.

    rest: the final output from this round on. Greedy text is the same whatever is drafted, so what
    the chain has in common with it is what the target would have accepted.
    """
    chain = [] if draft is None else draft.chain
    pairs = enumerate(zip(chain, rest, strict=False))
    num_accepted = next((i for i, (a, b) in pairs if a != b), min(len(chain), len(rest)))
    return min(num_accepted + 1, len(rest))


def _reason(one: _Round, num_committed: int) -> str:
    nodes = one.accepted.nodes
    if num_committed < len(one.accepted.tokens):
        return COMMITTED
    return missing_reason(one.tree, one.draft, nodes[-1], one.accepted.tokens[-1])


def missing_reason(tree: PackedTree, draft: Draft | None, node: int, wanted: int) -> str:
    """Return why request 0 has no node for `wanted` below `node`, the last accepted one."""
    depth = int(tree.depths[0, node])
    if draft is None or depth >= draft.max_depth:
        return DEPTH_LIMIT
    pool, column = draft.pool, int(tree.pool_index[0, node])
    if bool(((pool.parents[0] == column) & (pool.tokens[0] == wanted)).any()):
        return CUT
    same_depth = tree.valid[0] & (tree.depths[0] == depth + 1)
    if bool((same_depth & (tree.tokens[0] == wanted)).any()):
        return WRONG_PARENT
    return NOT_IN_TOP_K if column in pool.frontiers[depth][0].tolist() else PRUNED
