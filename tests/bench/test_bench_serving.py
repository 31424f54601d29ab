# SPDX-License-Identifier: Apache-2.0
"""The tools that measure a server: what they add up, how they go on, what they call a failure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.bench_world import text_target, write_drafter, write_prompts
from tools.bench_serving import all_cells, mixed_prompts, mode_flags, phase_growth
from tools.lossless_http import Load, compare, parse_load
from tools.soak_serving import growth, problems
from treespark.bench.cells import Cells
from treespark.bench.plot import grouped_bars
from treespark.bench.serving_table import markdown, summarize_cells
from treespark.errors import UsageError

ROOT = Path(__file__).parent.parent.parent
PHASES = ("prefill", "draft", "expand", "verify", "commit", "host")


def load_cell(mode, repeat, speed, **fields):
    cell = {
        "part": "servers", "mode": mode, "concurrency": 12, "repeat": repeat,
        "output_throughput": speed, "per_request_throughput": speed / 12, "median_ttft_ms": 100.0,
        "mean_tpot_ms": 30.0, "acceptance_length": 2.0, "duration": 10.0, "failed": 0,
    }  # fmt: skip
    return cell | fields


def stall_cell(repeat, extra):
    keys = ("quiet_gap_ms", "worst_gap_ms", "chunk_ms")
    cell = {"part": "stall", "mode": "off", "concurrency": 1, "repeat": repeat}
    return cell | dict.fromkeys(keys, 50.0) | {"extra_chunks": extra}


# ------------------------------------------------------------------ throughput


def test_ratios_are_taken_inside_a_repeat():
    # The second repeat met a machine half as fast.
    speeds = {"off": (100.0, 50.0), "chain": (120.0, 60.0), "tree-8": (150.0, 78.0)}
    cells = [load_cell(m, r, speed) for m, both in speeds.items() for r, speed in enumerate(both)]
    cells.append(load_cell("hf-generate", 0, 70.0))
    summary = summarize_cells(cells)
    speeds = summary["loads"]["C=12"]["tree-8"]["output_throughput"]
    assert speeds == {"median": 114.0, "min": 78.0, "max": 150.0}
    ratios = summary["ratios"]["C=12"]
    assert ratios.keys() == {"chain / off", "tree-8 / off", "tree-8 / chain"}
    assert ratios["tree-8 / chain"] == {"median": 1.275, "min": 1.25, "max": 1.3}


def test_the_share_outside_the_forwards_counts_what_no_phase_has():
    seconds = dict(zip(PHASES, (1.0, 1.0, 0.5, 6.0, 0.25, 0.25), strict=True))
    timed = load_cell("tree-8", 0, 100.0, phase_s=seconds, num_timed_rounds=100)
    shares = summarize_cells([timed])["rounds"]["C=12"]["tree-8"]
    assert shares["ms_per_round"]["verify"] == pytest.approx(60)
    # 10 s of measurement hold 9 s of phases.
    assert shares["ms_per_round"]["between"] == pytest.approx(10)
    assert shares["outside_share"] == pytest.approx((0.25 + 0.25 + 1) / 9)
    assert shares["outside_share_with_expand"] == pytest.approx(2 / 9)
    assert summarize_cells([load_cell("off", 0, 1.0)])["rounds"] == {"C=12": {}}


def test_the_page_shows_every_mode_load_and_failure(tmp_path):
    seconds = dict.fromkeys(PHASES, 1.0)
    cells = [load_cell("off", 0, 100.0), load_cell("off", 1, 90.0, failed=2, part="workers",
             workers=3, concurrency=36), stall_cell(0, 0.8), stall_cell(1, 0.9),
             load_cell("tree-8", 0, 1.0, phase_s=seconds, num_timed_rounds=10)]  # fmt: skip
    summary = summarize_cells(cells)
    page = markdown({"dtype": "bfloat16"}, summary)
    assert "| mode | C=12 | C=36, 3 workers |" in page
    assert "| off | 100.0 | 90.0 |" in page
    assert "| off | 50.0 | 50.0 | 50.0 | 0.85 (0.80..0.90) |" in page
    assert "| tree-8, C=12 | 100.0 |" in page
    assert "Requests that failed: 2." in page
    pytest.importorskip("matplotlib")
    rows = {"off": [{"median": 2.0, "min": 1.0, "max": 3.0}, None]}
    grouped_bars(tmp_path / "plot.svg", ["C=1", "C=6"], rows, "speed", "title")
    assert "C=6" in (tmp_path / "plot.svg").read_text() or (tmp_path / "plot.svg").stat().st_size


def test_modes_take_turns_and_every_cell_comes_once():
    cells = all_cells(["servers", "workers", "peer"], ["off", "chain", "8"], [1, 6], 36, 3)
    assert len({cell.id for cell in cells}) == len(cells) == 3 * (3 * 2 + 3 + 2)
    firsts = [cell.mode for cell in cells if cell.part == "workers"][::3]
    assert firsts == ["off", "chain", "8"]
    assert {c.concurrency for c in cells if c.part == "workers"} == {36}
    assert mode_flags("chain") == ("--speculation", "chain")
    assert mode_flags("auto") == ("--speculation", "auto")
    assert mode_flags("8") == ("--budget", "8")


def test_prompts_of_several_files_take_turns(tmp_path):
    one, two = write_prompts(tmp_path / "one.jsonl"), write_prompts(tmp_path / "two.jsonl")
    rows = mixed_prompts([one, two], tmp_path).read_text().splitlines()
    assert [json.loads(row)["id"] for row in rows[:4]] == ["one-0", "two-0", "one-1", "two-1"]


def test_phases_are_differences_of_two_pages():
    before = {"round_seconds_total.verify": 2.0, "timed_rounds_total": 5.0, "free_slots": 1.0}
    after = {"round_seconds_total.verify": 3.5, "timed_rounds_total": 9.0, "free_slots": 2.0}
    assert phase_growth(before, after) == {"phase_s": {"verify": 1.5}, "num_timed_rounds": 4.0}


def test_a_measurement_goes_on_and_does_not_mix_settings(tmp_path):
    path = tmp_path / "cells.jsonl"
    with Cells(path, {"max_tokens": 64}) as cells:
        cells.add({"id": "a", "value": 1})
        with pytest.raises(UsageError, match="another process"):
            Cells(path, {"max_tokens": 64})
    # A kill in the middle of a row.
    path.write_text(path.read_text() + '{"id": "b", "val')
    with Cells(path, {"max_tokens": 64}) as cells:
        assert "a" in cells
        assert "b" not in cells
        assert cells["a"]["value"] == 1
        cells.add({"id": "b", "value": 2})
    assert [json.loads(row)["id"] for row in path.read_text().splitlines()] == ["setting", "a", "b"]
    with pytest.raises(UsageError, match="measured with another max_tokens"):
        Cells(path, {"max_tokens": 65})


# ------------------------------------------------------------------ soak


def test_growth_compares_tenths_behind_the_warm_up():
    samples = [(float(i), 500.0 if i < 100 else 100.0 + (i - 100) * 0.1) for i in range(200)]
    # Medians of the first and the last ten of a hundred: 100.45 and 109.45.
    assert growth(samples, 100) == pytest.approx(109.45 / 100.45 - 1)
    assert growth([(float(i), 7.0) for i in range(50)], 10) == 0
    with pytest.raises(UsageError, match="5 samples"):
        growth(samples, 195)


STATE = {"num_requests_running": 0, "num_requests_waiting": 0, "free_slots": 12, "ended": 99}
COUNTS = {"finished": 95, "aborted": 5, "failed": 0}


@pytest.mark.parametrize(
    ("rise", "counts", "state", "words"),
    [
        (0.0199, {}, {}, None),
        (0.02, {}, {}, "grew by 2.0%"),
        (0.0, {"failed": 1, "finished": 94}, {}, "1 requests failed"),
        (0.0, {}, {"free_slots": 11}, "free_slots is 11 in the end, expected 12"),
        (0.0, {}, {"num_requests_running": 1}, "num_requests_running is 1"),
        (0.0, {}, {"ended": 94}, "counts 94 ended requests"),
        (0.0, {}, {"ended": 101}, "counts 101 ended requests"),
    ],
)
def test_a_soak_fails_of_memory_failures_and_lost_slots(rise, counts, state, words):
    found = problems(rise, COUNTS | counts, STATE | state, 12)
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


# ------------------------------------------------------------------ losslessness by HTTP


def test_a_token_that_differs_is_found_with_its_place(tmp_path):
    prompts = {"p": [1], "q": [2]}
    with Cells(tmp_path / "answers.jsonl", {}) as cells:
        for name, ids in (("alone/p", [5, 6, 7]), ("alone/q", [8, 9]),
                          ("12/p", [5, 6, 8]), ("12/q", [8, 9]),
                          ("2x3/p", [5, 6, 7]), ("2x3/q", [8])):  # fmt: skip
            cells.add({"id": name, "token_ids": ids})
        result = compare([Load(12), Load(3, 2)], prompts, cells)
    assert result["12"] == {"equal": 1, "of": 2, "different": [{"prompt": "p", "position": 2}]}
    assert result["2x3"]["different"] == [{"prompt": "q", "position": 1}]


def test_loads_are_slots_or_servers_times_slots():
    assert parse_load("12") == Load(12)
    assert parse_load("3x12") == Load(12, 3)
    assert parse_load("3x12").label == "3x12"
    for text in ("", "0", "x12", "3x", "1x2x3", "twelve"):
        with pytest.raises(UsageError, match="--loads"):
            parse_load(text)


# ------------------------------------------------------------------ whole runs


def run_tool(name, folder, *options):
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), str(text_target().path)]
    command += ["--drafter", str(write_drafter(folder / "drafter")), "--out", str(folder / "out")]
    prompts = write_prompts(folder / "prompts.jsonl")
    done = subprocess.run(
        [*command, "--prompts", str(prompts), "--threads", "1", *options],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    return done, folder / "out"


@pytest.mark.slow
@pytest.mark.multi
def test_the_bench_measures_a_small_server_and_goes_on(tmp_path):
    options = ["--modes", "off,8", "--concurrency", "1,2", "--slots", "2", "--repeats", "2",
               "--max-tokens", "12", "--min-prompts", "2", "--max-model-len", "200",
               "--dtype", "float32"]  # fmt: skip
    done, out = run_tool("bench_serving", tmp_path, *options, "--parts", "peer")
    assert done.returncode == 0, done.stderr
    done, out = run_tool("bench_serving", tmp_path, *options, "--parts", "servers,peer")
    assert done.returncode == 0, done.stderr
    assert "9 of 12" not in done.stderr
    result = json.loads((out / "bench.json").read_text())
    assert result["summary"]["failed"] == 0
    assert result["summary"]["loads"]["C=2"].keys() == {"off", "tree-8", "hf-generate"}
    assert result["summary"]["rounds"]["C=2"]["tree-8"]["num_rounds"] > 0
    assert (out / "bench.svg").exists()


@pytest.mark.slow
@pytest.mark.multi
def test_a_short_soak_of_a_small_server_passes(tmp_path):
    done, out = run_tool(
        "soak_serving", tmp_path, "--minutes", "1.3", "--warmup-minutes", "0.9",
        "--concurrency", "4", "--max-tokens", "40", "--abort-rate", "0.2",
        "--max-model-len", "250", "--dtype", "float32",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "soak.json").read_text())
    assert result["problems"] == []
    assert result["counts"]["aborted"] > 0


@pytest.mark.slow
@pytest.mark.multi
def test_answers_under_load_by_http_are_those_alone(tmp_path):
    options = ["--num-prompts", "3", "--max-tokens", "40", "--max-prompt-tokens", "200",
               "--loads", "2"]  # fmt: skip
    done, out = run_tool("lossless_http", tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "2: 3 of 3 answers equal, token by token\n"
    rows = (out / "answers.jsonl").read_text().splitlines()
    assert len(rows) == 7
    # One wrong token is a failure, and nothing is decoded again.
    changed = json.loads(rows[-1])
    changed["token_ids"][5] += 1
    (out / "answers.jsonl").write_text("\n".join([*rows[:-1], json.dumps(changed)]) + "\n")
    done, out = run_tool("lossless_http", tmp_path, *options)
    assert done.returncode == 1
    assert "parts at output token 5" in done.stdout
