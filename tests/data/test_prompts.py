# SPDX-License-Identifier: Apache-2.0
"""Prompt files: what is dropped, how categories are mixed, and that a seed fixes everything."""

import json
import os
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.tiny import read_rows, write_rows
from treespark.data.prompts import (
    PAPER_SHARES,
    parse_shares,
    quotas,
    report_path,
    run_prompts,
)
from treespark.errors import UsageError
from treespark.target.template import load_tokenizer, render_prompt

HALVES = {"math": 0.5, "code": 0.5}


def _pool(tmp_path, num_math=30, num_code=20):
    math = [{"prompt": f"m{i}", "category": "math"} for i in range(num_math)]
    code = [{"prompt": f"c{i}", "category": "code"} for i in range(num_code)]
    return [write_rows(tmp_path / "ma.jsonl", math), write_rows(tmp_path / "co.jsonl", code)]


def _nothing_written(out):
    return not out.exists() and not report_path(out).exists()


def test_rows_have_id_source_category_prompt_kept_or_assigned(tmp_path, target_folder):
    rows = [
        {"prompt": "a", "id": 7, "source": "s", "category": "math", "response": "r"},
        {"turns": ["b", "c"]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]},
    ]
    out = tmp_path / "out.jsonl"
    run_prompts([write_rows(tmp_path / "in.jsonl", rows)], out, target_folder)
    expected = [
        {"id": "7", "source": "s", "category": "math", "prompt": "a"},
        {"id": "in-1", "source": "in", "category": "other", "prompt": "b"},
        {
            "id": "in-2",
            "source": "in",
            "category": "other",
            "prompt": None,
            "input_ids": [5, 6],
        },
    ]
    assert sorted(read_rows(out), key=lambda row: row["id"]) == expected


def test_output_is_accepted_as_input_and_stays_the_same_set(tmp_path, target_folder):
    first, second = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    rows = [{"prompt": "a"}, {"input_ids": [5, 6]}, {"prompt": "b"}]
    run_prompts([write_rows(tmp_path / "in.jsonl", rows)], first, target_folder)
    run_prompts([first], second, target_folder)
    assert sorted(map(str, read_rows(first))) == sorted(map(str, read_rows(second)))


def test_every_drop_is_counted_and_read_is_the_sum(tmp_path, target_folder, capsys):
    rows = [
        {"prompt": "keep", "category": "math"},
        {"prompt": "keep\r\n ", "category": "math"},
        {"prompt": " \n", "category": "math"},
        {"messages": [{"role": "system", "content": "s"}], "category": "math"},
        {"prompt": "held out", "category": "math"},
        {"prompt": "x" * 300, "category": "math"},
        {"prompt": "poem", "category": "writing"},
    ]
    held_out = write_rows(tmp_path / "eval.jsonl", [{"turns": ["held out", "later"]}])
    out = tmp_path / "out.jsonl"
    report = run_prompts(
        [write_rows(tmp_path / "in.jsonl", rows)],
        out,
        target_folder,
        max_prompt_tokens=200,
        shares={"math": 1.0},
        evaluation=[held_out],
    )
    assert report.dropped == {
        "no_user_turn": 1,
        "empty": 1,
        "duplicate": 1,
        "equals_evaluation_prompt": 1,
        "too_long": 1,
        "category_without_share": 1,
    }
    assert (report.read, report.written, report.not_sampled) == (7, 1, 0)
    assert [row["prompt"] for row in read_rows(out)] == ["keep"]
    assert json.loads(report_path(out).read_text())["dropped"] == report.dropped
    assert "dropped: too_long" in capsys.readouterr().out


def test_names_in_the_printed_table_are_shown_as_they_are(tmp_path, target_folder, capsys):
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": "a", "category": "[/x] :100:"}])
    run_prompts([rows], tmp_path / "[b]" / "out.jsonl", target_folder)
    assert "written: [/x] :100:" in capsys.readouterr().out


def test_prompt_at_the_limit_is_kept_and_one_token_more_is_dropped(tmp_path, target_folder):
    tokenizer = load_tokenizer(target_folder)
    limit = len(render_prompt(tokenizer, "x" * 50))
    rows = [{"prompt": "x" * 50}, {"prompt": "x" * 51}]
    out = tmp_path / "out.jsonl"
    run_prompts([write_rows(tmp_path / "in.jsonl", rows)], out, target_folder, limit)
    assert [row["prompt"] for row in read_rows(out)] == ["x" * 50]


