# SPDX-License-Identifier: Apache-2.0
"""Tables of a suite: bold maxima, gain rows, the paper's numbers where they belong, escaping."""

import dataclasses
import html
import re

import pytest

from tests.bench.suite_world import (
    GENERAL,
    METHODS,
    WRITING,
    RunWriter,
    dataset,
    plausible_trace,
    setting,
)
from tests.bench.test_report_results import A, results_of, timed_cell, two_rules_run
from treespark.bench import suite_records as records
from treespark.bench.report import paper
from treespark.bench.report.profile import answers_table, profile_table
from treespark.bench.report.render import latex, markdown, page_table
from treespark.bench.report.signs import FAILS, HOLDS, UNCLEAR, signs_table, verdict
from treespark.bench.report.table import Cell, Row, Table
from treespark.bench.report.tables import result_tables
from treespark.bench.report.traces import reasons_table, study_traces


def tables_of(folder):
    return {table.key: table for table in result_tables(results_of(folder))}


def texts(table):
    return {row.label: [cell.text for cell in row.cells] for row in table.rows}


def test_throughput_table_has_the_hand_written_values_and_gains(tmp_path):
    table = tables_of(two_rules_run(tmp_path))["table-1b"]
    assert table.columns == ["method", "A", "B", "mean"]
    assert texts(table) == {
        "DSpark": ["100.0", "10.0", "55.0"],
        "DSpark+Tree": ["100.0", "16.0", "58.0"],
        "TreeSpark": ["120.0", "20.0", "70.0"],
        "DSpark+Tree over DSpark": ["+0.0%", "+60.0%", "+30.0%"],
        "TreeSpark over DSpark": ["+20.0%", "+100.0%", "+60.0%"],
        "TreeSpark over DSpark+Tree": ["+20.0%", "+25.0%", "+20.7%"],
    }
    best = {(r.label, i) for r in table.rows for i, c in enumerate(r.cells) if c.is_best}
    assert best == {("TreeSpark", 0), ("TreeSpark", 1), ("TreeSpark", 2)}
    spread = {row.label: [cell.spread for cell in row.cells] for row in table.rows}
    assert spread["TreeSpark"] == ["110.0..130.0", "", "65.0..75.0"]
    assert spread["TreeSpark over DSpark"] == ["+10.0%..+30.0%", "", "+55.0%..+65.0%"]


def test_equal_largest_numbers_are_all_bold(tmp_path):
    table = tables_of(two_rules_run(tmp_path))["table-1a"]
    best = {row.label: [cell.is_best for cell in row.cells] for row in table.rows}
    # On b DSpark, the control (2 / 1) and TreeSpark (4 / 2) all commit 2 tokens a round.
    assert best["DSpark"] == [False, True, False]
    assert best["DSpark+Tree"] == [False, True, False]
    assert best["TreeSpark"] == [True, True, True]


# ---------------------------------------------------------------------- the paper beside ours


def paper_run(folder, **changes):
    """Qwen3-4B on nine sets and six domains at C = 12 and in acceptance, two cells a set."""
    sets = [*map(dataset, GENERAL), *(dataset(title, "writing") for title in WRITING)]
    own = {
        "target": {"path": "models/Qwen3-4B"}, "max_tokens": 2048, "concurrencies": (1, 12),
        **changes,
    }  # fmt: skip
    run = RunWriter(setting(sets, ("dspark", "dspark-tree", "treespark"), **own))
    for one in sets:
        for method in run.setting.methods:
            for concurrency in run.setting.concurrencies:
                timed_cell(run, (one.name, method.name, concurrency, 0), 10, (4, 4))
    return run.write(folder)


def paper_cells(tables):
    return {
        (key, row.label, table.columns[i + 1]): cell.text
        for key, table in tables.items()
        for row in table.rows
        if row.kind == "paper"
        for i, cell in enumerate(row.cells)
        if cell.text
    }


def test_on_its_target_the_paper_stands_in_acceptance_tables_marked_as_the_papers(tmp_path):
    shown = paper_cells(tables_of(paper_run(tmp_path)))
    assert {key for key, _, _ in shown} == {"table-1a", "table-2a", "table-4"}
    assert shown["table-1a", "paper: DSpark", "mean"] == "4.23"
    assert shown["table-1a", "paper: DSpark+Tree", "mean"] == "4.93"
    assert shown["table-1a", "paper: TreeSpark over DSpark", "mean"] == "+24.1%"
    assert shown["table-1a", "paper: TreeSpark over DSpark+Tree", "mean"] == "+6.4%"
    assert shown["table-2a", "paper: TreeSpark", "mean"] == "3.52"
    assert shown["table-4", "paper: TreeSpark", "acceptance, writing domains"] == "+31.4%"


