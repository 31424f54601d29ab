# SPDX-License-Identifier: Apache-2.0
"""Records of an evaluation: written cell by cell, whole after a kill at any write."""

import dataclasses
import json
import os
import signal

import pytest

from treespark.bench.suite_records import (
    CELLS,
    REQUESTS,
    ROUNDS,
    TRACES,
    CellKey,
    CellRow,
    DatasetRow,
    MethodRow,
    RequestRow,
    RoundRow,
    SuiteRun,
    SuiteSetting,
    TraceRow,
    read_setting,
)
from treespark.bench.suite_records import (
    SETTING as SETTING_FILE,
)
from treespark.bench.suite_writer import SuiteWriter, write_setting
from treespark.errors import UsageError

SETTING = SuiteSetting(
    command=["treespark"],
    time="2026-01-01T00:00:00+00:00",
    versions={"treespark": "0"},
    recipe={"max_tokens": 4},
    target={"path": "t"},
    drafters={"d": {"path": "d"}},
    datasets=[
        DatasetRow(
            name="gsm8k",
            title="GSM8K",
            group="general",
            source="gsm8k.jsonl",
            pool_size=2,
            subset_size=2,
            subset_sha256="0",
        )
    ],
    methods=[MethodRow(name="treespark", title="TreeSpark", kind="tree", options={"alpha": 0.5})],
    concurrencies=[1],
    repeats=3,
    max_tokens=4,
    seed=0,
    dtype="float32",
    device="cpu",
    threads=1,
)
KEYS = [CellKey("gsm8k", "treespark", 1, repeat) for repeat in range(3)]


def _cell(key):
    """A cell with two requests of two rounds."""
    requests = [
        RequestRow(
            **key._asdict(),
            prompt_id=f"gsm8k-{i}",
            num_prompt_tokens=3,
            num_output_tokens=4,
            num_prefill_tokens=1,
            num_rounds=2,
            finish_reason="length",
            plain_decoding=None,
            arrival_s=0.0,
            admitted_s=0.1,
            first_token_s=0.2,
            finished_s=0.3,
            ids_sha256="0",
        )
        for i in range(2)
    ]
    rounds = [
        RoundRow(
            **key._asdict(),
            prompt_id=row.prompt_id,
            round=number,
            num_committed=committed,
            num_accepted=committed - 1,
            num_proposed=8,
            proposed_depth=5,
        )
        for row in requests
        for number, committed in enumerate((2, 1))
    ]
    cell = CellRow(**key._asdict(), wall_s=1.5, num_requests=2, num_output_tokens=8, num_rounds=4)
    return cell, requests, rounds


def _trace(prompt_id, num_rounds):
    return [
        TraceRow(
            dataset="gsm8k",
            method="treespark",
            prompt_id=prompt_id,
            round=number,
            num_rounds=num_rounds,
            prefix_text="a",
            tokens=[1, 2],
            texts=["a", "b"],
            parents=[-1, 0],
            depths=[0, 1],
            scores=[0.0, -0.5],
            accepted=[0, 1],
            wanted=[2, 3],
            wanted_texts=["b", "c"],
            reason="not in top-k",
            num_committed=2,
            chain_committed=2,
        )
        for number in range(num_rounds)
    ]


def _write_all(folder):
    """Write whatever is missing of three cells and two traces."""
    write_setting(folder, SETTING)
    with SuiteWriter(folder) as writer:
        for key in KEYS:
            if key not in writer.finished:
                writer.add_cell(*_cell(key))
        for prompt_id in ("gsm8k-0", "gsm8k-1"):
            rows = _trace(prompt_id, 3)
            if rows[0].key not in writer.traced:
                writer.add_trace(rows)


def _contents(folder):
    return {name: (folder / name).read_bytes() for name in (CELLS, REQUESTS, ROUNDS, TRACES)}


def test_what_is_written_is_read_again(tmp_path):
    _write_all(tmp_path)
    run = SuiteRun(tmp_path)
    assert run.setting == SETTING
    assert [cell.key for cell in run.cells] == KEYS
    assert run.finished == frozenset(KEYS)
    cell, requests, rounds = _cell(KEYS[1])
    assert dataclasses.replace(run.cells[1], file_sizes={}) == cell
    assert [row for row in run.requests() if row.key == KEYS[1]] == requests
    assert [row for row in run.rounds() if row.key == KEYS[1]] == rounds
    assert run.traces() == [_trace("gsm8k-0", 3), _trace("gsm8k-1", 3)]


def _killed_at(folder, point):
    """Write in a fork that is killed in the middle of its n-th write; return whether it was."""
    child = os.fork()
    if child == 0:
        left = point
        flush = os.fsync

        def fsync(descriptor):
            nonlocal left
            left -= 1
            if left == 0:
                # Part of what the last write added is on the disk, in the middle of a line.
                os.ftruncate(descriptor, max(os.fstat(descriptor).st_size - 20, 0))
                os.kill(os.getpid(), signal.SIGKILL)
            flush(descriptor)

        os.fsync = fsync
        _write_all(folder)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_after_a_kill_at_any_write_nothing_finished_is_lost_and_the_rest_follows(tmp_path):
    _write_all(tmp_path / "whole")
    expected = _contents(tmp_path / "whole")
    point, num_finished = 1, []
    while _killed_at(folder := tmp_path / str(point), point):
        if (folder / "suite.json").exists():
            run = SuiteRun(folder)
            num_finished.append(len(run.cells))
            assert len(list(run.requests())) == 2 * len(run.cells)
            assert len(list(run.rounds())) == 4 * len(run.cells)
            assert all(len(trace) == 3 for trace in run.traces())
        _write_all(folder)
        assert _contents(folder) == expected
        point += 1
    # Setting, three files a cell, two traces.
    assert point == 1 + 1 + 3 * 3 + 2
    assert num_finished == sorted(num_finished)
    assert num_finished[-1] == 3


