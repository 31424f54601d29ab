# SPDX-License-Identifier: Apache-2.0
"""The verbs of serving: vLLM's flag names reach the call; contradictions are refused in a line."""

import logging
import sys
from pathlib import Path

import pytest

from treespark import cli
from treespark.bench import load
from treespark.errors import UsageError
from treespark.serving import serve, workers


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command with a stand-in for a function; returns its argument, or the error."""

    def call(module, function, *args):
        got = []
        monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
        monkeypatch.setattr(module, function, lambda *given: got.append(given[0]))
        monkeypatch.setattr(sys, "argv", ["treespark", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        errors = capsys.readouterr().err
        assert (stopped.value.code == 0) == bool(got), errors
        assert got or errors.count("\n") == 1
        return got[0] if got else errors

    return call


def test_serve_takes_vllms_flags(call):
    options = call(
        serve, "run_serve", "serve", "target", "--drafter", "d", "--budget", 16, "--host", "::1",
        "--port", 9, "--api-key", "a", "--api-key", "b", "--served-model-name", "m", "--dtype",
        "bfloat16", "--max-model-len", 64, "--max-num-seqs", 6, "--max-num-queued-reqs", 7,
        "--stream-interval", 8, "--shutdown-timeout", 9, "--override-generation-config",
        '{"temperature": 0.5}', "--per-request-spec-decode-metrics", "none", "--seed", 3,
        "--metrics-compat", "none", "--speculation", "auto", "--enable-prefix-caching",
    )  # fmt: skip
    assert options == serve.ServeOptions(
        Path("target"), Path("d"), {"budget": 16}, "::1", 9, ("a", "b"), ("m",), "bfloat16", None,
        64, 6, 7, "auto", 3, 8, 9.0, {"temperature": 0.5}, False, False, True,
    )  # fmt: skip


def test_the_drafter_can_come_as_vllms_json(call):
    config = '{"method": "treespark", "model": "d", "num_speculative_tokens": 5, "tree_top_k": 2}'
    options = call(serve, "run_serve", "serve", "t", "--speculative-config", config)
    assert (options.drafter, options.policy) == (Path("d"), {"depth": 5, "branching": 2})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--drafter: missing"),
        (["--no-drafter", "--budget", "8"], "--budget 8: shapes the draft tree"),
        (["--drafter", "d", "--speculative-config", '{"model": "e"}'], "contradicts --drafter"),
        (["--speculative-config", '{"model": 1}'], "model 1: need a folder"),
        (["--speculative-config", '{"model": "d", "method": "eagle"}'], "allowed: treespark"),
        (["--speculative-config", '{"model": "d", "tree_budget": true}'], "need a whole number"),
        (["--speculative-config", '{"topk": 4}'], "topk: allowed: method, model"),
        (["--no-drafter", "--override-generation-config", '{"seed": 1}'], "seed: allowed"),
        (
            ["--no-drafter", "--override-generation-config", '{"top_k": 1.5}'],
            "top_k 1.5: need a whole",
        ),
    ],
)
def test_speculation_that_cannot_be_meant_is_refused(call, flags, words):
    assert words in call(serve, "run_serve", "serve", "t", *flags)


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({"drafter": Path("d")}, "auto"),
        ({"drafter": Path("d"), "policy": {"depth": 3}}, "auto"),
        ({"drafter": Path("d"), "policy": {"budget": 8}}, None),
        ({"drafter": Path("d"), "policy": {"budget": 8}, "speculation": "auto"}, "auto"),
        ({"drafter": Path("d"), "speculation": "15"}, "15"),
        ({"drafter": Path("d"), "speculation": "off"}, "off"),
        ({}, None),
    ],
)
def test_a_server_chooses_its_budget_unless_it_is_told(given, mode):
    assert serve.speculation_mode(serve.ServeOptions(Path("t"), **given)) == mode


@pytest.mark.parametrize("mode", ["off", "chain", "15"])
def test_two_budgets_are_refused(mode):
    options = serve.ServeOptions(Path("t"), Path("d"), {"budget": 8}, speculation=mode)
    with pytest.raises(UsageError, match=f"--speculation {mode}: contradicts --budget 8"):
        serve.run_serve(options)


def test_keys_come_from_a_file_too(call, tmp_path):
    path = tmp_path / "keys"
    path.write_text("first\nsecond\n")
    options = call(
        serve, "run_serve", "serve", "t", "--no-drafter", "--api-key-file", path, "--api-key", "x"
    )
    assert options.api_keys == ("x", "first", "second")


def test_workers_pass_on_what_serve_takes(call):
    options = call(
        workers, "run_workers", "workers", "t", "--drafter", "d", "--workers", 2, "--slots", 6,
        "--router", "none", "--dtype", "bfloat16", "--no-drafter", "--dry-run",
    )  # fmt: skip
    assert options.serve_args == ("t", "--drafter", "d", "--dtype", "bfloat16", "--no-drafter")
    assert (options.workers, options.slots, options.router) == (2, 6, "none")
    assert options.dry_run


def test_workers_over_other_hosts_need_no_target(call):
    urls = ["--worker-url", "http://a:1", "--worker-url", "http://b:1"]
    options = call(workers, "run_workers", "workers", *urls)
    assert options.serve_args == ()
    assert options.worker_url == ("http://a:1", "http://b:1")


def test_bench_serve_takes_vllms_flags(call):
    options = call(
        load, "run_load", "bench", "serve", "--base-url", "http://h:1", "--dataset-path", "p",
        "--backend", "openai", "--num-prompts", 9, "--max-concurrency", 3, "--request-rate", "2.5",
        "--custom-output-len", 7, "--percentile-metrics", "ttft", "--save-result", "--result-dir",
        "r", "--ignore-eos", "--burstiness", "0.5",
    )  # fmt: skip
    assert options == load.LoadOptions(
        "http://h:1", Path("p"), backend="openai", num_prompts=9, max_concurrency=3,
        request_rate=2.5, output_len=7, percentile_metrics="ttft", save_result=True,
        result_dir=Path("r"), ignore_eos=True, burstiness=0.5,
    )  # fmt: skip
