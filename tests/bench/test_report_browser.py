# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: the explorer steps, shows what the records say, and stays safe."""

import random

import pytest

from tests.bench.suite_world import (
    HOSTILE,
    RunWriter,
    dataset,
    plausible_trace,
    setting,
)
from tests.bench.test_report_results import timed_cell
from tests.chromium import Browser
from treespark.bench import suite_records as records
from treespark.bench.report.traces import EXPLANATIONS
from treespark.bench.report.write import write_suite_report
from treespark.bench.suite_records import TraceRow

A, B = dataset("A"), dataset("B")
ARROW_LEFT, ARROW_RIGHT = ("ArrowLeft", 37), ("ArrowRight", 39)


def hand_made_trace():
    """Three rounds of TreeSpark; in the second the wanted token stands behind another parent."""
    common = {"dataset": "a", "method": "treespark", "prompt_id": "a-0", "num_rounds": 3,
              "prefix_text": "2 + 2 ="}  # fmt: skip
    return [
        # Anchor 1; children 2 and 3; 2 has a child 4. The target takes 2, 4, and wants 9.
        TraceRow(
            **common, round=0, tokens=[1, 2, 3, 4], texts=[" 4", ".", "!", "\n"],
            parents=[-1, 0, 0, 1], depths=[0, 1, 1, 2], scores=[0.0, -0.5, -1.0, -0.75],
            accepted=[0, 1, 3], wanted=[2, 4, 9], wanted_texts=[".", "\n", HOSTILE[0]],
            reason=records.NOT_IN_TOP_K, num_committed=3, chain_committed=2,
        ),
        # Nothing is accepted: 8 stands at depth 2 and, wanted, at depth 1 only behind the anchor.
        TraceRow(
            **common, round=1, tokens=[9, 5, 6, 8, 8], texts=[HOSTILE[0], "x", "y", "z", "z"],
            parents=[-1, 0, 0, 1, 2], depths=[0, 1, 1, 2, 2], scores=[0.0, -1.0, -2.0, -1.5, -3.0],
            accepted=[0, 1], wanted=[5, 7], wanted_texts=["x", HOSTILE[3]],
            reason=records.CUT, num_committed=2, chain_committed=2,
        ),
        TraceRow(
            **common, round=2, tokens=[7, 5, 6, 8], texts=[HOSTILE[3], "x", "y", "z"],
            parents=[-1, 0, 0, 2], depths=[0, 1, 1, 2], scores=[0.0, -1.0, -2.0, -2.5],
            accepted=[0, 1], wanted=[5, 8], wanted_texts=["x", "z"],
            reason=records.WRONG_PARENT, num_committed=2, chain_committed=1,
        ),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory, browser):
    """A report whose traces are the hand-made one and seeded ones full of hostile texts."""
    root = tmp_path_factory.mktemp("report")
    methods = ("dspark", "treespark")
    run = RunWriter(setting([A, B], methods))
    for own in (A, B):
        for method in methods:
            timed_cell(run, (own.name, method, 1, 0), 10)
    rng = random.Random(5)
    run.rows[records.TRACES] += plausible_trace(rng, "a", "dspark", 0)
    run.rows[records.TRACES] += hand_made_trace()
    for number in range(2):
        for method in methods:
            run.rows[records.TRACES] += plausible_trace(rng, "b", method, number)
    return write_suite_report([run.write(root / "run")], root / "out")


@pytest.fixture
def opened(browser, page):
    """The page freshly loaded; afterwards nothing may have gone wrong in it."""
    browser.requests.clear()
    browser.open(page)
    yield browser
    assert browser.problems == []
    assert set(browser.requests) == {page.resolve().as_uri()}


def text(browser, selector):
    return browser.run(f"document.querySelector({selector!r}).textContent")


