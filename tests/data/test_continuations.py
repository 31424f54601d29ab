# SPDX-License-Identifier: Apache-2.0
"""Continuations: the target's greedy answers, resumable by id, never mixed with other settings."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.data.tiny import EOS_ID, make_target, read_rows, write_rows
from treespark.data import continuations
from treespark.data.continuations import run_continuations
from treespark.data.interrupt import StopRequest
from treespark.errors import UsageError
from treespark.serving.engine import Engine
from treespark.target.model import TargetModel
from treespark.target.template import load_tokenizer, render_prompt

MAX_TOKENS = 12


def _prompts(tmp_path, num_rows=7, **more):
    rows = [
        {"id": f"p-{i}", "source": "s", "category": "math", "prompt": "ab " * (i % 4 + 1) + str(i)}
        for i in range(num_rows)
    ]
    return write_rows(tmp_path / "prompts.jsonl", [{**row, **more} for row in rows])


def _run(target, prompts, out, **options):
    settings = {"max_tokens": MAX_TOKENS, "batch_size": 3, "dtype": "float32", "device": "cpu"}
    return run_continuations(target, prompts, out, **{**settings, **options})


def _by_id(path):
    return {row["id"]: row for row in read_rows(path)}


def _report(out):
    return json.loads(out.with_name(out.name + ".report.json").read_text())


@pytest.fixture
def done(tmp_path, target_folder):
    """A finished run: prompt file and output file."""
    prompts, out = _prompts(tmp_path), tmp_path / "out.jsonl"
    _run(target_folder, prompts, out)
    return prompts, out


def test_answers_are_transformers_greedy_answers_with_ids_and_reason(done, target_folder):
    prompts, out = done
    model = AutoModelForCausalLM.from_pretrained(target_folder).eval()
    tokenizer = load_tokenizer(target_folder)
    rows = _by_id(out)
    assert set(rows) == {row["id"] for row in read_rows(prompts)}
    for asked in read_rows(prompts):
        row, ids = rows[asked["id"]], render_prompt(tokenizer, asked["prompt"])
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=EOS_ID,
                pad_token_id=0,
            )[0, len(ids) :].tolist()
        assert row["prompt_token_ids"] == ids
        assert row["output_token_ids"] == expected
        assert row["finish_reason"] == ("stop" if expected[-1] == EOS_ID else "length")
        assert {key: row[key] for key in asked} == asked
        assert row["gen"]["max_tokens"] == MAX_TOKENS
        assert row["gen"]["dtype"] == "float32"


def test_success_error_and_skipped_sum_to_the_input(tmp_path, target_folder):
    rows = read_rows(_prompts(tmp_path, 3))
    rows.append({**rows[0], "id": "long", "prompt": "x" * 400})
    rows.append({"id": "tokens", "input_ids": [5, 6, 7], "prompt": None})
    rows.append({"id": "foreign", "input_ids": [5, 100_000], "prompt": None})
    rows.append({"id": "empty", "input_ids": [], "prompt": None})
    rows.append({"id": "blank", "prompt": " \n"})
    prompts = write_rows(tmp_path / "mixed.jsonl", rows)
    out = write_rows(tmp_path / "out.jsonl", [])
    report = _run(target_folder, prompts, out)
    assert [error["id"] for error in report.errors] == ["long", "foreign", "empty", "blank"]
    assert "exceed the context of 256" in report.errors[0]["error"]
    assert (report.num_input, report.num_success, report.num_skipped) == (8, 4, 0)
    assert _by_id(out)["tokens"]["prompt_token_ids"] == [5, 6, 7]
    assert _report(out)["finish_reasons"] == report.finish_reasons
    again = _run(target_folder, prompts, out)
    assert (again.num_success, again.num_skipped, len(again.errors)) == (0, 4, 4)


def test_dropped_answers_are_counted_and_not_decoded_again(done, tmp_path, target_folder):
    prompts, kept_all = done
    cut = {row["id"] for row in read_rows(kept_all) if row["finish_reason"] == "length"}
    out = tmp_path / "whole.jsonl"
    report = _run(target_folder, prompts, out, drop_truncated=True)
    assert set(report.truncated) == cut != set()
    assert (report.num_success, report.is_complete) == (7 - len(cut), True)
    assert cut.isdisjoint(_by_id(out) if out.exists() else ())
    again = _run(target_folder, prompts, out, drop_truncated=True)
    assert (again.num_output_tokens, again.truncated) == (0, report.truncated)
    assert _report(out)["truncated"] == report.truncated
    assert _run(target_folder, prompts, out).num_success == len(cut)
    assert _by_id(out) == _by_id(kept_all)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_report_that_names_dropped_answers_must_be_readable(done, target_folder, content):
    prompts, out = done
    out.with_name(out.name + ".report.json").write_text(content)
    with pytest.raises(UsageError, match="report of --out: "):
        _run(target_folder, prompts, out, drop_truncated=True)


def test_rows_are_on_disk_in_the_round_in_which_they_end(tmp_path, target_folder, monkeypatch):
    out, seen, step = tmp_path / "out.jsonl", [], Engine.step

    def spy(engine):
        seen.append(len(read_rows(out)) if out.exists() else 0)
        outputs = step(engine)
        spy.num_ended += sum(output.finish_reason is not None for output in outputs)
        expected.append(spy.num_ended)
        return outputs

    spy.num_ended, expected = 0, []
    monkeypatch.setattr(Engine, "step", spy)
    _run(target_folder, _prompts(tmp_path), out)
    assert seen[1:] == expected[:-1]
    assert len(set(seen)) > 2


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_resume_after_a_kill_inside_a_line_completes_the_same_rows(
    done, target_folder, cut, monkeypatch
):
    prompts, out = done
    whole = _by_id(out)
    lines = out.read_bytes().splitlines(keepends=True)
    # Five rows and a piece of the sixth.
    out.write_bytes(b"".join(lines[:5]) + lines[5][:-cut])
    report = _run(target_folder, prompts, out)
    assert (report.num_skipped, report.num_success) == (5, 2)
    assert _by_id(out) == whole
    assert len(read_rows(out)) == len(whole)
    assert out.read_bytes().startswith(b"".join(lines[:5]))


def test_finished_run_starts_no_engine_and_keeps_the_file(done, target_folder, monkeypatch):
    prompts, out = done
    content = out.read_bytes()
    monkeypatch.setattr(continuations, "_engine", lambda *_: pytest.fail("engine was started"))
    report = _run(target_folder, prompts, out)
    assert (report.num_success, report.num_skipped) == (0, 7)
    assert out.read_bytes() == content


def test_more_prompts_extend_a_finished_file(done, tmp_path, target_folder):
    _, out = done
    report = _run(target_folder, _prompts(tmp_path, 9), out)
    assert (report.num_skipped, report.num_success) == (7, 2)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"max_tokens": 13}, "max_tokens"), ({"dtype": "bfloat16"}, "dtype")],
)
def test_resume_with_other_settings_names_the_field_and_both_values(
    done, target_folder, options, name
):
    prompts, out = done
    content = out.read_bytes()
    old, new = {"max_tokens": ("12", "13"), "dtype": ("'float32'", "'bfloat16'")}[name]
    with pytest.raises(UsageError, match=f"made with {name} {old}, this run has {new}"):
        _run(target_folder, prompts, out, **options)
    assert out.read_bytes() == content


@pytest.mark.parametrize("change", ["fingerprint", "template"])
def test_resume_with_another_target_or_template_names_the_field(done, tmp_path, change):
    prompts, out = done
    content = out.read_bytes()
    other = make_target(tmp_path / "other", seed=1 if change == "fingerprint" else 0)
    if change == "template":
        template = other / "chat_template.jinja"
        template.write_text(template.read_text().replace("Be brief.", "Be long."))
    with pytest.raises(UsageError, match=f"made with {change} "):
        _run(other, prompts, out)
    assert out.read_bytes() == content


def test_rows_of_other_prompts_are_not_mixed(done, tmp_path, target_folder):
    prompts, out = done
    with pytest.raises(UsageError, match=r"id 'p-[56]' is not in the prompt file"):
        _run(target_folder, _prompts(tmp_path, 5), out)
    with pytest.raises(UsageError, match=r"id 'p-\d' has another prompt here"):
        _run(target_folder, _prompts(tmp_path, 7, prompt="new"), out)
    write_rows(out, [{"id": "p-0"}])
    with pytest.raises(UsageError, match="'p-0' was not written by this command"):
        _run(target_folder, prompts, out)


def test_batch_size_does_not_change_the_answers(done, tmp_path, target_folder):
    prompts, out = done
    other = tmp_path / "one.jsonl"
    _run(target_folder, prompts, other, batch_size=1)
    assert _by_id(other) == _by_id(out)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no prompts"),
        ([{"prompt": "a"}], r"prompts\.jsonl:1: id: need a string"),
        ([{"id": "a"}], r"prompts\.jsonl:1: need `prompt` or `input_ids`"),
        ([{"id": "a", "prompt": ["x"]}], r"prompts\.jsonl:1: prompt: need a string, got list"),
        ([{"id": "a", "prompt": "x"}] * 2, r"prompts\.jsonl:2: duplicate id 'a'"),
        ([{"id": "a", "prompt": "x" * 400}], "0 of 1 prompts are usable"),
        ([{"id": "a", "prompt": ""}], "0 of 1 prompts are usable.*empty prompt"),
    ],
)
def test_bad_prompt_file_is_refused_and_nothing_is_written(tmp_path, target_folder, rows, message):
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    with pytest.raises(UsageError, match=message):
        _run(target_folder, prompts, tmp_path / "out.jsonl")
    assert os.listdir(tmp_path) == ["prompts.jsonl"]


@pytest.mark.parametrize("out", ["prompts.jsonl/x", "/proc/x", "", "prompts.jsonl", "folder"])
def test_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    tmp_path, target_folder, out, monkeypatch
):
    monkeypatch.setattr(TargetModel, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "folder.report.json").mkdir()
    path = tmp_path / out if out else Path(out)
    with pytest.raises(UsageError, match=r"--out.*(cannot be written|also an input)"):
        _run(target_folder, _prompts(tmp_path), path)
    assert sorted(os.listdir(tmp_path)) == ["folder.report.json", "prompts.jsonl"]


@pytest.mark.parametrize(("name", "value"), [("max_tokens", 0), ("batch_size", 0)])
def test_sizes_below_one_are_refused(tmp_path, target_folder, name, value):
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} 0: need at least 1"):
        _run(target_folder, _prompts(tmp_path), tmp_path / "out.jsonl", **{name: value})


def test_truncated_prompt_file_names_file_and_line(tmp_path, target_folder):
    prompts = _prompts(tmp_path)
    prompts.write_bytes(prompts.read_bytes()[:-9])
    with pytest.raises(UsageError, match=r"prompts\.jsonl:7: truncated"):
        _run(target_folder, prompts, tmp_path / "out.jsonl")


_COMMAND = """
import sys
from pathlib import Path
from treespark.data.continuations import run_continuations
target, prompts, out = map(Path, sys.argv[1:])
run_continuations(target, prompts, out, 200, 2, "float32", "cpu")
"""


def _start(tmp_path, target_folder):
    """Start a long run in a process; return it and its output once some rows are written."""
    prompts, out = _prompts(tmp_path, 200), tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, str(target_folder), str(prompts), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline_s = time.monotonic() + 120
    while not (out.exists() and out.stat().st_size):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline_s, "no row within 120 s"
        time.sleep(0.01)
    return process, out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_with_whole_rows_report_and_the_command_to_go_on(
    tmp_path, target_folder, number
):
    process, out = _start(tmp_path, target_folder)
    with process:
        process.send_signal(number)
        stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "stopped; to go on: treespark" in stdout
    rows, report = read_rows(out), _report(out)
    assert 0 < len(rows) == report["num_success"] < 200
    assert not report["is_complete"]


def test_resume_after_sigkill_answers_each_prompt_once(tmp_path, target_folder):
    process, out = _start(tmp_path, target_folder)
    with process:
        process.kill()
    num_whole = out.read_bytes().count(b"\n")
    prompts = _prompts(tmp_path, 200)
    # The 200 prompts hold only what the killed run needs; the rest of the run is cut short here.
    kept = {json.loads(line)["id"] for line in out.read_bytes().splitlines()[:num_whole]}
    rows = [row for row in read_rows(prompts) if row["id"] in kept or row["id"] == "p-199"]
    report = _run(target_folder, write_rows(prompts, rows), out, max_tokens=200, batch_size=2)
    assert report.num_skipped == num_whole
    assert sorted(row["id"] for row in read_rows(out)) == sorted(row["id"] for row in rows)


def test_second_signal_acts_as_usual_and_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        assert stop.exit_code == 130
        assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGINT) is before


def test_stop_request_outside_the_main_thread_stays_false():
    results = []

    def enter():
        with StopRequest() as stop:
            results.append(bool(stop))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert results == [False]


def test_progress_names_tokens_per_second(tmp_path, target_folder, capsys):
    _run(target_folder, _prompts(tmp_path), tmp_path / "out.jsonl")
    captured = capsys.readouterr()
    assert re.search(r"\d+ tok/s", captured.err)
    assert "tokens/s" in captured.out
