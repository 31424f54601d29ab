# SPDX-License-Identifier: Apache-2.0
"""Mixtures: what is dropped and drawn in which order, that counts add up, that a seed fixes it."""

import json
import re
import sys
import types
from collections import Counter
from dataclasses import asdict

import pytest
import yaml

from tests.data.tiny import read_rows, write_rows
from treespark.data.jsonl import report_path
from treespark.data.mixture import run_mixture
from treespark.data.mixture_recipe import load_mixture
from treespark.data.mixture_report import FATES
from treespark.errors import UsageError


def texts(word, num):
    return [{"prompt": f"{word} number{i}"} for i in range(num)]


@pytest.fixture
def build(tmp_path, target_folder):
    """Write sources {name: (rows, further keys)} and a recipe of them; run it."""

    def build(sources, name="out.jsonl", **keys):
        listed = []
        for source, (rows, further) in sources.items():
            given = {"name": source, "category": source, "quota": 100, **further}
            if "dataset" not in given:
                write_rows(tmp_path / f"{source}.jsonl", rows)
                given = {"files": [f"{source}.jsonl"], **given}
            listed.append(given)
        recipe = {"out": name, "tokenizer": str(target_folder), "max_prompt_tokens": 200}
        path = tmp_path / "mixture.yaml"
        path.write_text(yaml.safe_dump({**recipe, "sources": listed, **keys}, sort_keys=False))
        return run_mixture(path), read_rows(tmp_path / name)

    return build


@pytest.fixture
def fake_datasets(monkeypatch):
    """Stand in for the `datasets` package: {name: rows}; returns the calls of load_dataset."""

    def install(sets):
        calls = []

        def load_dataset(path, **options):
            calls.append((path, options))
            if path not in sets:
                raise FileNotFoundError(f"Dataset '{path}'\ndoesn't exist")
            return sets[path]

        module = types.ModuleType("datasets")
        module.load_dataset = load_dataset
        monkeypatch.setitem(sys.modules, "datasets", module)
        return calls

    return install


def ids(rows, source):
    return {row["id"] for row in rows if row["source"] == source}


def test_same_recipe_gives_the_same_bytes_and_another_seed_does_not(build, tmp_path):
    sources = {"a": (texts("x", 30), {"quota": 9}), "b": (texts("y", 30), {"quota": 8})}
    found = []
    for seed in (1, 1, 2):
        build(sources, seed=seed, count=15)
        out = tmp_path / "out.jsonl"
        found.append((out.read_bytes(), report_path(out).read_bytes()))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]


def test_rows_have_id_source_category_prompt_and_are_shuffled(build):
    rows = [{"instruction": "do", "input": "this"}, {"turns": ["one", "two"]}, *texts("x", 30)]
    _, written = build({"a": (rows, {"category": "math"}), "b": (texts("y", 30), {})})
    by_id = {row["id"]: row for row in written}
    expected = {"id": "a-0", "source": "a", "category": "math", "prompt": "do\n\nthis"}
    assert by_id["a-0"] == expected
    assert by_id["a-1"]["prompt"] == "one"
    names = [row["source"] for row in written]
    assert names not in (sorted(names), sorted(names, reverse=True))


def test_a_source_gives_its_quota_or_all_it_has_and_the_pool_is_cut(build):
    sources = {"a": (texts("x", 30), {"quota": 9}), "b": (texts("y", 5), {"quota": 9})}
    report, rows = build(sources)
    assert Counter(row["source"] for row in rows) == {"a": 9, "b": 5}
    assert [(s.drawn, s.not_drawn) for s in report.sources] == [(9, 21), (5, 0)]
    report, cut = build(sources, count=11)
    assert cut == rows[:11]
    assert sum(s.cut for s in report.sources) == 3


def test_too_long_prompts_are_dropped_before_the_draw(build):
    rows = [row for text in texts("x", 10) for row in ({"prompt": "z" * 300}, text)]
    report, written = build({"a": (rows, {"quota": 10})})
    assert {row["prompt"] for row in written} == {row["prompt"] for row in texts("x", 10)}
    # A prompt that was dropped once for its length is a duplicate afterwards.
    assert (report.sources[0].too_long, report.sources[0].duplicate) == (1, 9)


def test_another_source_does_not_change_what_a_source_draws(build):
    a, b = (texts("x", 40), {"quota": 10}), (texts("y", 40), {"quota": 10})
    _, alone = build({"a": a})
    _, after = build({"b": b, "a": a})
    assert ids(alone, "a") == ids(after, "a")
    _, twins = build({"a": a, "c": (texts("z", 40), {"quota": 10})})
    assert {i[2:] for i in ids(twins, "a")} != {i[2:] for i in ids(twins, "c")}


def test_every_row_is_in_exactly_one_count(build, tmp_path, capsys):
    held_out = "the quick brown fox jumps over a very lazy dog"
    write_rows(tmp_path / "eval.jsonl", [{"prompt": held_out}])
    rows = [
        {"prompt": "other", "lang": "cpp"},
        *({**row, "lang": "python"} for row in [{"prompt": " "}, {"messages": []}, {"turns": [3]}]),
        *({"prompt": text, "lang": "python"} for text in ["twice", "twice\r\n", held_out]),
        {"prompt": "z" * 300, "lang": "python"},
        {"prompt": "see the quick brown bear", "lang": "python"},
        *({**row, "lang": "python"} for row in texts("x", 20)),
    ]
    report, written = build(
        {
            "a": (rows, {"where": {"lang": "python"}, "quota": 21}),
            "b": ([*texts("x", 20), {"prompt": "new"}], {"quota": 21}),
        },
        count=15,
        decontamination={"evaluation": ["eval.jsonl"]},
    )
    first, second = report.sources
    expected = {"filtered_out": 1, "bad_or_empty": 3, "duplicate": 1, "contaminated_exact": 1}
    expected |= {"too_long": 1, "contaminated_trigram": 1, "read": 29, "drawn": 21, "not_drawn": 0}
    assert {name: getattr(first, name) for name in expected} == expected
    assert first.first_bad.endswith("a.jsonl:2: no user turn, or an empty one")
    assert (second.duplicate_of_other_source, second.cut + second.written) == (20, 1)
    assert first.cut + second.cut == 22 - 15
    for counts in report.sources:
        assert counts.read == sum(getattr(counts, name) for name in FATES)
    assert report.written == len(written) == 15
    assert json.loads(report_path(tmp_path / "out.jsonl").read_text()) == asdict(report)
    assert "contaminated trigram" in capsys.readouterr().out


