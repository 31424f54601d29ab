# SPDX-License-Identifier: Apache-2.0
"""compare: equal answers by every method, honest statistics, everything needed to repeat it."""

import json

import pytest

from tests.bench.bench_world import text_target, write_drafter, write_prompts
from tests.serving_world import eagle3_drafter
from treespark.bench import compare, methods
from treespark.bench.compare import Measured, run_compare
from treespark.bench.methods import Answers
from treespark.bench.statistics import equality, statistics
from treespark.bench.workload import Prompt, batches
from treespark.errors import UsageError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Target, drafter and two prompt files."""
    root = tmp_path_factory.mktemp("bench")
    files = [write_prompts(root / "a.jsonl"), write_prompts(root / "b.jsonl", "turns")]
    return {"target": text_target().path, "drafter": write_drafter(root / "d"), "prompts": files}


def run(folders, out, **options):
    defaults = {"num_prompts": 2, "budgets": [4, 8], "max_tokens": 12, "repeats": 2}
    return run_compare(**folders, out=out, **(defaults | options))


def test_a_drafter_of_chains_is_compared_as_a_chain_alone(folders, tmp_path):
    eagle3_drafter(text_target()).save_pretrained(tmp_path / "eagle3")
    result = run(folders | {"drafter": tmp_path / "eagle3"}, tmp_path / "out", batch_size=2)
    names = [row["name"] for row in result["methods"]]
    assert names == ["autoregressive", "chain", "hf-generate"]
    assert [row["equality"]["num_different"] for row in result["methods"]] == [0, 0, 0]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_all_methods_answer_alike_and_everything_is_written(folders, tmp_path, capsys, batch_size):
    result = run(folders, tmp_path, batch_size=batch_size, profile=True)
    names = [row["name"] for row in result["methods"]]
    own = ["autoregressive", "chain", "tree-4", "tree-8"]
    assert names == [*own, "hf-generate", *(["hf-prompt-lookup"] if batch_size == 1 else [])]
    assert [row["equality"]["num_different"] for row in result["methods"]] == [0] * len(names)
    assert json.loads((tmp_path / "compare.json").read_text())["methods"][0]["name"] == names[0]
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "compare.svg").read_text()
    printed = capsys.readouterr().out
    assert all(word in printed for word in (*names, "prefill included", "host share", "overall"))
    assert "All 4 answers are equal" in printed
    assert ("prompt lookup is left out" in printed) == (batch_size > 1)
    assert set(result["methods"][1]["by_file"]) == {"a", "b"}
    assert all(len(row["measurements"]) == 4 for row in result["methods"])
    assert all(("profile" in row) == (row["name"] in own) for row in result["methods"])
    assert result["methods"][2]["overall"]["mean_nodes"] <= 4


def test_without_a_drafter_there_is_no_chain_and_no_tree(folders, tmp_path, capsys):
    result = run(folders | {"drafter": None}, tmp_path, as_json=True, repeats=1)
    names = ["autoregressive", "hf-generate", "hf-prompt-lookup"]
    assert [row["name"] for row in result["methods"]] == names
    assert json.loads(capsys.readouterr().out)["dtype"] == "float32"


def test_one_budget_replaces_the_list(folders, tmp_path):
    result = run(folders, tmp_path, budget=6, repeats=1, max_tokens=2)
    assert [r["name"] for r in result["methods"] if r["name"].startswith("tree")] == ["tree-6"]


@pytest.fixture
def liar(monkeypatch):
    """Make the peer change the last token of the second prompt of file b."""
    honest = methods.peer_methods

    def lying(target, batch_size):
        peers, calls = honest(target, batch_size), []

        def run(prompts, max_tokens):
            answers = peers[0].run(prompts, max_tokens).token_ids
            calls.append(1)
            # The first call is the warm-up.
            return Answers([[*ids[:-1], ids[-1] + len(calls) // 5] for ids in answers])

        return [methods.Method("hf-generate", run)]

    monkeypatch.setattr(methods, "peer_methods", lying)


def test_float32_answers_that_differ_are_exit_code_1_and_named(folders, tmp_path, capsys, liar):
    with pytest.raises(SystemExit) as stopped:
        run(folders, tmp_path, repeats=1)
    assert stopped.value.code == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: hf-generate differs from autoregressive on prompt b-1 of b")
    # What was measured is kept all the same.
    rows = json.loads((tmp_path / "compare.json").read_text())["methods"]
    assert [row["equality"]["num_different"] for row in rows] == [0, 0, 0, 0, 1]


def test_bfloat16_answers_that_differ_are_counted_with_a_note(folders, tmp_path, capsys, liar):
    result = run(folders, tmp_path, repeats=1, dtype="bfloat16")
    assert result["methods"][-1]["equality"]["num_different"] >= 1
    printed = capsys.readouterr().out
    assert "near ties may" in printed
    assert "answers differ from autoregressive, first" in printed


def test_methods_take_turns_on_every_batch_and_the_order_rotates():
    log = []

    def method(name):
        def run(prompts, max_tokens):
            log.append((prompts[0][0], name))
            return Answers([[1]] * len(prompts))

        return methods.Method(name, run)

    some = [Prompt("f", str(i), [i]) for i in range(3)]
    compare.measure([method("x"), method("y")], some, 1, 5, 2)
    orders = ["xy", "yx", "xy", "yx", "xy", "yx"]
    expected = [(i % 3, name) for i, order in enumerate(orders) for name in order]
    assert log[2:] == expected


def test_ratio_is_taken_inside_each_repeat():
    walls = {"autoregressive": (1.0, 4.0), "chain": (0.5, 1.0)}
    measured = {
        name: Measured(
            walls={(r, "f"): seconds for r, seconds in enumerate(both)},
            tokens={(0, "f"): 10, (1, "f"): 10},
            answers=[[], []],
        )
        for name, both in walls.items()
    }
    overall = statistics(measured, "chain", ["f"])["overall"]
    assert overall["ratio_to_autoregressive"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert overall["tokens_per_s"] == {"median": 15.0, "min": 10.0, "max": 20.0}
    assert overall["acceptance_length"] is None


def test_difference_in_a_later_repeat_or_in_length_is_found():
    prompts = [Prompt("f", "p", [1]), Prompt("f", "q", [1])]
    base = Measured(answers=[[[1, 2], [3]], [[1, 2], [3]]])
    other = Measured(answers=[[[1, 2], [3]], [[1, 2], [3, 4]]])
    found = equality(base, other, prompts)
    assert found == {"num_different": 1, "first": {"file": "f", "prompt": "q", "position": 1}}


def test_batches_do_not_mix_files():
    some = [Prompt(file, str(i), [1]) for file, n in (("a", 3), ("b", 1)) for i in range(n)]
    assert [[p.file for p in group] for group in batches(some, 2)] == [["a", "a"], ["a"], ["b"]]


def test_bad_input_is_refused_and_nothing_is_written(folders, tmp_path):
    empty, broken = tmp_path / "empty.jsonl", tmp_path / "broken.jsonl"
    empty.write_text("")
    broken.write_text('{"prompt": "a"}\n{"prompt": "b')
    out = tmp_path / "out"
    for changes, options, word in [
        ({"prompts": [empty]}, {}, "empty.jsonl: no prompt"),
        ({"prompts": [broken]}, {}, "broken.jsonl:2"),
        ({"prompts": [tmp_path / "none.jsonl"]}, {}, "cannot be read"),
        ({"prompts": [folders["prompts"][0]] * 2}, {}, "two files"),
        ({}, {"max_tokens": 1000}, "prompt a-0: "),
        ({}, {"depth": 6}, "--depth 6"),
        ({"target": tmp_path / "nowhere"}, {}, "nowhere"),
    ]:
        with pytest.raises(UsageError, match=word):
            run(folders | changes, out, **options)
    assert not out.exists()


@pytest.mark.parametrize("place", ["file", "file/x", "/proc/x", "y" * 300, "taken"])
def test_folder_that_cannot_be_written_is_refused_before_loading(folders, tmp_path, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "compare.json").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="--out"):
        run(folders | {"target": tmp_path / "nowhere"}, tmp_path / place)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("drafter", "options", "word"),
    [
        (None, {"budget": 4}, "--budget 4: shapes the draft tree"),
        ("d", {"budgets": [8, 9999]}, "--budgets 9999: need whole numbers in 0..1024"),
    ],
)
def test_budgets_that_cannot_work_are_refused_before_loading(
    folders, tmp_path, drafter, options, word
):
    with pytest.raises(UsageError, match=word):
        run(folders | {"target": tmp_path / "no", "drafter": drafter}, tmp_path / "out", **options)
