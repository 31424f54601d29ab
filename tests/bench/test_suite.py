# SPDX-License-Identifier: Apache-2.0
"""`treespark bench suite`: whole runs on a tiny target, interrupted ones among them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.bench.suite_tiny import ALL_METHODS, METHODS, write_suite
from treespark.bench.suite import run_suite
from treespark.bench.suite_records import CELLS, REASONS, REQUESTS, ROUNDS, SETTING, SuiteRun
from treespark.bench.suite_writer import SuiteWriter
from treespark.cli.suite import bench_suite
from treespark.errors import UsageError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of every method, with traces."""
    folder = tmp_path_factory.mktemp("suite")
    recipe = write_suite(
        folder,
        ("block", "dflash", "eagle3"),
        methods=ALL_METHODS,
        datasets=[{"name": "gsm8k", "count": 3}],
        concurrencies=[1, 2],
        max_tokens=8,
        traced_prompts=1,
        baseline="dspark",
    )
    return run_suite(recipe, keep_ids=True)


def test_every_cell_is_measured_once(whole):
    keys = [cell.key for cell in whole.cells]
    names = [method["name"] for method in ALL_METHODS]
    assert sorted(keys) == sorted(("gsm8k", name, c, 0) for name in names for c in (1, 2))
    assert all(cell.num_requests == 3 for cell in whole.cells)


def test_all_methods_give_the_same_answers(whole):
    answers = {}
    for row in whole.requests():
        answers.setdefault(row.prompt_id, set()).add((row.ids_sha256, tuple(row.token_ids)))
    assert len(answers) == 3
    assert all(len(different) == 1 for different in answers.values())


def test_the_records_add_up(whole):
    rounds = list(whole.rounds())
    requests = list(whole.requests())
    for request in requests:
        own = [r for r in rounds if (r.key, r.prompt_id) == (request.key, request.prompt_id)]
        assert [r.round for r in own] == list(range(request.num_rounds))
        committed = sum(r.num_committed for r in own)
        assert request.num_output_tokens == request.num_prefill_tokens + committed
        assert request.num_output_tokens == len(request.token_ids)
        times = [request.arrival_s, request.admitted_s, request.first_token_s, request.finished_s]
        assert times == sorted(times)
        assert times[0] >= 0
    for cell in whole.cells:
        own = [r for r in requests if r.key == cell.key]
        assert cell.num_output_tokens == sum(r.num_output_tokens for r in own)
        assert cell.wall_s >= max(r.finished_s for r in own)
        assert cell.step_s <= cell.wall_s
        assert sum(cell.phase_s.values()) <= cell.step_s


def test_a_closed_loop_keeps_as_many_requests_running_as_it_says(whole):
    for cell in whole.cells:
        own = sorted((r for r in whole.requests() if r.key == cell.key), key=lambda r: r.arrival_s)
        for row in own:
            running = [r for r in own if r.arrival_s <= row.arrival_s < r.finished_s]
            assert len(running) <= cell.concurrency
        # The third of three prompts arrives when one of the others has ended.
        first_end = min(r.finished_s for r in own[: cell.concurrency])
        assert own[cell.concurrency].arrival_s >= first_end


def test_what_is_drafted_follows_the_method(whole):
    proposed = {name: [] for name in (row.name for row in whole.setting.methods)}
    for row in whole.rounds():
        proposed[row.method].append((row.num_proposed, row.proposed_depth))
    assert set(proposed["autoregressive"]) == {(0, 0)}
    for chain in ("dspark", "dflash", "eagle3"):
        assert all(nodes == depth for nodes, depth in proposed[chain])
        assert max(proposed[chain]) == (5, 5)
    assert max(nodes for nodes, _ in proposed["treespark"]) == 12
    assert max(nodes for nodes, _ in proposed["dspark-tree"]) == 8


def test_the_setting_says_what_was_measured(whole):
    setting = whole.setting
    (dataset,) = setting.datasets
    assert (dataset.name, dataset.pool_size, dataset.subset_size) == ("gsm8k", 3, 3)
    methods = {row.name: row for row in setting.methods}
    assert methods["quota"].method == "calibrated"
    assert (methods["quota"].priority, methods["quota"].stop) == ("survival", "budget")
    assert methods["ddtree"].layout == "in-place"
    assert methods["dspark"].layout == "shifted"
    assert methods["eagle3"].layout is None
    assert methods["autoregressive"].drafter is None
    assert setting.drafters["dflash"]["block_size"] == 5
    assert setting.baseline == "dspark"
    assert setting.recipe["seed"] == setting.seed == 980406


