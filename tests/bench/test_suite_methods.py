# SPDX-License-Identifier: Apache-2.0
"""What each method of the paper is, on the axes of the one builder."""

import dataclasses

import pytest

from tests.bench.bench_world import text_target
from tests.serving_world import drafter, eagle3_drafter
from treespark.bench.suite_methods import PRESETS, suite_method
from treespark.bench.suite_recipe import MethodSection
from treespark.errors import UsageError
from treespark.tree.policy import TreePolicy

WIDE = {"depth": 5, "branching": 3, "budget": 12}
CHAIN = {"depth": 5, "branching": 1, "budget": 5}


@pytest.fixture(scope="module")
def drafters():
    target = text_target()
    return {
        "block": drafter(target, tree=WIDE),
        # Trained as a chain: its own policy has no width.
        "narrow": drafter(target, tree=CHAIN),
        "rnn": drafter(target, markov_head_type="rnn", tree=CHAIN),
        "eagle3": eagle3_drafter(target),
    }


def method(drafters, name, drafter="block", **options):
    return suite_method(
        MethodSection(name=name, drafter=drafter, **options), drafters, text_target()
    )


@pytest.mark.parametrize(
    ("name", "axes", "policy"),
    [
        ("dflash", ("marginal", "probability", "frontier"), TreePolicy(5, 1, 5)),
        ("dspark", ("conditioned", "probability", "frontier"), TreePolicy(5, 1, 5)),
        ("dspark-threshold", ("conditioned", "probability", "frontier"), TreePolicy(5, 1, 5)),
        ("dspark-tree", ("conditioned", "probability", "frontier"), TreePolicy(5, 3, 12)),
        ("treespark", ("conditioned", "probability", "frontier"), TreePolicy(5, 3, 12)),
        ("ddtree", ("marginal", "probability", "budget"), TreePolicy(5, 12, 12)),
        ("calibrated", ("conditioned", "survival", "threshold"), TreePolicy(5, 8, 64)),
        ("best-first", ("conditioned", "probability", "budget"), TreePolicy(5, 8, 12)),
    ],
)
def test_a_method_is_what_its_paper_says(drafters, name, axes, policy):
    made = method(drafters, name)
    builder = made.growth.builder
    assert (builder.proposal, builder.priority, builder.stop) == axes
    assert made.policy == policy
    row = made.row
    assert (row.proposal, row.priority, row.stop) == axes
    assert (row.depth, row.branching, row.budget) == (policy.depth, policy.branching, policy.budget)
    assert row.kind == ("chain" if policy.branching == 1 else "tree")
    assert row.title == PRESETS[name].title
    assert (row.method, row.drafter, row.layout) == (name, "block", "shifted")


def test_eagle3_is_a_chain_of_its_own_drafter(drafters):
    made = method(drafters, "eagle3", "eagle3")
    assert made.policy == TreePolicy(5, 1, 5)
    assert (made.row.kind, made.row.layout) == ("chain", None)


def test_autoregressive_decoding_has_no_drafter(drafters):
    section = MethodSection(name="plain", method="autoregressive", title="AR")
    made = suite_method(section, drafters, text_target())
    assert made.drafter is None
    assert made.policy.budget == 0
    assert (made.row.title, made.row.kind) == ("AR", "autoregressive")


def test_a_tree_over_a_drafter_of_chains_has_the_papers_width(drafters):
    assert method(drafters, "dspark-tree", "narrow").policy == TreePolicy(5, 4, 32)


@pytest.mark.parametrize(
    ("concurrency", "threshold"),
    [(1, 0.02), (4, 0.02), (5, 0.05), (8, 0.05), (9, 0.15), (36, 0.15)],
)
def test_the_threshold_follows_the_published_ladder(drafters, concurrency, threshold):
    made = method(drafters, "calibrated")
    assert made.growth_at(concurrency).builder.threshold == threshold
    assert made.row.options == {"alpha": 0.6684, "beta": -0.4587}


def test_a_threshold_that_is_given_holds_at_every_load(drafters):
    made = method(drafters, "calibrated", threshold=0.1, alpha=1.0, beta=0.0)
    assert made.growth_at(12) == made.growth
    assert made.row.options == {"threshold": 0.1, "alpha": 1.0, "beta": 0.0}


def test_options_change_a_method(drafters):
    quota = method(drafters, "quota", method="calibrated", stop="budget", budget=20)
    assert (quota.row.priority, quota.row.stop) == ("survival", "budget")
    assert quota.growth.builder.threshold is None
    assert quota.policy == TreePolicy(5, 8, 20)
    assert quota.row.title == "quota"
    shallow = method(drafters, "treespark", depth=2, branching=2, budget=4, frontier=1)
    assert shallow.policy == TreePolicy(2, 2, 4, frontier=1)
    assert method(drafters, "dspark-threshold", min_confidence=0.9).growth.min_confidence == 0.9
    assert method(drafters, "dspark-threshold").row.options == {"min_confidence": 0.5}


def test_a_method_without_options_of_growth_leaves_the_builder_alone(drafters):
    growth = method(drafters, "treespark").growth
    assert growth == dataclasses.replace(growth, min_confidence=0.0)
    assert growth.builder == type(growth.builder)()


@pytest.mark.parametrize(
    ("name", "drafter_name", "options", "message"),
    [
        ("treespark", "rnn", {}, r"method treespark: branching 4: allowed: 1"),
        ("dspark", "eagle3", {}, r"drafter eagle3 is treespark_eagle3; need a block drafter"),
        ("treespark", "block", {"depth": 6}, r"^method treespark: depth 6: allowed: 1\.\.5"),
        (
            "ddtree",
            "block",
            {"budget": 100},
            r"^method ddtree: budget 100: allowed: 0\.\.64",
        ),
        ("dspark", "block", {"branching": 2}, r"branching 2: a chain has none"),
        ("treespark", "block", {"min_confidence": 0.5}, r"cuts chains, use branching 1"),
        ("best-first", "block", {"threshold": 0.5}, r"goes with stop threshold only"),
    ],
)
def test_options_that_do_not_go_together_are_named(drafters, name, drafter_name, options, message):
    with pytest.raises(UsageError, match=message):
        method(drafters, name, drafter_name, **options)
