# SPDX-License-Identifier: Apache-2.0
"""The load client: its numbers are those of its definitions, its keys vLLM's, its errors named."""

import json
import re

import httpx
import pytest

from tests.bench.suite_tiny import write_suite
from tests.http_world import ServerProcess
from treespark.bench.load import LoadOptions, run_load
from treespark.bench.load_summary import Outcome, counters_of, summarize_load
from treespark.bench.suite import run_suite
from treespark.bench.suite_server import run_server_suite
from treespark.errors import UsageError


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = ServerProcess(tmp_path_factory.mktemp("load"), "--budget", "12")
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(3)))
    return path


def outcome(start_s, event_s, num_output, **fields):
    made = Outcome(start_s, event_s[-1], event_s, 10, num_output, is_done=True, **fields)
    made.close()
    return made


def test_throughput_and_times_follow_their_definitions():
    done = [
        outcome(0.0, [1.0, 2.0, 3.0], 9, num_rounds=2, num_committed_tokens=8),
        outcome(1.0, [2.0, 6.0], 5, num_rounds=4, num_committed_tokens=4),
    ]
    failed = Outcome(0.0, 1.0, error="HTTP 503")
    counters = {
        "spec_decode_num_drafts": 6.0,
        "spec_decode_draft_tokens": 72.0,
        "spec_decode_accepted_tokens": 9.0,
    }
    result = summarize_load([*done, failed], 7.0, counters, [50, 99])
    assert (result["completed"], result["failed"]) == (2, 1)
    assert result["total_input_tokens"], result["total_output_tokens"] == (20, 14)
    assert result["output_throughput"] == 14 / 7
    assert result["total_token_throughput"] == 34 / 7
    # (9 - 1) / 2 s and (5 - 1) / 4 s, averaged over requests.
    assert result["per_request_throughput"] == (4 + 1) / 2
    assert result["mean_ttft_ms"] == 1000
    assert result["mean_tpot_ms"] == (250 + 1000) / 2
    assert result["p50_itl_ms"] == 1000
    assert result["mean_e2el_ms"] == (3000 + 5000) / 2
    # Over all rounds, not the mean of two means.
    assert result["acceptance_length"] == 12 / 6
    assert result["spec_decode_acceptance_length"] == 1 + 9 / 6
    assert result["spec_decode_acceptance_rate"] == 9 / 72


def test_nothing_completed_is_no_division_by_zero():
    result = summarize_load([Outcome(0.0, 1.0, error="x")], 1.0, {}, [99])
    assert result["mean_ttft_ms"] is None
    assert result["acceptance_length"] is None
    assert json.dumps(result, allow_nan=False)


def test_an_answer_without_its_end_or_with_an_error_event_has_failed():
    cut, broken = Outcome(0.0), Outcome(0.0)
    cut.read('data: {"choices": [{"text": "a"}]}')
    broken.read('data: {"error": {"message": "m"}}')
    for made, words in ((cut, "without [DONE]"), (broken, "error event")):
        made.close()
        assert words in made.error


def test_counters_are_summed_over_labels():
    page = (
        "# HELP x\n"
        'vllm:spec_decode_num_drafts_total{engine="0"} 3.0\n'
        'vllm:spec_decode_num_drafts_total{engine="1"} 4.0\n'
        'vllm:spec_decode_num_drafts_created{engine="0"} 9.0\n'
    )
    assert counters_of(page) == {"spec_decode_num_drafts": 7.0}


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_closed_loop_measures_the_server(server, prompts, tmp_path, backend, capsys):
    result = run_load(
        LoadOptions(
            server.url, prompts, backend=backend, num_prompts=8, max_concurrency=4, output_len=12,
            ignore_eos=True, num_warmups=1, save_result=True, result_dir=tmp_path,
            result_filename="result.json",
        )
    )  # fmt: skip
    assert (result["completed"], result["failed"]) == (8, 0)
    assert result["total_output_tokens"] == 96
    assert result["acceptance_length"] >= 1
    assert result["spec_decode_acceptance_length"] >= 1
    assert 0 < result["mean_ttft_ms"] <= result["mean_e2el_ms"]
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert result.keys() >= {
        "duration", "completed", "failed", "request_throughput", "output_throughput",
        "total_token_throughput", "total_input_tokens", "total_output_tokens", "mean_ttft_ms",
        "median_tpot_ms", "std_itl_ms", "p99_e2el_ms", "model_id", "backend", "request_rate",
        "max_concurrency", "num_prompts", "date",
    }  # fmt: skip
    assert "output tokens / s, system" in capsys.readouterr().out