def test_near_duplicates_are_reported_and_stay(build):
    long = [f"w{i}" for i in range(40)]
    rows = [{"prompt": " ".join([*long, f"end{i}"])} for i in range(4)]
    near, far = {"prompt": " ".join(long[:-1])}, {"prompt": " ".join(long[:20])}
    report, written = build({"a": (rows, {}), "b": ([near, far], {})})
    assert len(written) == 6
    assert report.near_duplicate_pairs == 10
    assert [s.near_duplicates for s in report.sources] == [4, 1]
    examples = report.near_duplicate_examples
    assert len(examples) == 5
    assert all(len({*pair}) == 2 and "b-1" not in pair for pair in examples)


def test_composition_is_in_percent_by_category(build, capsys):
    report, _ = build(
        {
            "a": (texts("x", 2), {"category": "math"}),
            "b": (texts("y", 3), {"category": "math"}),
            "c": (texts("z", 1), {"category": "code"}),
        }
    )
    assert report.composition == {
        "code": {"count": 1, "percent": 16.67},
        "math": {"count": 5, "percent": 83.33},
    }
    assert "83.33 %" in capsys.readouterr().out


def test_where_and_columns_choose_rows_and_prompts(build, fake_datasets):
    table = [
        {"text": "first", "parent": None, "flag": True},
        {"text": "later", "parent": "1", "flag": True},
        {"text": "one", "parent": None, "flag": 1},
    ]
    calls = fake_datasets({"hub/set": table})
    keys = {"where": {"parent": None, "flag": True}, "columns": {"prompt": "text"}}
    keys |= {"dataset": "hub/set", "config": "c", "revision": "r"}
    report, rows = build({"a": ([], keys)})
    assert [row["prompt"] for row in rows] == ["first"]
    assert report.sources[0].filtered_out == 2
    assert calls == [("hub/set", {"name": "c", "split": "train", "revision": "r"})]


def refused(build, tmp_path, sources, **keys):
    with pytest.raises(UsageError) as caught:
        build(sources, **keys)
    message = str(caught.value)
    assert "\n" not in message
    assert not list(tmp_path.glob("out.jsonl*"))
    return message


def test_missing_package_dataset_or_file_is_one_line(build, tmp_path, monkeypatch, fake_datasets):
    sources = {"a": ([], {"dataset": "hub/none"})}
    calls = fake_datasets({})
    late = {**sources, "b": ([], {"files": ["none.jsonl"]})}
    assert "none.jsonl: cannot be read" in refused(build, tmp_path, late)
    assert calls == []
    message = refused(build, tmp_path, sources)
    assert message.startswith("source a: dataset hub/none[train]: cannot be loaded: FileNotFound")
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = refused(build, tmp_path, sources)
    assert "source a: dataset hub/none: needs the package `datasets`" in message


@pytest.mark.parametrize(
    ("further", "keys", "message"),
    [
        ({"qota": 1}, {}, r"mixture.yaml:\d+: unknown key 'sources.1.qota': did you mean 'quota'"),
        ({}, {"cuont": 1}, "unknown key 'cuont': did you mean 'count'"),
        ({"quota": 0}, {}, "sources.1.quota: 0 is not allowed: need >= 1"),
        ({"name": "a"}, {}, r":\d+: source name 'a' given twice"),
        ({"name": "b c"}, {}, "sources.1.name: 'b c' is not allowed"),
        ({"dataset": "d", "files": ["f"]}, {}, "sources.1: source b: need either files or dataset"),
        ({"split": "test"}, {}, "split test: goes with dataset, not with files"),
        ({"columns": {"question": "q"}}, {}, "columns: 'question' is not allowed: need one of"),
        ({"where": {"lnag": "x"}}, {}, "source b: where: no row has a column 'lnag'"),
        ({"columns": {"prompt": "q"}}, {}, "source b: no row has a prompt: .*b.jsonl:1"),
        ({"files": ["out.jsonl"]}, {}, "mixture.yaml: out .* is also an input"),
        ({}, {"count": 201}, r"count 201: allowed 1\.\.200"),
        ({}, {"max_prompt_tokens": 2}, "sources: no usable prompt: .*too_long': 3"),
    ],
)
def test_mistake_is_refused_on_one_line(build, tmp_path, further, keys, message):
    sources = {"a": (texts("x", 3), {}), "b": (texts("y", 3), further)}
    found = refused(build, tmp_path, sources, **keys)
    assert re.search(message, found), found


def test_shipped_mixture_sums_to_the_papers_pool(repository):
    mixture = load_mixture(repository / "recipes" / "mixture-paper.yaml")
    quotas = Counter()
    for source in mixture.sources:
        quotas[source.category] += source.quota
    # 14,960, 20,075, 9,970 and 4,995 of 50,000, and the 123 surplus in the same parts.
    assert quotas == {"math": 14997, "code": 20124, "dialogue": 9995, "writing": 5007}
    assert (quotas.total(), mixture.count) == (50123, 50000)