def test_equality_with_evaluation_prompts_is_exact_and_one_way(tmp_path, target_folder):
    """A prompt that contains an evaluation prompt, or is contained in one, is another prompt."""
    held_out = write_rows(tmp_path / "eval.jsonl", [{"turns": ["two words"]}])
    rows = [{"prompt": text} for text in ("two words", "two words more", "two", "Two words")]
    out = tmp_path / "out.jsonl"
    run_prompts(
        [write_rows(tmp_path / "in.jsonl", rows)], out, target_folder, evaluation=[held_out]
    )
    assert {row["prompt"] for row in read_rows(out)} == {"two words more", "two", "Two words"}
    assert read_rows(held_out) == [{"turns": ["two words"]}]


def test_tokenised_prompt_equal_to_an_evaluation_prompt_is_dropped(tmp_path, target_folder):
    ids = render_prompt(load_tokenizer(target_folder), "two words")
    held_out = write_rows(tmp_path / "eval.jsonl", [{"prompt": "two words"}])
    inputs = [write_rows(tmp_path / "in.jsonl", [{"input_ids": ids}, {"input_ids": ids[1:]}])]
    report = run_prompts(inputs, tmp_path / "out.jsonl", target_folder, evaluation=[held_out])
    assert report.dropped["equals_evaluation_prompt"] == 1
    assert report.written == 1


def test_shares_are_met_exactly_and_rows_are_not_repeated(tmp_path, target_folder):
    out = tmp_path / "out.jsonl"
    shares = {"math": 0.7, "code": 0.3}
    run_prompts(_pool(tmp_path), out, target_folder, count=21, shares=shares)
    rows = read_rows(out)
    # 14.7 and 6.3: the larger remainder gets the row that is left.
    assert Counter(row["category"] for row in rows) == {"math": 15, "code": 6}
    assert len({row["id"] for row in rows}) == 21


def test_seed_fixes_the_file_and_another_seed_changes_it(tmp_path, target_folder):
    inputs, contents = _pool(tmp_path), []
    for name, seed in (("a", 42), ("b", 42), ("c", 43)):
        out = tmp_path / name
        run_prompts(inputs, out, target_folder, count=20, shares=HALVES, seed=seed)
        contents.append(out.read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_one_category_samples_alike_whatever_the_others_hold(tmp_path, target_folder):
    picked = []
    for num_code in (10, 20):
        out = tmp_path / f"{num_code}.jsonl"
        inputs = _pool(tmp_path, num_code=num_code)
        run_prompts(inputs, out, target_folder, count=20, shares=HALVES)
        picked.append({row["id"] for row in read_rows(out) if row["category"] == "math"})
    assert picked[0] == picked[1]


def test_written_rows_are_shuffled_across_categories(tmp_path, target_folder):
    out = tmp_path / "out.jsonl"
    run_prompts(_pool(tmp_path), out, target_folder, count=40, shares=HALVES)
    categories = [row["category"] for row in read_rows(out)]
    assert categories != sorted(categories)
    assert categories != sorted(categories, reverse=True)


def test_without_a_count_shares_give_the_largest_mixture(tmp_path, target_folder):
    out = tmp_path / "out.jsonl"
    report = run_prompts(_pool(tmp_path), out, target_folder, shares=HALVES)
    assert report.written_by_category == {"math": 20, "code": 20}


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.tuples(st.integers(1, 60), st.integers(1, 50)),
        min_size=1,
    )
)
def test_largest_mixture_fits_and_one_row_more_does_not(table):
    total = sum(weight for weight, _ in table.values())
    shares = {name: weight / total for name, (weight, _) in table.items()}
    available = {name: num for name, (_, num) in table.items()}
    try:
        wanted = quotas(available, shares, None)
    except UsageError:
        return
    count = sum(wanted.values())
    assert all(wanted[name] <= available[name] for name in shares)
    assert all(abs(wanted[name] - count * shares[name]) < 1 for name in shares)
    for more in range(count + 1, count + 8):
        with pytest.raises(UsageError):
            quotas(available, shares, more)


