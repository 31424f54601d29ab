# SPDX-License-Identifier: Apache-2.0
"""tools/bench_ops.py: nothing is timed before everything is right, and models are called so."""

import json
import sys

import pytest
import torch

from tools import bench_ops

CPU = torch.device("cpu")


@pytest.fixture
def small_cases(monkeypatch):
    """The gate's cases in place of the paper's, which take seconds."""
    monkeypatch.setattr(bench_ops, "CASES", bench_ops.GATES)


@pytest.mark.parametrize("case", bench_ops.GATES, ids=lambda case: f"{case.op}, {case.title}")
def test_gate_is_open(case):
    assert bench_ops.difference(case, CPU) is None


def test_wrong_result_ends_the_tool_before_any_timing(monkeypatch, small_cases, capsys):
    right = bench_ops.call
    monkeypatch.setattr(bench_ops, "call", lambda *a: tuple(result + 1 for result in right(*a)))
    monkeypatch.setattr(bench_ops, "measure", lambda *_: pytest.fail("timed"))
    monkeypatch.setattr(sys, "argv", ["bench_ops.py", "--device", "cpu"])
    assert bench_ops.main() == 1
    assert "result 0 is not the reference's" in " ".join(capsys.readouterr().out.split())


def test_result_has_measured_and_modelled_times_apart(small_cases, tmp_path, monkeypatch, capsys):
    arguments = ["bench_ops.py", "--device", "cpu", "--repeats", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert bench_ops.main() == 0
    out = capsys.readouterr().out
    assert "MODELLED, not measured" in out
    result = json.loads((tmp_path / "ops.json").read_text())
    assert len(result["measured"]) == len(result["modelled"]) == len(bench_ops.GATES)
    assert {row["device"] for row in result["measured"]} == {"cpu"}
    assert all(row["min_s"] <= row["median_s"] <= row["max_s"] for row in result["measured"])
    assert set(result["modelled"][0]["modelled"]) == {"910B1", "910B2", "910B3", "910B4"}
    assert (tmp_path / "ops.svg").stat().st_size > 1000


def test_paper_shapes_are_timed():
    titles = {(case.op, case.title) for case in bench_ops.CASES}
    assert ("markov_topk", "48 rows, V 151936, r 256") in titles
    assert ("tree_attention", "B 12, Q 33, 32/8 x 128, prefix 4096") in titles
    assert ("pack_tree", "B 12, 100 candidates, 32 kept") in titles


def test_wrong_option_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_ops.py", "--repeats", "0"])
    assert bench_ops.main() == 2
    assert capsys.readouterr().err == "error: --repeats 0: need at least 1\n"