def test_random_prompts_arrive_at_their_rate(server, capsys):
    result = run_load(
        LoadOptions(
            server.url, dataset_name="random", backend="openai", num_prompts=6, request_rate=20.0,
            random_input_len=20, output_len=4, ignore_eos=True,
        ),
        as_json=True,
    )  # fmt: skip
    assert result["total_input_tokens"] == 120
    assert result["duration"] > 0.05
    assert json.loads(capsys.readouterr().out)["completed"] == 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "vllm"}, "--backend vllm: allowed: openai, openai-chat"),
        ({"dataset_path": None}, "--dataset-path: missing"),
        ({"dataset_name": "sharegpt"}, "--dataset-name sharegpt"),
        ({"request_rate": 0.0}, "--request-rate 0.0"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"percentile_metrics": "ttft,x"}, "--percentile-metrics x"),
        ({"metric_percentiles": "101"}, "--metric-percentiles 101"),
        ({"base_url": "localhost"}, "--base-url localhost: need an address"),
        ({"base_url": "http://127.0.0.1:9"}, "--base-url http://127.0.0.1:9/v1: cannot be reached"),
    ],
)
def test_a_wrong_option_is_named_before_any_load(prompts, options, words):
    given = {"base_url": "http://127.0.0.1:9", "dataset_path": prompts} | options
    with pytest.raises(UsageError) as caught:
        run_load(LoadOptions(**given))
    assert words in str(caught.value)


# ------------------------------------------------------------------ cells of an evaluation


def test_a_server_adds_cells_to_an_evaluation(server, tmp_path):
    methods = [{"name": "treespark", "drafter": "block"}]
    recipe = write_suite(tmp_path, methods=methods, datasets=[{"name": "gsm8k", "count": 3}])
    inside = {row.prompt_id: row for row in run_suite(recipe).requests()}
    run = run_server_suite(recipe, server.url, "treespark", 2)
    assert [cell.concurrency for cell in run.cells] == [1, 2]
    assert run.setting.concurrencies == [1, 2]
    outside = {row.prompt_id: row for row in run.requests() if row.concurrency == 2}
    assert outside.keys() == inside.keys()
    for prompt_id, row in outside.items():
        for name in ("num_prompt_tokens", "num_output_tokens", "num_prefill_tokens"):
            assert getattr(row, name) == getattr(inside[prompt_id], name)
        assert row.num_rounds == inside[prompt_id].num_rounds
        assert 0 <= row.arrival_s <= row.first_token_s <= row.finished_s <= run.cells[1].wall_s
    # What is there is not measured again.
    assert run_server_suite(recipe, "http://127.0.0.1:9", "treespark", 2).cells == run.cells
    # The answers' hashes are not known, so there is nothing to compare.
    assert len(run_suite(recipe).cells) == 2
    with pytest.raises(UsageError, match=r"--method dspark: .*run has treespark"):
        run_server_suite(recipe, server.url, "dspark", 2)
    write_suite(tmp_path, methods=methods, datasets=[{"name": "gsm8k", "count": 2}])
    with pytest.raises(UsageError, match=r"dataset gsm8k: .*run was measured on other prompts"):
        run_server_suite(recipe, server.url, "treespark", 3)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"tree": {}, "speculation": "auto"}, "the server chooses its budget itself"),
        (
            {"tree": {"depth": 5, "branching": 3, "budget": 8}, "speculation": None},
            "has trees {'depth': 5, 'branching': 3, 'budget': 8}, method treespark",
        ),
        ({"tree": None, "speculation": "off"}, "has trees None, method treespark"),
    ],
)
def test_a_server_of_other_trees_is_refused(tmp_path, monkeypatch, info, words):
    recipe = write_suite(
        tmp_path,
        methods=[{"name": "treespark", "drafter": "block"}],
        datasets=[{"name": "gsm8k", "count": 1}],
    )
    run_suite(recipe)
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(200, json=info))
    with pytest.raises(UsageError, match=re.escape(words)):
        run_server_suite(recipe, "http://127.0.0.1:9", "treespark", 2)
