# SPDX-License-Identifier: Apache-2.0
"""The numbers of a suite: definitions on rows written by hand, and the two rules for gains."""

import dataclasses

import pytest

from tests.bench.suite_world import RunWriter, dataset, setting
from treespark.bench.report.results import (
    ACCEPTANCE,
    PER_REQUEST,
    SINGLE,
    SYSTEM,
    Results,
    mean_of_gains,
    ratio_of_means,
)
from treespark.bench.report.study import read_studies
from treespark.errors import UsageError

A, B = dataset("A"), dataset("B")


def timed_cell(run, key, speed, committed=(4,)):
    """One request whose rounds commit these tokens, at `speed` output tokens / s of decoding."""
    tokens = 1 + sum(committed)
    rounds = [(c, c - 1, 7, 7) for c in committed]
    run.cell(key, 2 * tokens / speed, [(1.0, 1.0 + tokens / speed, rounds, "same")])


def two_rules_run(folder):
    """Two sets, chain and two trees, two repeats; all values below are worked out by hand."""
    methods = ("dspark", "dspark-tree", "treespark")
    run = RunWriter(setting([A, B], methods, repeats=2))
    speeds = {
        ("a", "dspark"): (100, 100), ("b", "dspark"): (10, 10),
        ("a", "dspark-tree"): (100, 100), ("b", "dspark-tree"): (16, 16),
        ("a", "treespark"): (110, 130), ("b", "treespark"): (20, 20),
    }  # fmt: skip
    committed = {
        ("a", "dspark"): (2, 2), ("b", "dspark"): (1, 1, 1, 5),
        ("a", "dspark-tree"): (3,), ("b", "dspark-tree"): (2,),
        ("a", "treespark"): (6, 2), ("b", "treespark"): (2, 2),
    }  # fmt: skip
    for (name, method), values in speeds.items():
        for repeat, speed in enumerate(values):
            timed_cell(run, (name, method, 1, repeat), speed, committed[name, method])
    return run.write(folder)


def results_of(*folders):
    (study,) = read_studies(folders)
    return Results(study)


def test_the_two_rules_differ_on_unequal_sets():
    base, ours = {"a": 100.0, "b": 10.0}, {"a": 120.0, "b": 20.0}
    assert mean_of_gains(ours, base) == pytest.approx((0.2 + 1.0) / 2)
    assert ratio_of_means(ours, base) == pytest.approx(140 / 110 - 1)


def test_throughput_over_the_chain_is_the_mean_of_gains_of_mean_repeats(tmp_path):
    results = results_of(two_rules_run(tmp_path))
    gain = results.gain(SINGLE, ["a", "b"], "treespark", "dspark", 1)
    # a: (110 + 130) / 2 / 100 - 1 = 0.2, b: 20 / 10 - 1 = 1; ratio of means would be 0.273.
    assert gain.value == pytest.approx(0.6)
    # Repeat 0: (0.1 + 1) / 2, repeat 1: (0.3 + 1) / 2.
    assert (gain.low, gain.high) == (pytest.approx(0.55), pytest.approx(0.65))


def test_throughput_between_trees_is_the_ratio_of_means(tmp_path):
    gain = results_of(two_rules_run(tmp_path)).gain(
        SINGLE, ["a", "b"], "treespark", "dspark-tree", 1
    )
    # (120 + 20) / (100 + 16) - 1; the mean of gains would be 0.225.
    assert gain.value == pytest.approx(140 / 116 - 1)


def test_acceptance_is_the_ratio_of_means_also_over_the_chain(tmp_path):
    results = results_of(two_rules_run(tmp_path))
    # dspark: a 4 / 2 = 2, b 8 / 4 = 2; treespark: a 8 / 2 = 4, b 4 / 2 = 2.
    assert results.mean(ACCEPTANCE, ["a", "b"], "dspark", 1).value == 2.0
    assert results.mean(ACCEPTANCE, ["a", "b"], "treespark", 1).value == 3.0
    assert results.gain(ACCEPTANCE, ["a", "b"], "treespark", "dspark", 1).value == 0.5


