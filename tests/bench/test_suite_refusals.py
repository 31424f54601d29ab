# SPDX-License-Identifier: Apache-2.0
"""`treespark bench suite`: mistakes are named, and what was measured stays as it was."""

import json
from pathlib import Path

import pytest

from tests.bench.suite_tiny import METHODS, write_suite
from treespark.bench.suite import run_suite
from treespark.bench.suite_records import CELLS, REQUESTS, SETTING
from treespark.bench.suite_writer import SuiteWriter
from treespark.cli.suite import bench_suite
from treespark.errors import UsageError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 9}, r"measured with max_tokens 6, the recipe has 9"),
        ({"seed": 1}, r"measured with seed 980406, the recipe has 1"),
        ({"methods": METHODS[:2]}, r"measured with method treespark, which the recipe lacks"),
        (
            {"datasets": [{"name": "gsm8k", "count": 1}, {"name": "mt-bench", "count": 1}]},
            r"measured with dataset gsm8k with subset_size 2, the recipe has 1",
        ),
    ],
)
def test_a_run_folder_of_another_setting_is_refused(tmp_path_factory, changes, message):
    folder = tmp_path_factory.getbasetemp() / "measured"
    if not folder.exists():
        folder.mkdir()
        run_suite(write_suite(folder))
    setting = (folder / "run" / SETTING).read_bytes()
    recipe = write_suite(folder, **changes)
    with pytest.raises(UsageError, match=message):
        run_suite(recipe)
    assert (folder / "run" / SETTING).read_bytes() == setting


def _changed_setting(folder, change):
    path = folder / "run" / SETTING
    setting = json.loads(path.read_text())
    change(setting)
    path.write_text(json.dumps(setting))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["versions"]["packages"].update(torch="2.9.0"), r"torch 2\.9\.0, this is 2"),
        (lambda s: s["versions"].update(processor="another"), r"processor another, this is "),
    ],
)
def test_a_run_goes_on_where_it_began_or_not_at_all(tmp_path, change, message):
    recipe = write_suite(tmp_path, methods=METHODS[:1])
    run_suite(recipe)
    _changed_setting(tmp_path, change)
    with pytest.raises(UsageError, match=f"measured with {message}"):
        run_suite(recipe)


def test_a_run_goes_on_with_its_prompts_from_another_place(tmp_path):
    recipe = write_suite(tmp_path, methods=METHODS[:1])
    cells = run_suite(recipe).cells
    _changed_setting(tmp_path, lambda s: s["datasets"][0].update(source="/elsewhere/gsm8k.jsonl"))
    # As of a version that did not write it.
    _changed_setting(tmp_path, lambda s: s["versions"].pop("processor"))
    assert run_suite(recipe).cells == cells


def _contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_refused_run_leaves_the_setting_as_it_was(tmp_path):
    run_suite(write_suite(tmp_path, methods=METHODS[:2]))
    more = write_suite(tmp_path)
    before = _contents(tmp_path / "run")
    with (
        SuiteWriter(tmp_path / "run"),
        pytest.raises(UsageError, match="another process is writing this file"),
    ):
        run_suite(more)
    assert _contents(tmp_path / "run") == before
    with (tmp_path / "run" / CELLS).open("a") as cells:
        cells.write("{}\n")
    before = _contents(tmp_path / "run")
    with pytest.raises(UsageError, match=r"cells\.jsonl:\d+: missing key"):
        run_suite(more)
    assert _contents(tmp_path / "run") == before


