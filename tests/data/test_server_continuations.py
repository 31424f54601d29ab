# SPDX-License-Identifier: Apache-2.0
"""Answers from a server: a stand-in on this machine that echoes ids, well or badly."""

import email.utils
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.data.stand_in import MODES, StandIn, body_of, echo
from tests.data.tiny import EOS_ID, read_rows, write_rows
from treespark.data import completions_client
from treespark.data.completions_client import _asked_pause_s
from treespark.data.continuations import run_continuations
from treespark.data.server_continuations import run_server_continuations
from treespark.errors import UsageError
from treespark.target.model import TargetModel
from treespark.target.template import load_tokenizer, render_prompt

pytest.importorskip("httpx")

MAX_TOKENS = 20


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(completions_client, "_BACKOFF_S", 0.01)
    # The promise of this mode: no weights.
    monkeypatch.setattr(TargetModel, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    with StandIn() as stand_in:
        thread = threading.Thread(target=stand_in.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield stand_in
        stand_in.shutdown()
        thread.join()


def _prompts(tmp_path, num_rows=5):
    rows = [
        {"id": f"p-{i}", "source": "s", "category": "math", "prompt": f"ab {i}"}
        for i in range(num_rows)
    ]
    return write_rows(tmp_path / "prompts.jsonl", rows)


def _run(target, prompts, server, **options):
    settings = {"max_tokens": MAX_TOKENS, "concurrency": 3, "retries": 2}
    out = prompts.with_name("out.jsonl")
    return run_server_continuations(target, prompts, out, server.url, **{**settings, **options})


def _rows(prompts):
    return read_rows(prompts.with_name("out.jsonl"))


def _report(prompts):
    return json.loads(prompts.with_name("out.jsonl.report.json").read_text())


@pytest.mark.parametrize(
    ("mode", "source"), [("ids", "server"), ("no eos", "server"), ("text", "re-encoded")]
)
def test_rows_hold_our_prompt_ids_and_the_servers_answer_ended_by_eos(
    tmp_path, target_folder, server, mode, source
):
    prompts, server.mode = _prompts(tmp_path), mode
    report = _run(target_folder, prompts, server)
    assert (report.num_success, report.errors, report.is_complete) == (5, [], True)
    rows, tokenizer = {row["id"]: row for row in _rows(prompts)}, load_tokenizer(target_folder)
    for asked in read_rows(prompts):
        row, ids = rows[asked["id"]], render_prompt(tokenizer, asked["prompt"])
        echoed, text = echo({"prompt": ids})
        assert {key: row[key] for key in asked} == asked
        assert (row["prompt_token_ids"], row["finish_reason"]) == (ids, "stop")
        assert (row["output_token_ids"], row["text"]) == ([*echoed, EOS_ID], text)
        assert row["gen"] == {**report.gen, "ids": source}
    assert report.gen["model"] == "tiny"
    assert report.gen["fingerprint"] == report.gen["dtype"] == "server"
    request, key = server.requests[0]
    assert key is None
    assert {name: request[name] for name in request if name != "prompt"} == {
        "model": "tiny", "max_tokens": MAX_TOKENS, "temperature": 0.0, "return_token_ids": True
    }  # fmt: skip


def test_busy_server_is_asked_again(tmp_path, target_folder, server):
    prompts, server.mode = _prompts(tmp_path), "busy"
    report = _run(target_folder, prompts, server, retries=3)
    assert (report.num_success, server.num_asked) == (5, 8)


@pytest.mark.parametrize(
    ("mode", "reason", "num_asked"),
    [
        ("500", "HTTP 500: <h1>out of memory</h1>", 6),
        ("400", "HTTP 400: too long too long", 2),
        ("404", "HTTP 404: no such model", 2),
        ("422", "HTTP 422: [{'loc': 'prompt'}]", 2),
        ("malformed", "malformed JSON", 2),
        ("deep", "nested too deeply", 2),
        ("surrogate", "lone surrogate", 2),
        ("no choices", "no choices[0].text", 2),
        ("foreign", "outside 0..258", 2),
        ("negative", "outside 0..258", 2),
        ("no list", "need a list of integers", 2),
        ("abort", "finish_reason 'abort'", 2),
        ("other prompt", "other prompt ids", 2),
        ("special", "does not encode back", 2),
        ("half", "does not encode back", 2),
        ("nothing", "without tokens", 2),
    ],
)
def test_unusable_answer_is_an_error_of_its_row_and_is_asked_again_on_resume(
    tmp_path, target_folder, server, mode, reason, num_asked
):
    prompts, server.mode = _prompts(tmp_path, 2), mode
    report = _run(target_folder, prompts, server)
    assert (report.num_success, report.is_complete) == (0, True)
    assert {error["id"] for error in report.errors} == {"p-0", "p-1"}
    assert all(reason in error["error"] for error in report.errors)
    assert max(len(error["error"]) for error in report.errors) <= 210
    assert server.num_asked == num_asked
    server.mode = "ids"
    assert _run(target_folder, prompts, server).num_success == 2


def test_stop_names_the_id_that_ended_the_answer_when_several_could(
    tmp_path, target_folder, server, monkeypatch
):
    from treespark.data import server_continuations

    prompts = _prompts(tmp_path, 3)
    monkeypatch.setattr(server_continuations, "eos_token_ids", lambda *_: {0, 1})
    named = iter([{"stop_reason": 1}, {"matched_stop": 0}, {"stop_reason": None}])
    monkeypatch.setitem(
        MODES, "ids", lambda _, request: (200, {}, body_of(request, token_ids=[7], **next(named)))
    )
    report = _run(target_folder, prompts, server, concurrency=1)
    assert [row["output_token_ids"] for row in _rows(prompts)] == [[7, 1], [7, 0]]
    assert "which of the ids [0, 1] ended" in report.errors[0]["error"]


def test_success_error_and_skipped_sum_to_the_input(tmp_path, target_folder, server):
    rows = [*read_rows(_prompts(tmp_path, 2)), {"id": "blank", "prompt": " "}]
    rows.append({"id": "long", "prompt": "x" * 400})
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    report = _run(target_folder, prompts, server)
    assert (report.num_input, report.num_success, len(report.errors)) == (4, 2, 2)
    again = _run(target_folder, prompts, server)
    assert (again.num_skipped, again.num_success, len(again.errors)) == (2, 0, 2)
    assert server.num_asked == 2


def test_truncated_answers_are_kept_by_default(tmp_path, target_folder, server):
    prompts, server.mode = _prompts(tmp_path, 4), "length"
    report = _run(target_folder, prompts, server)
    assert (report.finish_reasons, report.truncated) == ({"stop": 2, "length": 2}, {})
    cut = [row for row in _rows(prompts) if row["finish_reason"] == "length"]
    assert all(row["output_token_ids"][-1] != EOS_ID for row in cut)


def test_dropped_answers_are_counted_and_not_asked_again(tmp_path, target_folder, server):
    prompts, server.mode = _prompts(tmp_path, 4), "length"
    report = _run(target_folder, prompts, server, drop_truncated=True)
    assert (report.num_success, len(report.truncated), report.is_complete) == (2, 2, True)
    assert list(report.truncated) == list(_report(prompts)["truncated"])
    assert {row["id"] for row in _rows(prompts)}.isdisjoint(report.truncated)
    again = _run(target_folder, prompts, server, drop_truncated=True)
    assert (again.num_skipped, again.truncated, server.num_asked) == (2, report.truncated, 4)
    # Without the option they are wanted.
    server.mode = "ids"
    assert _run(target_folder, prompts, server).num_success == 2


@pytest.mark.parametrize("change", ["prompt", "max_tokens"])
def test_dropped_answer_of_another_prompt_or_setting_is_asked(
    tmp_path, target_folder, server, change
):
    prompts, server.mode = _prompts(tmp_path, 1), "length"
    server.num_asked = 1
    options = {"drop_truncated": True}
    assert len(_run(target_folder, prompts, server, **options).truncated) == 1
    if change == "prompt":
        write_rows(prompts, [{"id": "p-0", "prompt": "other"}])
    else:
        options["max_tokens"] = MAX_TOKENS + 1
    assert _run(target_folder, prompts, server, **options).num_success == 1


@pytest.mark.parametrize(
    ("change", "name"),
    [({"max_tokens": 13}, "max_tokens"), ({"temperature": 0.5}, "sampling"), ({}, "model")],
)
def test_resume_with_other_settings_names_the_field(tmp_path, target_folder, server, change, name):
    prompts = _prompts(tmp_path)
    _run(target_folder, prompts, server)
    content = prompts.with_name("out.jsonl").read_bytes()
    server.models = ["other"] if name == "model" else server.models
    with pytest.raises(UsageError, match=f"made with {name} "):
        _run(target_folder, prompts, server, **change)
    assert prompts.with_name("out.jsonl").read_bytes() == content


def test_rows_of_a_server_are_not_mixed_with_those_of_the_engine(
    tmp_path, target_folder, server, monkeypatch
):
    prompts = _prompts(tmp_path, 1)
    _run(target_folder, prompts, server)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="made with fingerprint 'server', this run has"):
        run_continuations(
            target_folder, prompts, tmp_path / "out.jsonl", MAX_TOKENS, 1, "float32", "cpu"
        )


@pytest.mark.parametrize(
    ("options", "models", "message"),
    [
        ({}, ["a", "b"], "--model: needed.*listed: a, b"),
        ({}, [], "--model: needed.*listed: none"),
        ({"model": "c"}, ["a", "b"], "--model c: not served by .*listed: a, b"),
        ({"concurrency": 0}, ["a"], "--concurrency 0: need at least 1"),
        ({"retries": -1}, ["a"], "--retries -1: need at least 0"),
        ({"temperature": float("nan")}, ["a"], "--temperature nan: need a number"),
        ({"api_key_env": "NO_SUCH_KEY"}, ["a"], "--api-key-env NO_SUCH_KEY: .*is not set"),
    ],
)
def test_wrong_option_is_refused_and_nothing_is_written(
    tmp_path, target_folder, server, options, models, message
):
    prompts, server.models = _prompts(tmp_path), models
    with pytest.raises(UsageError, match=message):
        _run(target_folder, prompts, server, **options)
    assert os.listdir(tmp_path) == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://127.0.0.1:1/v1", "cannot be reached: ConnectError"),
        ("ftp://host/v1", "need an address as"),
        ("localhost:8000", "need an address as"),
        ("http://host:port/v1", "need an address as"),
    ],
)
def test_address_without_a_server_is_refused_and_nothing_is_written(
    tmp_path, target_folder, server, address, message
):
    prompts, server.url = _prompts(tmp_path), address
    with pytest.raises(UsageError, match=f"--server {address}: .*{message}"):
        _run(target_folder, prompts, server)
    assert os.listdir(tmp_path) == ["prompts.jsonl"]


