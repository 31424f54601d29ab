# SPDX-License-Identifier: Apache-2.0
"""What every serving test demands, as functions that pass on the engine and fail on mutants."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.serving_world import (
    VOCAB,
    Oracle,
    answers_of,
    drafter,
    prompts,
    requests_for,
    run,
    world,
)
from treespark.drafter.auto import drafted_children
from treespark.serving.engine import Engine, RoundBatch
from treespark.serving.params import SamplingParams
from treespark.serving.scheduler import Request
from treespark.tree import policy as tree_policy
from treespark.tree import verify as tree_verify
from treespark.tree.policy import TreePolicy

if TYPE_CHECKING:
    from treespark.drafter.auto import AnyDrafter
    from treespark.serving.scheduler import RequestOutput
    from treespark.tree.packed import PackedTree

Row = tuple[list[int], list[int]]


def check_counts(output: RequestOutput) -> None:
    """Counts add up to the output and stay within what was proposed."""
    record = output.metrics
    assert record.num_output_tokens == len(output.token_ids)
    for round_ in record.rounds:
        assert 0 <= round_.num_accepted <= round_.num_committed <= round_.num_accepted + 1
        assert round_.num_accepted <= round_.proposed_depth <= round_.num_proposed


def check_output_is_the_targets_own() -> None:
    """Long accepted paths among wrong nodes: ids equal transformers' generate, and counts match."""
    some = prompts(4, seed=21, longest=20)
    answers = {str(i): world().reference(prompt, 40) for i, prompt in enumerate(some)}
    propose = Oracle(answers, VOCAB, 6, 3, seed=1)
    engine = Engine(
        world().target, policy=TreePolicy(8, budget=60), max_num_seqs=3, propose=propose
    )
    outputs = run(engine, requests_for(some, 40))
    assert answers_of(outputs) == answers
    for output in outputs.values():
        check_counts(output)


def check_logprobs_are_the_targets_own() -> None:
    """Along accepted paths among wrong nodes: as one plain forward of the whole text has them."""
    (prompt,) = prompts(1, seed=21, longest=20)
    answer = world().reference(prompt, 30)
    engine = Engine(
        world().target,
        policy=TreePolicy(8, budget=60),
        propose=Oracle({"0": answer}, VOCAB, 6, 3, seed=1),
    )
    output = run(engine, requests_for([prompt], 30, logprobs=0))["0"]
    expected = world().log_probs(prompt, answer).gather(1, torch.tensor(answer)[:, None])[:, 0]
    ours = torch.tensor([entry.logprob for entry in output.logprobs or ()])
    # float32 sums in another order.
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def check_seeds_alone_decide_the_draws() -> None:
    """The same tokens for a seed in an engine of its own and among others."""
    some = prompts(3, seed=22, longest=20)
    params = SamplingParams(12, temperature=1.0, seed=5, ignore_eos=True)
    sampled = [[Request(f"s{i}", p, params) for i, p in enumerate(some)] for _ in range(2)]
    alone = {}
    for request in sampled[0]:
        alone |= answers_of(run(Engine(world().target), [request]))
    together = answers_of(
        run(Engine(world().target, max_num_seqs=4), [*requests_for(some, 9), *sampled[1]])
    )
    assert {name: together[name] for name in alone} == alone


def check_reused_beginnings_change_no_answer() -> None:
    """Prompts that share 24 tokens with an earlier one, and part there."""
    (trunk, *_) = prompts(1, seed=23, longest=1)
    some = [[*trunk, *range(30, 53), last, last] for last in (1, 2, 3)]
    engine = Engine(world().target, drafter(world().target), reuse_prefixes=True)
    for prompt in some:
        output = run(engine, requests_for([prompt], 12))["0"]
        assert output.token_ids == world().reference(prompt, 12)
    assert engine.stats().num_cached_tokens == 2 * 24