def test_throughputs_have_their_own_denominators(tmp_path):
    results = results_of(two_rules_run(tmp_path))
    # treespark on a: 9 tokens in 9 / 110 s behind the first token, twice as long in all.
    single = results.value(SINGLE, "a", "treespark", 1)
    assert (single.value, single.low, single.high) == tuple(map(pytest.approx, (120, 110, 130)))
    assert results.value(SYSTEM, "a", "treespark", 1).value == pytest.approx(60)
    assert results.value(PER_REQUEST, "a", "treespark", 1).value == pytest.approx(120 * 8 / 9)


def hand_made_log(folder):
    """Every kind of round. Committed, accepted, proposed nodes, proposed depth."""
    run = RunWriter(setting([A], ("treespark",)))
    stop_in_path = [(3, 2, 32, 7), (2, 2, 32, 2)]  # the stop is draft 2: no bonus, nothing deeper
    stop_as_bonus = [(3, 2, 32, 5)]
    length_cut = [(8, 7, 32, 7), (1, 1, 32, 6)]  # one token was left
    empty_tree = [(1, 0, 0, 0)]
    requests = [(0.0, 1.0, rounds, str(i)) for i, rounds in enumerate(
        (stop_in_path, stop_as_bonus, length_cut, empty_tree, []))]  # fmt: skip
    run.cell(("a", "treespark", 1, 0), 10.0, requests)
    return run.write(folder)


def test_acceptance_of_a_hand_made_log_is_a_sum_over_rounds_not_a_mean_of_requests(tmp_path):
    value = results_of(hand_made_log(tmp_path)).value(ACCEPTANCE, "a", "treespark", 1)
    # 18 tokens in 6 rounds; requests: 2.5, 3, 4.5, 1, and one that ended with its first token.
    assert value.value == 18 / 6 != (2.5 + 3 + 4.5 + 1) / 4


def test_positions_have_both_denominators(tmp_path):
    rates = results_of(hand_made_log(tmp_path)).positions(["a"], "treespark", 1)
    # Accepted draft tokens by round: 2, 2, 2, 7, 1, 0; depths proposed: 7, 2, 5, 7, 6, 0.
    assert rates.num_accepting == [5, 4, 1, 1, 1, 1, 1]
    assert rates.num_proposing == [5, 5, 4, 4, 4, 3, 2]
    assert rates.over_proposing[:2] == [1.0, 4 / 5]
    assert rates.over_proposing[6] == 1 / 2
    assert rates.over_rounds == [n / 6 for n in rates.num_accepting]


def test_requests_of_one_token_have_no_speed_of_their_own(tmp_path):
    value = results_of(hand_made_log(tmp_path)).value(PER_REQUEST, "a", "treespark", 1)
    # Of 5, 3, 9 and 1 tokens behind the first in one second each.
    assert value.value == pytest.approx((5 + 3 + 9 + 1) / 4)


def test_a_mean_needs_all_sets(tmp_path):
    run = RunWriter(setting([A, B], ("dspark", "treespark")))
    for key in (("a", "dspark", 1, 0), ("b", "dspark", 1, 0), ("a", "treespark", 1, 0)):
        timed_cell(run, key, 10)
    results = results_of(run.write(tmp_path))
    assert results.mean(SYSTEM, ["a", "b"], "dspark", 1).value == pytest.approx(5)
    assert results.mean(SYSTEM, ["a", "b"], "treespark", 1) is None
    assert results.gain(SYSTEM, ["a", "b"], "treespark", "dspark", 1) is None
    assert results.gain(SYSTEM, ["a"], "treespark", "dspark", 1).value == 0
    assert results.study.num_missing == 1


# ---------------------------------------------------------------------- several runs


def one_cell_run(folder, name="a", method="dspark", **changes):
    own = dataset(name.upper())
    run = RunWriter(setting([own], [method], **changes))
    timed_cell(run, (own.name, method, 1, 0), 10)
    return run.write(folder)