def texts(browser, selector):
    return browser.run(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")


def fact(browser, name):
    return text(browser, f"#fact-{name}")


def show_explorer(browser):
    browser.run("document.getElementById('explore').scrollIntoView()")


def choose(browser, select, label):
    browser.run(
        f"(() => {{ const s = document.getElementById({select!r}); "
        f"s.value = [...s.options].findIndex(o => o.text === {label!r}); "
        "s.dispatchEvent(new Event('change')); })()"
    )


def test_first_round_of_treespark_is_shown_as_recorded(opened):
    assert texts(opened, "#request option") == ["a · a-0", "b · b-0", "b · b-1"]
    assert opened.run("document.getElementById('method').selectedOptions[0].text") == "TreeSpark"
    assert text(opened, "#round-number") == "1 of 3"
    assert fact(opened, "committed") == "3 (2 drafted)"
    assert fact(opened, "nodes") == "3, 2 deep"
    assert (fact(opened, "chain"), fact(opened, "width")) == ("2", "+1")
    assert fact(opened, "reason") == EXPLANATIONS[records.NOT_IN_TOP_K]
    # Path probabilities: exp(-0.5), exp(-0.75), exp(-1).
    assert texts(opened, ".node.accepted:not(.anchor) .token") == [".", "↵"]
    assert texts(opened, ".node .share") == ["anchor", "61%", "37%", "47%", "wanted"]
    assert len(opened.run("[...document.querySelectorAll('.edge.accepted')].map(e => 1)")) == 2
    assert text(opened, "#output") == f"2 + 2 = 4.\n{HOSTILE[0]}"
    assert texts(opened, "#output .drafted") == [".", "\n"]
    assert texts(opened, "#output .bonus") == [HOSTILE[0]]


def test_accepted_path_and_wanted_token_are_one_straight_line(opened):
    rows = opened.run(
        "[...document.querySelectorAll('.node')].filter(n => /accepted|wanted/.test("
        "n.getAttribute('class'))).map(n => n.getAttribute('transform').split(',')[1])"
    )
    assert len(rows) == 4
    assert len(set(rows)) == 1


def test_arrow_keys_step_through_the_rounds(opened):
    show_explorer(opened)
    seen = []
    for key in (ARROW_RIGHT, ARROW_RIGHT, ARROW_RIGHT, ARROW_LEFT):
        opened.press(*key)
        seen.append((text(opened, "#round-number"), fact(opened, "reason")))
    wrong, cut = EXPLANATIONS[records.WRONG_PARENT], EXPLANATIONS[records.CUT]
    assert seen == [("2 of 3", cut), ("3 of 3", wrong), ("3 of 3", wrong), ("2 of 3", cut)]


def test_arrow_keys_scroll_nothing_away_where_the_explorer_is_not_seen(opened):
    opened.press(*ARROW_RIGHT)
    assert text(opened, "#round-number") == "1 of 3"


def test_buttons_timeline_and_slider_step_too(opened):
    assert opened.run("document.getElementById('previous').disabled")
    opened.click("#next")
    assert text(opened, "#round-number") == "2 of 3"
    opened.click("#timeline g:nth-child(3)")
    assert text(opened, "#round-number") == "3 of 3"
    assert opened.run("document.getElementById('next').disabled")
    opened.click("#previous")
    assert text(opened, "#round-number") == "2 of 3"
    opened.click("#round")
    opened.press(*ARROW_RIGHT)
    assert text(opened, "#round-number") == "3 of 3"


def test_wanted_token_behind_another_parent_is_marked(opened):
    opened.click("#timeline g:nth-child(3)")
    assert texts(opened, ".node.elsewhere .token") == ["z"]
    assert texts(opened, ".node.wanted .token") == ["z"]
    assert (fact(opened, "width"), fact(opened, "wanted")) == ("+1", "z")


def test_another_request_keeps_the_method_and_begins_at_its_first_round(opened):
    opened.click("#next")
    choose(opened, "request", "b · b-1")
    assert text(opened, "#round-number") == "1 of 9"
    assert opened.run("document.getElementById('method').selectedOptions[0].text") == "TreeSpark"
    choose(opened, "method", "DSpark")
    assert fact(opened, "nodes") == "7, 7 deep"
    assert (fact(opened, "chain"), fact(opened, "width")) == ("-", "-")


def test_hostile_texts_are_shown_and_never_run(opened):
    opened.run("window.alert = () => { window.attacked = true; }")
    for request in ("b · b-0", "b · b-1"):
        for method in ("DSpark", "TreeSpark"):
            choose(opened, "request", request)
            choose(opened, "method", method)
            for _ in range(8):
                opened.run("document.getElementById('next').click()")
    assert opened.run("window.attacked") is None
    assert opened.run("document.querySelectorAll('#explorer script, #explorer img').length") == 0
    assert opened.run("document.querySelectorAll('script').length") == 2
    odd = r"['\u202eright', '\0', 'a b\n', '', '😀']"
    shown = opened.run(f"{odd}.map(t => [visible(t), readable(t)])")
    assert shown == [
        ["⟨202E⟩right", "⟨202E⟩right"], ["⟨0000⟩", "⟨0000⟩"], ["a·b↵", "a b\n"], ["∅", ""],
        ["😀", "😀"],
    ]  # fmt: skip


def test_what_turns_text_around_is_written_out(opened):
    opened.click("#next")
    # The bonus of round 2 begins with a right-to-left override.
    assert fact(opened, "wanted") == "⟨202E⟩right·to·left"
    assert text(opened, "#output").endswith("⟨202E⟩right to left")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_page_fits_the_window_and_stays_readable(browser, page, width, dark):
    browser.open(page, width, 900, dark)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    # Contrast of text on its ground, as WCAG has it: at least 4.5.
    ratio = browser.run(
        """(() => {
          const light = (colour) => {
            const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
              .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const ground = light(getComputedStyle(document.body).backgroundColor);
          const ratios = ["body", ".caption", "td b", "tr.gain td", "a"].map((name) => {
            const own = light(getComputedStyle(document.querySelector(name)).color);
            return (Math.max(own, ground) + 0.05) / (Math.min(own, ground) + 0.05);
          });
          return [ground > 0.5, Math.min(...ratios)];
        })()"""
    )
    assert ratio[0] is not dark
    assert ratio[1] >= 4.5


def test_a_page_without_traces_has_no_errors(browser, tmp_path):
    run = RunWriter(setting([A], ["dspark"]))
    timed_cell(run, ("a", "dspark", 1, 0), 10)
    browser.open(write_suite_report([run.write(tmp_path / "run")], tmp_path / "out"))
    assert text(browser, ".empty") == "No request of this run was traced."
    assert browser.problems == []


def test_a_broken_page_would_be_noticed(browser, page, tmp_path):
    broken = tmp_path / "index.html"
    broken.write_text(page.read_text().replace("function visible(", "function invisible("))
    browser.open(broken)
    assert browser.problems != []
    browser.problems.clear()