def test_paper_shares_sum_to_one_and_have_their_name():
    assert abs(sum(PAPER_SHARES.values()) - 1) < 1e-9
    assert parse_shares("paper") == PAPER_SHARES
    assert parse_shares("math=0.3, code=0.7") == {"math": 0.3, "code": 0.7}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 41, "shares": HALVES}, "category code has 20 .* largest count .* is 40"),
        ({"count": 51}, "--count 51: only 50 prompts"),
        ({"count": 0}, "--count 0"),
        ({"max_prompt_tokens": 0}, "--max-prompt-tokens 0"),
        ({"shares": {"math": 0.5, "code": 0.4}}, "sum to 1"),
        ({"shares": {"math": 1.5, "code": -0.5}}, "fractions above 0"),
        ({"shares": {"poems": 1.0}}, "0 of 50 rows are usable.*category_without_share"),
        ({"shares": {"math": 0.5, "poems": 0.5}}, "no usable prompt has category 'poems'"),
        ({"max_prompt_tokens": 5}, "0 of 50 rows are usable: {'too_long': 50}"),
    ],
)
def test_impossible_request_is_refused_and_nothing_is_written(
    tmp_path, target_folder, options, message
):
    out = tmp_path / "out.jsonl"
    with pytest.raises(UsageError, match=message):
        run_prompts(_pool(tmp_path), out, target_folder, **options)
    assert _nothing_written(out)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": "b', r"bad\.jsonl:2: truncated"),
        (b'{"id": "ma-3", "prompt": "a"}\n', r"bad\.jsonl:1: duplicate id 'ma-3', first at .*:4"),
        (b'{"prompt": "a", "id": [1]}\n', r"bad\.jsonl:1: id: need a string or an integer"),
        (b'{"input_ids": [999999]}\n', r"bad\.jsonl:1: input_ids: 999999 is outside"),
        (b'{"question": "a"}\n', r"bad\.jsonl:1: no prompt among the keys"),
    ],
)
def test_bad_input_row_is_refused_and_the_old_output_stays(
    tmp_path, target_folder, content, message
):
    bad, out = tmp_path / "bad.jsonl", tmp_path / "out.jsonl"
    bad.write_bytes(content)
    out.write_text("old")
    with pytest.raises(UsageError, match=message):
        run_prompts([*_pool(tmp_path), bad], out, target_folder)
    assert out.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["bad.jsonl", "co.jsonl", "ma.jsonl", "out.jsonl"]


def test_empty_input_and_output_over_an_input_are_refused(tmp_path, target_folder):
    empty = write_rows(tmp_path / "empty.jsonl", [])
    with pytest.raises(UsageError, match="0 of 0 rows are usable"):
        run_prompts([empty], tmp_path / "out.jsonl", target_folder)
    with pytest.raises(UsageError, match="is also an input"):
        run_prompts([empty], tmp_path / "." / "empty.jsonl", target_folder)


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.report.json"])
@pytest.mark.parametrize("is_evaluation", [False, True])
def test_output_and_report_over_a_file_that_is_read_are_refused(
    tmp_path, target_folder, name, is_evaluation
):
    pool, source = _pool(tmp_path), write_rows(tmp_path / name, [{"prompt": "a"}])
    content = source.read_bytes()
    inputs, evaluation = (pool, [source]) if is_evaluation else ([*pool, source], [])
    with pytest.raises(UsageError, match=f"--out .*{name} is also an input"):
        run_prompts(inputs, tmp_path / "o.jsonl", target_folder, evaluation=evaluation)
    assert source.read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == sorted(["co.jsonl", "ma.jsonl", name])


def test_output_or_report_that_is_a_folder_is_refused_before_anything_is_written(
    tmp_path, target_folder
):
    inputs, out = _pool(tmp_path), tmp_path / "out.jsonl"
    for folder in (tmp_path, ""):
        with pytest.raises(UsageError, match=r"--out .*: cannot be written: it is "):
            run_prompts(inputs, type(out)(folder), target_folder)
    report_path(out).mkdir()
    with pytest.raises(UsageError, match=r"report of --out: .*: cannot be written: it is a folder"):
        run_prompts(inputs, out, target_folder)
    assert not out.exists()


@pytest.mark.parametrize("text", ["math", "math=x", "a=1=2", ""])
def test_unreadable_shares_are_refused(text):
    with pytest.raises(UsageError, match="--shares"):
        parse_shares(text)