def test_traces_cover_every_method_that_drafts(whole):
    traces = {trace[0].method: trace for trace in whole.traces()}
    assert set(traces) == {method["name"] for method in ALL_METHODS} - {"autoregressive"}
    answers = {row.prompt_id: row.token_ids for row in whole.requests()}
    for trace in traces.values():
        output = []
        for row in trace:
            # Node 0 is the anchor; what is wanted after each accepted node is the next one's token.
            assert row.accepted[0] == 0
            assert [row.tokens[node] for node in row.accepted[1:]] == row.wanted[:-1]
            assert row.parents[0] == -1
            assert row.reason in REASONS
            output += row.wanted[: row.num_committed]
        assert output == answers[trace[0].prompt_id][1:]


# ---------------------------------------------------------------------- interruptions


def test_a_killed_run_loses_one_cell_and_goes_on(tmp_path):
    few = {"methods": METHODS[:2], "datasets": [{"name": "gsm8k", "count": 1}]}
    recipe = write_suite(tmp_path, repeats=1000, **few)
    # A run goes on with its own number of threads only.
    threads = str(torch.get_num_threads())
    environment = os.environ | {"OMP_NUM_THREADS": threads, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "treespark", "bench", "suite", str(recipe)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        cells = tmp_path / "run" / CELLS
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            if cells.exists() and cells.read_bytes().count(b"\n") >= 2:
                break
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    before = SuiteRun(tmp_path / "run")
    assert 2 <= len(before.cells) < 2000
    num_repeats = len(before.cells) // 2 + 1
    write_suite(tmp_path, repeats=num_repeats, **few)
    after = run_suite(recipe)
    assert after.cells[: len(before.cells)] == before.cells
    assert len({cell.key for cell in after.cells}) == len(after.cells) == 2 * num_repeats
    assert sum(cell.num_requests for cell in after.cells) == len(list(after.requests()))


def test_a_second_start_measures_nothing(whole, monkeypatch):
    files = (CELLS, REQUESTS, ROUNDS)
    before = {name: (whole.folder / name).read_bytes() for name in files}
    monkeypatch.setattr(SuiteWriter, "add_cell", None)
    monkeypatch.setattr(SuiteWriter, "add_trace", None)
    run_suite(whole.folder.parent / "suite.yaml")
    assert {name: (whole.folder / name).read_bytes() for name in files} == before


def test_a_signal_ends_the_run_with_the_finished_cells_kept(tmp_path, monkeypatch):
    recipe = write_suite(tmp_path)
    original = SuiteWriter.add_cell

    def add_cell(self, *rows):
        original(self, *rows)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SuiteWriter, "add_cell", add_cell)
    with pytest.raises(SystemExit) as stopped:
        run_suite(recipe)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert len(SuiteRun(tmp_path / "run").cells) == 1
    monkeypatch.undo()
    assert len(run_suite(recipe).cells) == 6


def test_turns_measure_the_same_work(tmp_path):
    recipe = write_suite(tmp_path, datasets=[{"name": "gsm8k", "count": 3}], prompts_per_turn=1)
    run = run_suite(recipe)
    assert sorted(cell.num_requests for cell in run.cells) == [3, 3, 3]
    for cell in run.cells:
        times = [r.finished_s for r in run.requests() if r.key == cell.key]
        # The clock of a cell stands still while others have their turn.
        assert times == sorted(times)
        assert times[-1] <= cell.wall_s


def test_methods_and_repeats_may_be_added_to_a_run(tmp_path):
    recipe = write_suite(tmp_path, methods=METHODS[:2])
    first = run_suite(recipe)
    write_suite(tmp_path, repeats=2)
    both = run_suite(recipe)
    assert both.cells[: len(first.cells)] == first.cells
    assert len(both.cells) == 12
    assert [row.name for row in both.setting.methods] == [m["name"] for m in METHODS]