def check_ties_go_to_the_lowest_id() -> None:
    """Equal logits: lower ids are proposed first, shallower nodes kept first, lower ids chosen."""
    anchors = torch.tensor([3])
    pool = tree_policy.expand(
        lambda _, parents: torch.zeros(*parents.shape, 6), anchors, TreePolicy(2, 2, 3)
    )
    assert pool.tokens.tolist() == [[0, 1, 0, 1, 0, 1]]
    tree = tree_policy.pack(pool, 3)
    assert tree.parents.tolist() == [[-1, 0, 0, 1]]
    assert tree.tokens.tolist() == [[3, 0, 1, 0]]
    path = tree_verify.accept_greedy(tree, torch.zeros(1, 4, 6), 2)
    assert path.tokens.tolist() == [[0, 0, 0]]
    assert path.retrieve_indices.tolist() == [[0, 1, 3]]


def check_trees_equal_a_full_recompute(
    prefill_chunk: int = 7, model: AnyDrafter | None = None
) -> None:
    """Every drafted tree is the one that a fresh context of the whole text gives."""
    some, target = prompts(4, seed=3), world().target
    answers = {str(i): world().reference(prompt, 25) for i, prompt in enumerate(some)}
    model = model or drafter(target)
    policy = TreePolicy(5, 1 if model.config.chain_only else 4, 16)
    # The oracle decides the rounds, so that long paths through scattered nodes feed the context.
    engine = Engine(
        target,
        model,
        policy,
        max_num_seqs=3,
        prefill_chunk=prefill_chunk,
        propose=Oracle(answers, VOCAB, 4, 1),
    )
    trees = record_trees(engine)
    outputs = run(engine, requests_for(some, 25))
    num_rounds = 0
    for name, output in outputs.items():
        num_output = 1
        for row, round_ in zip(trees[name], output.metrics.rounds, strict=True):
            ids = output.prompt_token_ids + output.token_ids[:num_output]
            limit = min(5, 25 - num_output - 1)
            assert row == recomputed_tree(target, model, policy, ids, limit)
            num_output += round_.num_committed
            num_rounds += 1
    assert num_rounds > 20


def record_trees(engine: Engine) -> dict[str, list[Row]]:
    """Make the engine note the tree that its drafter gives in every round, by request id."""
    trees: dict[str, list[Row]] = {}
    draft, propose = engine._draft, engine.propose

    def note(batch: RoundBatch, rows: list[int], policy: TreePolicy) -> PackedTree:
        engine.propose = None
        tree = draft(batch, batch.drafting_rows(), policy)
        engine.propose = propose
        for i, request in enumerate(batch.requests):
            size = int(tree.num_nodes[i]) + 1
            row = (tree.tokens[i, :size].tolist(), tree.parents[i, :size].tolist())
            trees.setdefault(request.request_id, []).append(row)
        return tree if propose is None else draft(batch, rows, policy)

    engine._draft = note  # type: ignore[method-assign]
    return trees


def record_prefills(patch) -> list[list[int]]:
    """Make the world's target note the rows of each prefill forward, one number per request."""
    target, rows = world().target, []
    forward = target.forward_rows

    def spy(segments, cache, *, logits="last"):
        if logits == "last":
            rows.append([len(segment.token_ids) for segment in segments])
        return forward(segments, cache, logits=logits)

    patch.setattr(target, "forward_rows", spy)
    return rows


def recomputed_tree(target, model, policy: TreePolicy, ids: list[int], limit: int) -> Row:
    """Tree after `ids`, whose last token is the anchor, drafted from an empty cache."""
    if limit == 0:
        return [ids[-1]], [-1]
    target.set_taps(model.config.target_layer_ids)
    features = target.prefill(target.new_cache(1, len(ids)), 0, 0, torch.tensor(ids[:-1])).features
    context = model.new_cache(1, len(ids))
    model.extend_context(context, 0, 0, features, torch.tensor(ids[:-1]))
    anchors = torch.tensor(ids[-1:])
    hidden = model.draft_block(context, [0], [len(ids) - 1], anchors)
    pool = tree_policy.expand_children(drafted_children(model, hidden, anchors), anchors, policy)
    tree = tree_policy.pack(pool, policy.budget, torch.tensor([limit]))
    size = int(tree.num_nodes[0]) + 1
    return tree.tokens[0, :size].tolist(), tree.parents[0, :size].tolist()