def test_a_second_writer_is_refused(tmp_path):
    with SuiteWriter(tmp_path), pytest.raises(UsageError, match="another process is writing"):
        SuiteWriter(tmp_path)


def test_a_file_that_lost_rows_is_refused(tmp_path):
    _write_all(tmp_path)
    path = tmp_path / ROUNDS
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UsageError, match=r"rounds\.jsonl: shorter than \d+ bytes"):
        SuiteWriter(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"round"', '"rund"'), r"rounds\.jsonl:1: unknown key 'rund'"),
        (('"round": 0, ', ""), r"rounds\.jsonl:1: missing key 'round'"),
        (('{"dataset"', '"dataset"'), r"rounds\.jsonl:1: malformed JSON"),
        (('"round": 0', '"round": "0"'), r"rounds\.jsonl:1: round: '0' is not allowed: .*integer"),
        (('"round": 0', '"round": true'), r"rounds\.jsonl:1: round: True is not allowed"),
    ],
)
def test_a_row_of_another_shape_is_named(tmp_path, change, message):
    _write_all(tmp_path)
    path = tmp_path / ROUNDS
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(UsageError, match=message):
        list(SuiteRun(tmp_path).rounds())


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"suite\.json: cannot be read: No such file"):
        SuiteRun(tmp_path)
    (tmp_path / "suite.json").write_text("{}")
    with pytest.raises(UsageError, match="not the setting of a suite: key 'baseline'"):
        read_setting(tmp_path)


def _set(name, value):
    def change(setting):
        setting[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("datasets", None), "suite.json: datasets: None is not allowed: need a list"),
        (_set("methods", ["x"]), "suite.json: methods: need an object, got str"),
        (_set("target", None), "suite.json: target: None is not allowed"),
        (_set("drafters", {"d": "x"}), r"suite.json: drafters.d: 'x' is not allowed"),
        (_set("concurrencies", "1"), "suite.json: concurrencies: '1' is not allowed"),
        (_set("repeats", "3"), "suite.json: repeats: '3' is not allowed"),
        (_set("versions", None), "suite.json: versions: None is not allowed"),
        (lambda setting: setting["methods"][0].update(depth="x"), "methods: depth: 'x'"),
        # Of these, cells are there.
        (_set("repeats", 2), "cells.jsonl: a cell of repeat 2, which suite.json lacks"),
        (_set("concurrencies", [2]), "a cell of concurrency 1, which suite.json lacks"),
        (_set("methods", []), "a cell of method 'treespark', which suite.json lacks"),
    ],
)
def test_a_setting_that_is_none_or_of_other_cells_is_named(tmp_path, change, message):
    _write_all(tmp_path)
    path = tmp_path / SETTING_FILE
    setting = json.loads(path.read_text())
    change(setting)
    path.write_text(json.dumps(setting))
    with pytest.raises(UsageError, match=message):
        SuiteRun(tmp_path)


def _lines(change):
    return lambda data: b"".join(change(data.splitlines(keepends=True)))


_CHANGES = {
    "last row lost": _lines(lambda rows: rows[:-1]),
    "row lost": _lines(lambda rows: [*rows[:1], *rows[2:]]),
    "row there twice": _lines(lambda rows: [*rows[:2], *rows[1:]]),
    "all lost": lambda data: b"",
    "torn": lambda data: data[:-9],
}


@pytest.mark.parametrize("name", [REQUESTS, ROUNDS])
@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES.keys())
def test_no_number_is_made_of_rows_that_are_missing_or_there_twice(tmp_path, name, change):
    _write_all(tmp_path)
    path = tmp_path / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UsageError, match=rf"{name}: \d rows of the cell .* the file was changed"):
        list(SuiteRun(tmp_path).rounds())


def test_a_cell_that_is_there_twice_is_refused(tmp_path):
    _write_all(tmp_path)
    path = tmp_path / CELLS
    path.write_bytes(_CHANGES["row there twice"](path.read_bytes()))
    for use in (SuiteRun, SuiteWriter):
        with pytest.raises(UsageError, match=r"the cell .* is there 2 times"):
            use(tmp_path)


_FOREIGN = _lines(lambda rows: [*rows[:1], b'{"mine": 1}\n', *rows[1:]])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (CELLS, lambda data: b"", "rows of finished or of several cells"),
        (CELLS, _lines(lambda rows: rows[:1]), "rows of finished or of several cells"),
        (REQUESTS, _CHANGES["row there twice"], "rows of finished or of several cells"),
        (ROUNDS, _FOREIGN, r"no row ends at byte \d+"),
        (ROUNDS, lambda data: data + b'{"mine": 1}\n', "unknown key 'mine'"),
    ],
)
def test_a_writer_cuts_off_nothing_that_no_kill_leaves(tmp_path, name, change, message):
    _write_all(tmp_path)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    before = _contents(tmp_path)
    for _ in range(2):
        # Twice, as a refused writer must not keep its lock either.
        with pytest.raises(UsageError, match=message):
            SuiteWriter(tmp_path)
    assert _contents(tmp_path) == before
