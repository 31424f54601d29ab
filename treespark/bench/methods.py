# SPDX-License-Identifier: Apache-2.0
"""The decoding methods that `compare` runs, all behind one call: prompts in, token ids out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treespark.bench.peers import HFGenerate
from treespark.serving.llm import LLM
from treespark.serving.scheduler import SamplingParams
from treespark.tree.policy import TreePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from treespark.drafter.auto import Drafter
    from treespark.serving.records import RequestRecord
    from treespark.target.model import TargetModel

AUTOREGRESSIVE, CHAIN, HF, LOOKUP = "autoregressive", "chain", "hf-generate", "hf-prompt-lookup"


@dataclass(frozen=True)
class Answers:
    """Token ids per prompt, and the records of our engine (None for others)."""

    token_ids: list[list[int]]
    records: list[RequestRecord] | None = None


@dataclass(frozen=True)
class Method:
    """One way to decode.  run: (prompts, max_tokens) -> Answers.  llm, policy: None for peers."""

    name: str
    run: Callable[[Sequence[list[int]], int], Answers]
    llm: LLM | None = None
    policy: TreePolicy | None = None


def own_method(
    name: str,
    target: TargetModel,
    drafter: Drafter | None,
    policy: TreePolicy,
    *,
    batch_size: int,
    max_model_len: int,
    profile: bool = False,
) -> Method:
    """Return decoding with our engine; without a drafter it is autoregressive."""
    llm = LLM(
        target,
        drafter,
        policy,
        max_num_seqs=batch_size,
        max_model_len=max_model_len,
        profile=profile,
    )

    def run(prompts: Sequence[list[int]], max_tokens: int) -> Answers:
        outputs = llm.generate(list(prompts), SamplingParams(max_tokens))
        return Answers([o.token_ids for o in outputs], [o.metrics for o in outputs])

    return Method(name, run, llm, policy)


def peer_methods(target: TargetModel, batch_size: int) -> list[Method]:
    """Return transformers' generate, and its prompt lookup where it works: at batch size 1."""
    peer = HFGenerate(target)

    def method(name: str, lookup: bool) -> Method:
        def run(prompts: Sequence[list[int]], max_tokens: int) -> Answers:
            return Answers(peer.generate(prompts, max_tokens, lookup=lookup))

        return Method(name, run)

    plain = [method(HF, False)]
    return [*plain, method(LOOKUP, True)] if batch_size == 1 else plain


def all_methods(
    target: TargetModel,
    drafter: Drafter | None,
    policy: TreePolicy,
    budgets: Sequence[int],
    *,
    batch_size: int,
    max_model_len: int,
    profile: bool = False,
) -> list[Method]:
    """Return autoregressive first, then chain and trees the drafter has, then the peers.

    The chain is the drafter's own: branching 1 and one node per depth.
    """
    policies = {AUTOREGRESSIVE: TreePolicy(budget=0)}
    if drafter is not None:
        policies[CHAIN] = TreePolicy(policy.depth, 1, policy.depth)
        for budget in () if drafter.config.chain_only else budgets:
            policies[f"tree-{budget}"] = dataclasses.replace(policy, budget=budget)
    own = [
        own_method(
            name,
            target,
            None if name == AUTOREGRESSIVE else drafter,
            own_policy,
            batch_size=batch_size,
            max_model_len=max_model_len,
            profile=profile,
        )
        for name, own_policy in policies.items()
    ]
    return own + peer_methods(target, batch_size)
