# SPDX-License-Identifier: Apache-2.0
"""The paper's workloads: which prompts are taken, and that they are rendered as for training."""

import json
import sys
import types
from pathlib import Path

import pytest

import treespark
from tests.data.tiny import make_tokenizer
from treespark.bench import workloads
from treespark.bench.workloads import HUB, WORKLOADS, select, subset_sha256
from treespark.data import continuation_rows
from treespark.errors import UsageError
from treespark.target import template

# The paper's table of prompts (algorithms 6).
COUNTS = {
    "gsm8k": 500,
    "math500": 500,
    "aime25": 30,
    "humaneval": 164,
    "mbpp": 256,
    "livecodebench": 500,
    "mt-bench": 80,
    "alpaca": 500,
    "arena-hard-v2": 500,
}
DOMAINS = {
    "writing-academic": 167,
    "writing-advertising": 128,
    "writing-education": 111,
    "writing-finance": 210,
    "writing-literature": 183,
    "writing-politics": 201,
}
SEED = 5


@pytest.fixture
def write(tmp_path):
    """Write rows to a JSONL file of the data folder; returns the folder."""

    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path

    return write


def _turns(number):
    return [{"turns": [f"question {i}", "later"]} for i in range(number)]


def _ids(text):
    return template.render_prompt(make_tokenizer(), text)


def _select(name, source, **options):
    return select(WORKLOADS[name], source, make_tokenizer(), seed=SEED, **options)


def test_the_workloads_are_the_papers():
    counts = {name: workload.count for name, workload in WORKLOADS.items()}
    assert counts == COUNTS | DOMAINS
    assert sum(COUNTS.values()) == 3030
    assert sum(DOMAINS.values()) == 1000
    groups = {name: workload.group for name, workload in WORKLOADS.items()}
    assert groups == dict.fromkeys(COUNTS, "general") | dict.fromkeys(DOMAINS, "writing")


def test_a_pool_of_the_asked_size_is_taken_as_it_stands(write):
    folder = write("gsm8k.jsonl", _turns(4))
    chosen = _select("gsm8k", folder, count=4)
    assert [p.token_ids for p in chosen.prompts] == [_ids(f"question {i}") for i in range(4)]
    assert [p.name for p in chosen.prompts] == [f"gsm8k-{i}" for i in range(1, 5)]
    assert {p.file for p in chosen.prompts} == {"gsm8k"}


def test_of_a_larger_pool_a_seed_chooses_and_always_the_same(write):
    folder = write("gsm8k.jsonl", _turns(30))
    first, again = (_select("gsm8k", folder, count=10) for _ in range(2))
    assert first == again
    names = [p.name for p in first.prompts]
    assert len(set(names)) == 10
    assert names != [f"gsm8k-{i}" for i in range(1, 11)]
    other = select(WORKLOADS["gsm8k"], folder, make_tokenizer(), seed=SEED + 1, count=10)
    assert [p.name for p in other.prompts] != names
    assert other.row.subset_sha256 != first.row.subset_sha256
    assert (first.row.pool_size, first.row.subset_size) == (30, 10)


def test_the_hash_is_that_of_the_prompts_in_their_order(write):
    folder = write("aime25.jsonl", _turns(2))
    assert _select("aime25", folder, count=2).row.subset_sha256 == subset_sha256(
        ["question 0", "question 1"]
    )
    assert subset_sha256(["a", "b"]) != subset_sha256(["b", "a"])
    # Pinned, by sha256sum of the line {"prompt": "a"}: earlier records stay comparable.
    assert subset_sha256(["a"]) == (
        "8a8c2da9cd6156c411e04714ce81cde2425df195083077b23550021445caf826"
    )


def test_prompts_are_never_cut_and_long_ones_only_left_out_when_asked(write):
    folder = write("mbpp.jsonl", [{"turns": ["x" * n]} for n in (5, 400, 6)])
    every = _select("mbpp", folder, count=3)
    assert [p.token_ids for p in every.prompts] == [_ids("x" * n) for n in (5, 400, 6)]
    limit = len(_ids("x" * 6))
    short = _select("mbpp", folder, count=2, max_prompt_tokens=limit)
    assert [p.name for p in short.prompts] == ["mbpp-1", "mbpp-3"]
    assert (short.row.pool_size, short.row.num_too_long) == (3, 1)
    with pytest.raises(UsageError, match="has 2 usable prompts, 1 longer than max_prompt_tokens"):
        _select("mbpp", folder, count=3, max_prompt_tokens=limit)


