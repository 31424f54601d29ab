# SPDX-License-Identifier: Apache-2.0
"""`treespark bench suite`: whole runs on a tiny target, interrupted ones among them."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.bench.suite_tiny import ALL_METHODS, METHODS, write_suite
from treespark.bench.suite import run_suite
from treespark.bench.suite_records import CELLS, REASONS, REQUESTS, ROUNDS, SuiteRun
from treespark.bench.suite_writer import SuiteWriter


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


def test_datasets_may_be_measured_one_at_a_time(tmp_path):
    both = [{"name": "gsm8k", "count": 2}, {"name": "mt-bench", "count": 1, "traced_prompts": 0}]
    recipe = write_suite(tmp_path, methods=METHODS[:2], datasets=both, traced_prompts=1)
    first = run_suite(recipe, datasets=["mt-bench"])
    assert {cell.dataset for cell in first.cells} == {"mt-bench"}
    assert first.traces() == []
    whole = run_suite(recipe)
    assert whole.cells[: len(first.cells)] == first.cells
    assert len(whole.cells) == 4
    assert {trace[0].dataset for trace in whole.traces()} == {"gsm8k"}


def test_what_was_measured_stays_where_a_recipe_asks_for_less(tmp_path):
    first = run_suite(write_suite(tmp_path, methods=METHODS[:2], concurrencies=[1, 2], repeats=2))
    less = run_suite(write_suite(tmp_path, methods=METHODS))
    assert less.cells[: len(first.cells)] == first.cells
    assert (less.setting.concurrencies, less.setting.repeats) == ([1, 2], 2)