def test_runs_of_one_target_make_one_study_and_others_their_own(tmp_path):
    first = one_cell_run(tmp_path / "1")
    second = one_cell_run(tmp_path / "2", "b", "treespark")
    other = one_cell_run(
        tmp_path / "3",
        target={"path": "models/Qwen3-8B", "fingerprint": "e" * 64},
        dtype="bfloat16",
    )
    studies = read_studies([first, other, second])
    assert [study.name for study in studies] == ["SmolLM2-135M-Instruct", "Qwen3-8B"]
    assert [d.name for d in studies[0].datasets] == ["a", "b"]
    assert [m.name for m in studies[0].methods] == ["dspark", "treespark"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 64}, "2: max_tokens 64, but 128 in .*1$"),
        ({"dtype": "bfloat16"}, "2: dtype bfloat16, but float32 in .*1$"),
        ({"device": "elsewhere"}, "2: device elsewhere, but cpu in .*1$"),
        ({"threads": 1}, "2: threads 1, but 2 in .*1$"),
        (
            {"versions": {"packages": {"torch": "2.9.0"}}},
            "2: dataset a with torch 2.9.0, but 2.13.0 in .*1: a set has to be measured on one",
        ),
        (
            {"drafters": {"treespark": {"path": "drafters/treespark", "fingerprint": "e" * 64}}},
            "2: drafter treespark is not the one of .*1$",
        ),
        ({}, r"2: \('a', 'dspark', 1, 0\) is also in .*1$"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(tmp_path, changes, message):
    folders = [one_cell_run(tmp_path / "1"), one_cell_run(tmp_path / "2", **changes)]
    with pytest.raises(UsageError, match=message):
        read_studies(folders)


def test_sets_may_be_spread_over_machines_but_none_over_two(tmp_path):
    other = {"versions": {"processor": "faster", "packages": {"torch": "2.13.0"}}}
    first, second = one_cell_run(tmp_path / "1"), one_cell_run(tmp_path / "2", "b", **other)
    again = one_cell_run(tmp_path / "3", "c")
    (study,) = read_studies([first, second, again])
    sets = [[dataset.name for dataset in datasets] for _, datasets in study.machines]
    assert sets == [["a", "c"], ["b"]]
    with pytest.raises(UsageError, match=r"4: dataset b with processor None, but faster in .*2: "):
        read_studies([first, second, one_cell_run(tmp_path / "4", "b", "treespark")])


def test_another_subset_of_a_set_is_refused(tmp_path):
    other = dataclasses.replace(A, subset_sha256="cd" * 32)
    run = RunWriter(setting([other], ["treespark"]))
    timed_cell(run, ("a", "treespark", 1, 0), 10)
    with pytest.raises(UsageError, match=r"2: dataset a is not the one of .*1$"):
        read_studies([one_cell_run(tmp_path / "1"), run.write(tmp_path / "2")])


def test_equal_subsets_from_another_place_belong_together(tmp_path):
    other = dataclasses.replace(A, source="/elsewhere/a.jsonl")
    run = RunWriter(setting([other], ["treespark"]))
    timed_cell(run, ("a", "treespark", 1, 0), 10)
    first = RunWriter(setting([A], ["dspark"]))
    timed_cell(first, ("a", "dspark", 1, 0), 10)
    (study,) = read_studies([first.write(tmp_path / "1"), run.write(tmp_path / "2")])
    assert len(study.datasets) == 1


def test_cells_that_another_run_has_are_not_missing(tmp_path):
    runs = [RunWriter(setting([A, B], ["dspark"])) for _ in range(2)]
    for run, name in zip(runs, "ab", strict=True):
        timed_cell(run, (name, "dspark", 1, 0), 10)
    folders = [run.write(tmp_path / str(i)) for i, run in enumerate(runs)]
    assert read_studies(folders)[0].num_missing == 0
    assert read_studies(folders[:1])[0].num_missing == 1


def test_a_run_without_a_finished_cell_is_refused(tmp_path):
    folder = RunWriter(setting([A], ("dspark",))).write(tmp_path)
    with pytest.raises(UsageError, match="no cell of this run is finished"):
        read_studies([folder])


def test_cells_of_a_server_leave_the_other_methods_finished(tmp_path):
    asked = {"recipe": {"concurrencies": [1]}, "concurrencies": (1, 36)}
    run = RunWriter(setting([A], ("dspark", "treespark"), **asked))
    for key in (("a", "dspark", 1, 0), ("a", "treespark", 1, 0), ("a", "treespark", 36, 0)):
        timed_cell(run, key, 10)
    (study,) = read_studies([run.write(tmp_path)])
    assert study.num_missing == 0
