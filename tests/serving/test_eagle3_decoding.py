# SPDX-License-Identifier: Apache-2.0
"""Decoding with an EAGLE-3 drafter: the target's own text, from contexts that are never stale."""

import pytest

from tests.serving_checks import check_counts, check_trees_equal_a_full_recompute
from tests.serving_world import answers_of, eagle3_drafter, prompts, requests_for, run, world
from treespark.errors import UsageError
from treespark.serving.engine import Engine
from treespark.tree.policy import TreePolicy

LIMITS = [1, 2, 3, 5, 8, 13, 21, 30]
PROMPTS = [*prompts(7), [5]]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("slots", "chunk"), [(1, 512), (3, 1), (8, 7)])
def test_chains_equal_generate(family, slots, chunk):
    target = world(family).target
    engine = Engine(target, eagle3_drafter(target), max_num_seqs=slots, prefill_chunk=chunk)
    # The policy is the drafter's own.
    assert engine.policy == TreePolicy(5, 1, 5)
    outputs = run(engine, requests_for(PROMPTS, LIMITS), arrivals=[0, 0, 1, 1, 4, 5, 9, 9])
    assert answers_of(outputs) == {
        str(i): world(family).reference(prompt, limit)
        for i, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
    }
    for output in outputs.values():
        check_counts(output)


def test_right_chains_are_accepted_at_every_length():
    """In a vocabulary of 3 random chains are often right: paths of every length are committed."""
    small = world(vocab=3, eos=2)
    some = prompts(4, vocab=3)
    engine = Engine(small.target, eagle3_drafter(small.target), max_num_seqs=2)
    outputs = run(engine, requests_for(some, 40))
    assert answers_of(outputs) == {str(i): small.reference(p, 40) for i, p in enumerate(some)}
    accepted = {r.num_accepted for o in outputs.values() for r in o.metrics.rounds}
    assert len(accepted) > 2


@pytest.mark.parametrize("prefill_chunk", [1, 7, 512])
def test_chains_equal_chains_from_a_full_recompute(prefill_chunk):
    check_trees_equal_a_full_recompute(prefill_chunk, eagle3_drafter(world().target))


def test_reused_prefixes_draft_what_prompts_read_anew_draft():
    target, common = world().target, prompts(1, seed=5, longest=30)[0] * 2
    some = [common + tail for tail in ([7], [8, 9], [7, 3, 4], [7])]
    seen = []
    for reuse in (False, True):
        engine = Engine(target, eagle3_drafter(target), max_num_seqs=2, reuse_prefixes=reuse)
        outputs = run(engine, requests_for(some, 20), arrivals=[0, 8, 30, 40])
        seen.append({name: (o.token_ids, o.metrics.rounds) for name, o in outputs.items()})
    assert engine.totals.num_cached_tokens > 2 * len(common)
    assert seen[0] == seen[1]


def test_a_tree_policy_is_refused_by_name():
    target = world().target
    with pytest.raises(
        UsageError, match="--branching 4: allowed: 1, a drafter with model_type 'tr"
    ):
        Engine(target, eagle3_drafter(target), TreePolicy(5, 4, 16))
    with pytest.raises(UsageError, match=r"--depth 6: allowed: 1\.\.5"):
        Engine(target, eagle3_drafter(target), TreePolicy(6, 1, 6))