def test_on_its_device_the_papers_throughput_is_shown_too(tmp_path):
    from treespark.device import PREFERENCE

    shown = paper_cells(tables_of(paper_run(tmp_path, device=PREFERENCE[0])))
    assert shown["table-1b", "paper: TreeSpark over DSpark", "mean"] == "+15.1%"
    assert shown["table-3", "paper: TreeSpark", "system, C = 12"] == "295.34"
    assert shown["table-3", "paper: TreeSpark over DSpark+Tree", "system, C = 12"] == "+4.2%"
    assert shown["table-6a", "paper: DSpark", "mean"] == "254.68"
    assert shown["table-6b", "paper: TreeSpark", "mean"] == "27.86"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target": {"path": "models/Qwen3-14B"}}, "its targets are Qwen3-4B and Qwen3-8B"),
        ({"max_tokens": 128}, "up to 2048 tokens, these 128"),
    ],
)
def test_another_setting_keeps_the_papers_numbers_away_and_says_why(tmp_path, changes, reason):
    folder = paper_run(tmp_path, **changes)
    assert paper_cells(tables_of(folder)) == {}
    assert reason in paper.mismatch(results_of(folder).study, timed=False)


def test_the_papers_numbers_agree_with_each_other():
    # Its consistency checks: gains between trees are ratios of the stated means.
    means, gains = paper.MEANS, paper.GAINS
    for load in (12, 36):
        tree, control = (
            means["4B", "system", "general", load, role] for role in (paper.FULL, paper.CONTROL)
        )
        stated = gains["4B", "system", "general", load, paper.FULL, paper.CONTROL]
        assert round(100 * (tree / control - 1), 1) == stated
    # A mean of gains does not follow from the means.
    chain = means["4B", "system", "general", 12, paper.FULL] / 254.68 - 1
    assert round(100 * chain, 1) == 16.0 != 17.2


# ---------------------------------------------------------------------- findings


def test_ablations_are_findings_with_the_papers_numbers_of_both(tmp_path):
    ablation = dataclasses.replace(METHODS["treespark"], name="no-survival", title="No survival")
    own = setting([A], ("dspark", "treespark"), concurrencies=(12,))
    run = RunWriter(dataclasses.replace(own, methods=[*own.methods, ablation]))
    for method, speed in (("dspark", 10), ("treespark", 12), ("no-survival", 13)):
        timed_cell(run, ("a", method, 12, 0), speed)
    rows = texts(signs_table(results_of(run.write(tmp_path))))
    # Half of the time is before the first token.
    assert rows["Throughput, general sets, C = 12: TreeSpark > No survival"] == [
        "+17.2% and +11.9% over DSpark", "6.0 and 6.5: -7.7%", FAILS]  # fmt: skip


def test_a_sign_needs_all_repeats():
    assert verdict(0.1, 0.2) == HOLDS
    assert verdict(-0.1, 0.2) == UNCLEAR
    assert verdict(-0.2, 0.0) == FAILS


def test_findings_say_where_the_papers_signs_do_not_hold(tmp_path):
    general, writing = dataset("A"), dataset("W", "writing")
    run = RunWriter(setting([general, writing], ("dflash", "dspark", "dspark-tree", "treespark")))
    committed = {
        "dflash": ((3, 3), (1, 2)), "dspark": ((2, 2), (2, 2)),
        "dspark-tree": ((3, 3), (3, 3)), "treespark": ((4, 4), (3, 3)),
    }  # fmt: skip
    for method, both in committed.items():
        for name, tokens in zip(("a", "w"), both, strict=True):
            timed_cell(run, (name, method, 1, 0), 10, tokens)
    rows = texts(signs_table(results_of(run.write(tmp_path))))
    title = "Acceptance, general sets"
    assert rows[f"{title}: TreeSpark > DSpark+Tree"] == ["+6.4%", "4.00 and 3.00: +33.3%", HOLDS]
    assert rows[f"{title}: DSpark > DFlash"] == ["-", "2.00 and 3.00: -33.3%", FAILS]
    assert rows["Acceptance, writing domains: TreeSpark > DSpark+Tree"][2] == FAILS
    less = rows["Writing gains less in absolute terms than the general sets"]
    assert less[1:] == ["+1.00 and +2.00", HOLDS]
    more = rows["Writing gains more in relative terms than the general sets"]
    assert more[1:] == ["+50.0% and +100.0%", FAILS]
    depths = rows["TreeSpark accepts more than DSpark at every depth, C = 1"]
    # Both accept one draft token in every round; only the tree's second and third are more.
    assert depths[2] == "does not hold at depth 1, 4, 5, 6, 7"


# ---------------------------------------------------------------------- time and checks


def test_profile_and_the_suites_own_share(tmp_path):
    run = RunWriter(setting([A], ("dspark",)))
    phases = {"prefill": 1.0, "draft": 2.0, "verify": 6.0, "host": 0.9}
    requests = [(1.0, 9.0, [(2, 1, 7, 7)], "x")]
    run.cell(("a", "dspark", 1, 0), 10.0, requests, phases, num_rounds=100, step_s=9.9)
    table = profile_table(results_of(run.write(tmp_path)))
    assert table.columns == ["method", "C", "draft", "verify", "host", "round", "prefill", "suite"]
    assert texts(table)["DSpark"] == ["1", "20.00", "60.00", "9.00", "89.00", "10.0%", "1.00%"]
    assert "1.00% in all" in table.caption