def test_missing_httpx_names_the_extra(tmp_path, target_folder, server, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UsageError, match=r"pip install 'treespark\[train\]'"):
        _run(target_folder, _prompts(tmp_path), server)


def test_key_of_the_variable_is_sent(tmp_path, target_folder, server, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "k")
    _run(target_folder, _prompts(tmp_path, 1), server, api_key_env="SOME_KEY", model="tiny")
    assert server.requests[0][1] == "Bearer k"


@pytest.mark.parametrize(
    ("value", "pause_s"),
    [("7", 7), ("9999", 600), ("9" * 5000, None), ("soon", None), ("", None), ("-1", None)],
)
def test_retry_after_is_read_and_bounded(value, pause_s):
    assert _asked_pause_s({"retry-after": value}) == pause_s


def test_retry_after_may_be_a_date():
    then = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert 90 < _asked_pause_s({"retry-after": then}) <= 100


_COMMAND = """
import sys
from pathlib import Path
from treespark.data.server_continuations import run_server_continuations
target, prompts, out = map(Path, sys.argv[1:4])
run_server_continuations(target, prompts, out, sys.argv[4], 20, concurrency=2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_with_whole_rows_report_and_the_command_to_go_on(
    tmp_path, target_folder, server, number
):
    prompts, server.mode, out = _prompts(tmp_path, 200), "slow", tmp_path / "out.jsonl"
    arguments = [str(path) for path in (target_folder, prompts, out)]
    with subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *arguments, server.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parent.parent.parent,
    ) as process:
        deadline_s = time.monotonic() + 120
        while not (out.exists() and out.stat().st_size):
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline_s, "no row within 120 s"
            time.sleep(0.01)
        process.send_signal(number)
        stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "stopped; to go on: treespark" in stdout
    rows, report = read_rows(out), _report(prompts)
    assert 0 < len(rows) == report["num_success"] < 200
    assert (report["is_complete"], report["errors"]) == (False, [])