def test_what_was_measured_stays_where_a_recipe_asks_for_less(tmp_path):
    first = run_suite(write_suite(tmp_path, methods=METHODS[:2], concurrencies=[1, 2], repeats=2))
    less = run_suite(write_suite(tmp_path, methods=METHODS))
    assert less.cells[: len(first.cells)] == first.cells
    assert (less.setting.concurrencies, less.setting.repeats) == ([1, 2], 2)


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 9}, r"measured with max_tokens 6, the recipe has 9"),
        ({"seed": 1}, r"measured with seed 980406, the recipe has 1"),
        ({"methods": METHODS[:2]}, r"measured with method treespark, which the recipe lacks"),
        (
            {"datasets": [{"name": "gsm8k", "count": 1}, {"name": "mt-bench", "count": 1}]},
            r"measured with dataset gsm8k with subset_size 2, the recipe has 1",
        ),
    ],
)
def test_a_run_folder_of_another_setting_is_refused(tmp_path_factory, changes, message):
    folder = tmp_path_factory.getbasetemp() / "measured"
    if not folder.exists():
        folder.mkdir()
        run_suite(write_suite(folder))
    setting = (folder / "run" / SETTING).read_bytes()
    recipe = write_suite(folder, **changes)
    with pytest.raises(UsageError, match=message):
        run_suite(recipe)
    assert (folder / "run" / SETTING).read_bytes() == setting


def _changed_setting(folder, change):
    path = folder / "run" / SETTING
    setting = json.loads(path.read_text())
    change(setting)
    path.write_text(json.dumps(setting))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["versions"]["packages"].update(torch="2.9.0"), r"torch 2\.9\.0, this is 2"),
        (lambda s: s["versions"].update(processor="another"), r"processor another, this is "),
    ],
)
def test_a_run_goes_on_where_it_began_or_not_at_all(tmp_path, change, message):
    recipe = write_suite(tmp_path, methods=METHODS[:1])
    run_suite(recipe)
    _changed_setting(tmp_path, change)
    with pytest.raises(UsageError, match=f"measured with {message}"):
        run_suite(recipe)


def test_a_run_goes_on_with_its_prompts_from_another_place(tmp_path):
    recipe = write_suite(tmp_path, methods=METHODS[:1])
    cells = run_suite(recipe).cells
    _changed_setting(tmp_path, lambda s: s["datasets"][0].update(source="/elsewhere/gsm8k.jsonl"))
    # As of a version that did not write it.
    _changed_setting(tmp_path, lambda s: s["versions"].pop("processor"))
    assert run_suite(recipe).cells == cells


def _contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_refused_run_leaves_the_setting_as_it_was(tmp_path):
    run_suite(write_suite(tmp_path, methods=METHODS[:2]))
    more = write_suite(tmp_path)
    before = _contents(tmp_path / "run")
    with (
        SuiteWriter(tmp_path / "run"),
        pytest.raises(UsageError, match="another process is writing this file"),
    ):
        run_suite(more)
    assert _contents(tmp_path / "run") == before
    with (tmp_path / "run" / CELLS).open("a") as cells:
        cells.write("{}\n")
    before = _contents(tmp_path / "run")
    with pytest.raises(UsageError, match=r"cells\.jsonl:\d+: missing key"):
        run_suite(more)
    assert _contents(tmp_path / "run") == before