def test_records_without_their_setting_are_not_taken_for_another_ones(tmp_path):
    recipe = write_suite(tmp_path, methods=METHODS[:2])
    run_suite(recipe)
    (tmp_path / "run" / SETTING).unlink()
    before = _contents(tmp_path / "run")
    with pytest.raises(UsageError, match=r"it has cells\.jsonl without suite\.json"):
        run_suite(recipe)
    assert _contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "nowhere"}, r"dataset gsm8k: .*nowhere: no such file or folder"),
        (
            {"datasets": [{"name": "aime25"}]},
            r"dataset aime25: .*data has no aime25\.jsonl",
        ),
        (
            {"datasets": [{"name": "gsm8k"}]},
            r"dataset gsm8k: count 500, but .* has 3 usable prompts; give `count`, at most 3",
        ),
        (
            {"max_tokens": 250},
            r"prompt gsm8k-. has \d+ tokens, with max_tokens 250 more than the target's context",
        ),
        (
            {"methods": [{"name": "treespark", "drafter": "block", "threshold": 0.1}]},
            r"method treespark: threshold 0.1: goes with stop threshold only",
        ),
        (
            {"methods": [{"name": "eagle3", "drafter": "block"}]},
            r"method eagle3: drafter block is treespark; need an EAGLE-3 drafter",
        ),
        (
            {"methods": [{"name": "dspark", "drafter": "block", "budget": 3}]},
            r"method dspark: budget 3: a chain has none",
        ),
        (
            {"methods": [{"name": "mine", "drafter": "block"}]},
            r"method mine: need `method`, one of autoregressive, eagle3",
        ),
        ({"methods": [{"name": "dspark"}]}, r"method dspark: needs `drafter`, one of block"),
        (
            {"methods": [{"name": "autoregressive", "budget": 3}]},
            r"method autoregressive: budget: not an option of autoregressive decoding",
        ),
        ({"drafters": {"block": "data"}}, r"drafter .*data: "),
        (
            {
                "methods": [
                    *METHODS,
                    {
                        "name": "wide",
                        "method": "treespark",
                        "drafter": "block",
                        "title": "TreeSpark",
                    },
                ]
            },
            r"method wide: title 'TreeSpark' is also the one of treespark; give another",
        ),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(tmp_path, changes, message):
    recipe = write_suite(tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        run_suite(recipe)
    assert not (tmp_path / "run").exists()


def test_a_dataset_that_the_recipe_lacks_is_refused(tmp_path):
    recipe = write_suite(tmp_path)
    with pytest.raises(UsageError, match=r"^--dataset gsm9k: the recipe has gsm8k, mt-bench$"):
        run_suite(recipe, datasets=["gsm8k", "gsm9k"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"methods": [*METHODS, dict(METHODS[0])]},
            r"yaml:\d+: methods: name 'autoregressive' given twice",
        ),
        ({"methods": [{"name": "dspark", "drafter": "x"}]}, r"drafter 'x': drafters: block"),
        ({"datasets": [{"name": "gsm9k"}]}, r"'gsm9k' is not allowed: need .*, writing-politics$"),
        (
            {"datasets": [{"name": "gsm8k", "count": 0}]},
            r"count: 0 is not allowed: need >= 1 .*\d$",
        ),
        ({"datasets": []}, r"datasets: \[\] is not allowed: need a list that is not empty$"),
        ({"drafters": ["block"]}, r"drafters: \['block'\] is not allowed: need a section of keys"),
        ({"methods": [METHODS[0] | {"title": "a\nb"}]}, r"title 'a\\nb' is not allowed: need one"),
        ({"methods": [METHODS[0] | {"title": " "}]}, r"title ' ' is not allowed: need one line"),
        ({"baseline": "dflash"}, r"baseline 'dflash': need one of the methods autoregressive"),
        ({"concurrencies": [1, 1]}, r"concurrencies \[1, 1\]: one is given twice"),
        ({"data": None}, r"dataset gsm8k: need file, hub, or data for all datasets"),
        ({"methods": [{"name": "treespark", "budgets": 3}]}, r"did you mean 'budget'"),
    ],
)
def test_a_recipe_names_the_line_of_a_mistake(tmp_path, changes, message):
    recipe = write_suite(tmp_path, **changes)
    with pytest.raises(UsageError, match=message) as refused:
        run_suite(recipe)
    assert str(refused.value).startswith(str(recipe))


def test_different_answers_in_float32_fail_the_run(tmp_path, monkeypatch, capsys):
    recipe = write_suite(tmp_path, methods=METHODS[:2], datasets=[{"name": "gsm8k", "count": 1}])
    run = run_suite(recipe)
    path = run.folder / REQUESTS
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    second["ids_sha256"] = "0" * 64
    # The same length, as cells.jsonl counts on it.
    path.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    with pytest.raises(SystemExit) as failed:
        run_suite(recipe)
    assert failed.value.code == 1
    assert "dspark and autoregressive differ on prompt gsm8k-" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "treespark"}, "--method treespark: goes with --url"),
        ({"concurrency": 3}, "--concurrency 3: goes with --url"),
        ({"url": "http://x", "method": "a"}, "--url http://x: needs --method and --concurrency"),
    ],
)
def test_a_server_is_measured_by_one_method_at_one_concurrency(options, message):
    with pytest.raises(UsageError, match=f"^{message}$"):
        bench_suite(Path("suite.yaml"), **options)
