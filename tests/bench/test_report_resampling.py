# SPDX-License-Identifier: Apache-2.0
"""What other prompts would have given: the bootstrap's draws are paired, and verdicts follow it."""

import numpy as np
import pytest

from tests.bench.suite_world import RunWriter, dataset, setting
from treespark.bench.report.resampling import NUM_RESAMPLINGS, interval, resampled
from treespark.bench.report.results import ACCEPTANCE, SINGLE, Results
from treespark.bench.report.signs import FAILS, HOLDS, UNCLEAR, signs_table
from treespark.bench.report.study import read_studies

A, B, W = dataset("A"), dataset("B"), dataset("W", "writing")


def write(folder, committed, *, datasets=(A,), concurrency=1, repeats=1):
    """committed: (set, method) -> what the rounds of each prompt commit, tokens of a round each."""
    methods = list(dict.fromkeys(method for _, method in committed))
    own = setting(datasets, methods, concurrencies=(concurrency,), repeats=repeats)
    run = RunWriter(own)
    for (name, method), prompts in committed.items():
        for repeat in range(repeats):
            requests = [
                (1.0, 1.0 + len(rounds), [(c, c - 1, 7, 7) for c in rounds], "same")
                for rounds in prompts
            ]
            run.cell((name, method, concurrency, repeat), 10.0, requests)
    (study,) = read_studies([run.write(folder)])
    return Results(study)


def verdicts(results):
    table = signs_table(results)
    return {row.label: [cell.text for cell in row.cells] for row in table.rows}


def test_draws_are_ratios_of_sums_over_the_drawn_prompts(tmp_path):
    results = write(tmp_path, {("a", "dspark"): [(4, 4), (1,), (2, 2, 2)]})
    drawn = resampled(results, ACCEPTANCE, ["a"], "dspark", 1)
    values = set(np.round(drawn["a"], 9))
    parts = np.array([(8, 2), (1, 1), (6, 3)])
    possible = {
        round(float(total[0] / total[1]), 9)
        for i in range(3) for j in range(3) for k in range(3)
        if (total := parts[[i, j, k]].sum(0)) is not None
    }  # fmt: skip
    assert values == possible
    assert len(drawn["a"]) == NUM_RESAMPLINGS
    assert abs(drawn["a"].mean() - 15 / 6) < 0.1


def test_the_same_prompts_are_drawn_for_all_methods(tmp_path):
    chain = [(1 + i % 4,) * 3 for i in range(12)]
    tree = [(rounds[0] + 1,) * 3 for rounds in chain]
    results = write(tmp_path, {("a", "dspark"): chain, ("a", "treespark"): tree})
    ours, base = (
        resampled(results, ACCEPTANCE, ["a"], name, 1)["a"] for name in ("treespark", "dspark")
    )
    assert base.std() > 0.1
    np.testing.assert_allclose(ours - base, 1)


def test_repeats_are_added_up_and_draws_are_repeatable(tmp_path):
    prompts = {("a", "dspark"): [(4, 4), (1,), (2, 2)]}
    once = write(tmp_path / "1", prompts)
    again = write(tmp_path / "2", prompts, repeats=3)
    for metric in (ACCEPTANCE, SINGLE):
        rows = [resampled(r, metric, ["a"], "dspark", 1)["a"] for r in (once, again)]
        np.testing.assert_allclose(rows[0], rows[1])


def test_a_set_without_records_has_no_draws(tmp_path):
    results = write(tmp_path, {("a", "dspark"): [(2,)]})
    assert resampled(results, ACCEPTANCE, ["a"], "treespark", 1) is None
    assert resampled(results, ACCEPTANCE, [], "dspark", 1) is None


def test_an_interval_needs_all_its_values():
    assert interval([float("nan"), 1.0]) is None
    low, high = interval(np.arange(1001.0))
    assert (low, high) == pytest.approx((25, 975))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        # Every prompt gains; few of many gain as much as others lose; every prompt loses.
        ([1] * 12, HOLDS),
        ([1, -1] * 6 + [1], UNCLEAR),
        ([-1] * 12, FAILS),
    ],
)
def test_a_verdict_needs_more_than_a_few_prompts(tmp_path, more, expected):
    control = [(3,) * 4] * len(more)
    full = [(3 + gain,) * 4 for gain in more]
    committed = {("a", "dspark"): control, ("a", "dspark-tree"): control, ("a", "treespark"): full}
    rows = verdicts(write(tmp_path, committed))
    _, here, verdict = rows["Acceptance, general sets: TreeSpark > DSpark+Tree"]
    assert verdict == expected
    assert ("(" in here) == (expected == UNCLEAR)


def test_writing_signs_are_unclear_where_few_prompts_make_them(tmp_path):
    committed = {
        ("a", "dspark"): [(2,) * 4] * 6,
        ("a", "treespark"): [(3,) * 4] * 6,
        ("w", "dspark"): [(2,) * 4] * 6,
        # On average a little less than the general set gains.
        ("w", "treespark"): [(5,) * 4] + [(2,) * 4] * 4 + [(4,) * 4],
    }
    rows = verdicts(write(tmp_path, committed, datasets=(A, W)))
    for kind in ("less in absolute", "more in relative"):
        assert rows[f"Writing gains {kind} terms than the general sets"][-1] == UNCLEAR


def test_the_throughput_of_several_requests_has_the_repeats_alone(tmp_path):
    committed = {("a", "dspark"): [(2,) * 4] * 4, ("a", "treespark"): [(3,) * 4] * 4}
    rows = verdicts(write(tmp_path, committed, concurrency=12))
    assert rows["Throughput, general sets, C = 12: TreeSpark > DSpark"][-1] == HOLDS