def test_records_without_their_setting_are_not_taken_for_another_ones(tmp_path):
    recipe = write_suite(tmp_path, methods=METHODS[:2])
    run_suite(recipe)
    (tmp_path / "run" / SETTING).unlink()
    before = _contents(tmp_path / "run")
    with pytest.raises(UsageError, match=r"it has cells\.jsonl without suite\.json"):
        run_suite(recipe)
    assert _contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "nowhere"}, r"dataset gsm8k: .*nowhere: no such file or folder"),
        (
            {"datasets": [{"name": "aime25"}]},
            r"dataset aime25: .*data has no aime25\.jsonl",
        ),
        (
            {"datasets": [{"name": "gsm8k"}]},
            r"dataset gsm8k: count 500, but .* has 3 usable prompts; give `count`, at most 3",
        ),
        (
            {"max_tokens": 250},
            r"prompt gsm8k-. has \d+ tokens, with max_tokens 250 more than the target's context",
        ),
        (
            {"methods": [{"name": "treespark", "drafter": "block", "threshold": 0.1}]},
            r"method treespark: threshold 0.1: goes with stop threshold only",
        ),
        (
            {"methods": [{"name": "eagle3", "drafter": "block"}]},
            r"method eagle3: drafter block is treespark; need an EAGLE-3 drafter",
        ),
        (
            {"methods": [{"name": "dspark", "drafter": "block", "budget": 3}]},
            r"method dspark: budget 3: a chain has none",
        ),
        (
            {"methods": [{"name": "mine", "drafter": "block"}]},
            r"method mine: need `method`, one of autoregressive, eagle3",
        ),
        ({"methods": [{"name": "dspark"}]}, r"method dspark: needs `drafter`, one of block"),
        (
            {"methods": [{"name": "autoregressive", "budget": 3}]},
            r"method autoregressive: budget: not an option of autoregressive decoding",
        ),
        ({"drafters": {"block": "data"}}, r"drafter .*data: "),
        (
            {
                "methods": [
                    *METHODS,
                    {
                        "name": "wide",
                        "method": "treespark",
                        "drafter": "block",
                        "title": "TreeSpark",
                    },
                ]
            },
            r"method wide: title 'TreeSpark' is also the one of treespark; give another",
        ),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(tmp_path, changes, message):
    recipe = write_suite(tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        run_suite(recipe)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"methods": [*METHODS, dict(METHODS[0])]},
            r"yaml:\d+: methods: name 'autoregressive' given twice",
        ),
        ({"methods": [{"name": "dspark", "drafter": "x"}]}, r"drafter 'x': drafters: block"),
        ({"datasets": [{"name": "gsm9k"}]}, r"'gsm9k' is not allowed: need .*, writing-politics$"),
        (
            {"datasets": [{"name": "gsm8k", "count": 0}]},
            r"count: 0 is not allowed: need >= 1 .*\d$",
        ),
        ({"datasets": []}, r"datasets: \[\] is not allowed: need a list that is not empty$"),
        ({"drafters": ["block"]}, r"drafters: \['block'\] is not allowed: need a section of keys"),
        ({"methods": [METHODS[0] | {"title": "a\nb"}]}, r"title 'a\\nb' is not allowed: need one"),
        ({"methods": [METHODS[0] | {"title": " "}]}, r"title ' ' is not allowed: need one line"),
        ({"baseline": "dflash"}, r"baseline 'dflash': need one of the methods autoregressive"),
        ({"concurrencies": [1, 1]}, r"concurrencies \[1, 1\]: one is given twice"),
        ({"data": None}, r"dataset gsm8k: need file, hub, or data for all datasets"),
        ({"methods": [{"name": "treespark", "budgets": 3}]}, r"did you mean 'budget'"),
    ],
)
def test_a_recipe_names_the_line_of_a_mistake(tmp_path, changes, message):
    recipe = write_suite(tmp_path, **changes)
    with pytest.raises(UsageError, match=message) as refused:
        run_suite(recipe)
    assert str(refused.value).startswith(str(recipe))


def test_different_answers_in_float32_fail_the_run(tmp_path, monkeypatch, capsys):
    recipe = write_suite(tmp_path, methods=METHODS[:2], datasets=[{"name": "gsm8k", "count": 1}])
    run = run_suite(recipe)
    path = run.folder / REQUESTS
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    second["ids_sha256"] = "0" * 64
    # The same length, as cells.jsonl counts on it.
    path.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    with pytest.raises(SystemExit) as failed:
        run_suite(recipe)
    assert failed.value.code == 1
    assert "dspark and autoregressive differ on prompt gsm8k-" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "treespark"}, "--method treespark: goes with --url"),
        ({"concurrency": 3}, "--concurrency 3: goes with --url"),
        ({"url": "http://x", "method": "a"}, "--url http://x: needs --method and --concurrency"),
    ],
)
def test_a_server_is_measured_by_one_method_at_one_concurrency(options, message):
    with pytest.raises(UsageError, match=f"^{message}$"):
        bench_suite(Path("suite.yaml"), **options)