def test_a_run_without_phases_still_shows_the_suites_share(tmp_path):
    run = RunWriter(setting([A], ("dspark",)))
    run.cell(("a", "dspark", 1, 0), 10.0, [(1.0, 9.0, [(2, 1, 7, 7)], "x")], step_s=9.8)
    table = profile_table(results_of(run.write(tmp_path)))
    assert table.columns == ["method", "C", "suite"]
    assert texts(table)["DSpark"] == ["1", "2.00%"]


def test_answers_are_compared_with_decoding_without_drafts(tmp_path):
    run = RunWriter(setting([A], ("autoregressive", "dspark"), (1, 12), repeats=2))
    for method, repeat, answers in (
        ("autoregressive", 0, "xy"), ("autoregressive", 1, "xy"),
        ("dspark", 0, "xy"), ("dspark", 1, "xz"),
    ):  # fmt: skip
        requests = [(0.0, 1.0, [(1, 0, 0, 0)], answer) for answer in answers]
        run.cell(("a", method, 1, repeat), 1.0, requests)
    # A server does not tell its ids: its answers are left out.
    run.cell(("a", "dspark", 12, 0), 1.0, [(0.0, 1.0, [], records.UNKNOWN)])
    run.cell(("a", "autoregressive", 12, 0), 1.0, [(0.0, 1.0, [], "x")])
    table = answers_table(results_of(run.write(tmp_path)))
    assert texts(table) == {"DSpark": ["3 of 4", "-"]}


def test_reasons_and_width_are_counted_over_traced_rounds(tmp_path):
    import random

    run = RunWriter(setting([A], ("treespark",)))
    timed_cell(run, ("a", "treespark", 1, 0), 10)
    rows = plausible_trace(random.Random(0), "a", "treespark", 0, num_rounds=4)
    rows = [
        dataclasses.replace(row, reason=reason, num_committed=n, chain_committed=c)
        for row, reason, n, c in zip(
            rows,
            (records.CUT, records.CUT, records.WRONG_PARENT, records.COMMITTED),
            (4, 3, 1, 2),
            (2, 3, 1, 1),
            strict=True,
        )
    ]
    run.rows[records.TRACES] = [rows[3], *rows[:3]]
    results = results_of(run.write(tmp_path))
    table = reasons_table(results.study, study_traces(results.study))
    assert table.columns[2:] == ["none missing", *records.REASONS[1:], "width won"]
    # (4 + 3 + 1 + 2 - 2 - 3 - 1 - 1) / 4
    assert texts(table)["TreeSpark"] == [
        "4", "25.0%", "0.0%", "0.0%", "50.0%", "25.0%", "0.0%", "+0.75"]  # fmt: skip


# ---------------------------------------------------------------------- formats

HOSTILE = Table(
    "key",
    "A | B & <i>50%</i> of $x_1^2$ ~ \\end{table} #{}",
    ["method", "`set` <script>"],
    [Row("*m* [a](b) |", [Cell("1_0", "-1.0%..+2.0%", is_best=True)])],
    "caption & 100%",
)


def test_markdown_keeps_its_grid():
    lines = markdown(HOSTILE).splitlines()
    grid = [line for line in lines if line.startswith("|")]
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in grid] == [3, 3, 3]
    assert r"\<script\>" in grid[0]
    assert r"**1\_0** (-1.0%..+2.0%)" in grid[2]


def test_latex_has_no_bare_sign():
    text = latex(HOSTILE)
    assert r"\textbf{1\_0} {\scriptsize (-1.0\%..+2.0\%)} \\" in text
    assert r"\textbackslash{}end\{table\}" in text
    assert re.findall(r"(?<!\\)[%$#_^~]", text) == []
    assert text.count(r"\end{table}") == 1
    assert text.replace(r"\{", "").count("{") == text.replace(r"\}", "").count("}")


def test_html_shows_the_texts_and_no_markup_of_theirs():
    text = page_table(HOSTILE)
    assert "<script" not in text
    assert "<i>" not in text
    shown = html.unescape(re.sub(r"<[^>]*>", "", text))
    assert HOSTILE.title in shown
    assert "`set` <script>" in shown


def test_every_method_of_the_world_is_in_every_table_it_was_measured_for(tmp_path):
    run = RunWriter(setting([A], METHODS))
    for method in METHODS:
        timed_cell(run, ("a", method, 1, 0), 10)
    titles = {method.title for method in METHODS.values()}
    tables = tables_of(run.write(tmp_path))
    assert set(tables) == {"table-1a", "table-1b", "table-3", "table-4"}
    for key in ("table-1a", "table-1b", "table-3"):
        assert {row.label for row in tables[key].rows if row.kind == "method"} == titles