def test_a_writing_domain_takes_its_own_rows_by_either_name(write):
    rows = [
        {"turns": ["a"], "domain": "Literature & Arts"},
        {"query": "b", "domain1": "Literature & Art", "index": 7},
        {"turns": ["c"], "domain": "Education"},
    ]
    folder = write("writingbench.jsonl", rows)
    chosen = _select("writing-literature", folder, count=2)
    assert [p.token_ids for p in chosen.prompts] == [_ids("a"), _ids("b")]


def test_a_file_without_the_domain_is_named_with_it(write):
    folder = write("writingbench.jsonl", [{"turns": ["a"], "domain": "Education"}])
    with pytest.raises(UsageError, match=r"has 0 usable prompts of domain Finance; give another"):
        _select("writing-finance", folder, count=1)


def test_a_file_by_name_is_read_in_place_of_the_folders(write):
    folder = write("mine.jsonl", [{"prompt": "a"}])
    chosen = _select("gsm8k", folder / "mine.jsonl", count=1)
    assert chosen.prompts[0].token_ids == _ids("a")
    assert chosen.row.source == str(folder / "mine.jsonl")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"turns": []}], r"gsm8k\.jsonl:1: no user turn, or an empty one"),
        ([{"turns": ["a"]}, {"turns": [" "]}], r"gsm8k\.jsonl:2: no user turn, or an empty one"),
        ([{"question": "a"}], r"gsm8k\.jsonl:1: no prompt among the keys"),
        ([{"input_ids": [1]}], r"gsm8k\.jsonl:1: input_ids: a prompt has to be text here"),
        ([], r"has 0 usable prompts; give another `file` or `data`$"),
    ],
)
def test_a_bad_row_is_named(write, rows, message):
    folder = write("gsm8k.jsonl", rows)
    with pytest.raises(UsageError, match=message):
        _select("gsm8k", folder, count=1)


def test_hub_rows_become_the_prompts_of_the_released_files(monkeypatch):
    tables = {
        "openai/gsm8k": [{"question": "1 {+} 1?", "answer": "2"}],
        "openai/openai_humaneval": [{"prompt": "def f():\n"}],
        "HuggingFaceH4/mt_bench_prompts": [{"prompt": ["first", "second"]}],
    }
    module = types.ModuleType("datasets")
    module.load_dataset = lambda dataset, **_: tables[dataset]
    monkeypatch.setitem(sys.modules, "datasets", module)
    boxed = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    task = "Write a solution to the following problem and make sure that it passes the tests:\n"
    for name, text in {
        "gsm8k": f"1 {{+}} 1?{boxed}",
        "humaneval": f"{task}```python\ndef f():\n\n```",
        "mt-bench": "first",
    }.items():
        assert _select(name, HUB, count=1).prompts[0].token_ids == _ids(text)


def test_what_the_hub_lacks_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="needs the package `datasets`"):
        _select("gsm8k", HUB)
    with pytest.raises(UsageError, match="arena-hard-v2: not on the hub as plain rows"):
        _select("arena-hard-v2", HUB)


# ---------------------------------------------------------------------- one template


def test_training_and_evaluation_render_by_the_same_function():
    assert workloads.render_prompt is template.render_prompt
    assert continuation_rows.render_prompt is template.render_prompt


def test_no_other_module_applies_a_chat_template():
    root = Path(treespark.__file__).parent
    users = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if ".apply_chat_template(" in path.read_text()
    }
    assert users == {"target/template.py"}


def test_a_prompt_has_the_same_ids_in_training_data_and_in_evaluation(write, tmp_path):
    folder = write("gsm8k.jsonl", [{"id": "a", "turns": ["What is 1 + 1?"]}])
    evaluated = _select("gsm8k", folder, count=1).prompts[0].token_ids
    gen = dict.fromkeys(continuation_rows.FIXED, "x") | {"max_tokens": 4}

    def answer(jobs, collector, _):
        with collector:
            collector.add([continuation_rows.Answer(job, [1], "", "stop") for job in jobs], 1)

    rows = {"a": {"id": "a", "prompt": "What is 1 + 1?"}}
    limits = continuation_rows.Limits(1000, 1000)
    out = tmp_path / "continuations.jsonl"
    continuation_rows.collect(rows, out, make_tokenizer(), limits, gen, answer)
    assert json.loads(out.read_text())["prompt_token_ids"] == evaluated
