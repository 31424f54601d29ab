# SPDX-License-Identifier: Apache-2.0
"""Rows, their order and their anchors."""

from collections import Counter

import pytest

from tests.training.tiny_run import random_rows, write
from treespark.data.batches import collate, load_rows, rows_of_step, split_holdout
from treespark.errors import UsageError


def load(path, **changes):
    return load_rows([path], **{"max_tokens": 64, "block_size": 4, "vocab_size": 256, **changes})


@pytest.fixture
def rows(tmp_path):
    return load(write(tmp_path / "rows.jsonl", random_rows(9)))[0]


def test_anchors_are_supervised_ascending_distinct_and_deterministic(rows):
    draws = rows_of_step(rows, 3, 4, seed=1)
    batch, again = (collate(draws, num_anchors=n, num_tree_anchors=3, seed=1) for n in (64, 64))
    assert (batch.anchors == again.anchors).all()
    for i, (_, row) in enumerate(draws):
        chosen = batch.anchors[i][batch.keep[i]].tolist()
        assert chosen == list(range(row.prompt_len, len(row.token_ids) - 1))
        assert int(batch.tree_keep[i].sum()) == 3
        few = collate(draws, num_anchors=5, num_tree_anchors=2, seed=1).anchors[i].tolist()
        assert few == sorted(set(few))
        assert set(few) <= set(chosen)


def test_every_row_once_per_epoch_and_the_holdout_never(rows):
    train, held = split_holdout(rows, 2, seed=5)
    drawn = [row.id for step in range(7) for _, row in rows_of_step(train, step, 3, seed=5)]
    assert not {row.id for row in held} & set(drawn)
    for epoch in range(3):
        assert Counter(drawn[epoch * 7 : epoch * 7 + 7]) == Counter(row.id for row in train)


def test_rows_are_cut_and_drops_are_counted(tmp_path):
    given = random_rows(3)
    given[1]["output_token_ids"] = [1] * 7
    given[2] = {**given[0], "id": "twin"}
    rows, dropped = load(write(tmp_path / "r.jsonl", given), max_tokens=16)
    assert [len(row.token_ids) for row in rows] == [min(16, len(rows[0].token_ids))]
    assert dropped == {"too few supervised tokens": 1, "same tokens as an earlier row": 1}


def test_bad_files_are_refused_by_line(tmp_path):
    path = write(tmp_path / "r.jsonl", random_rows(2))
    with pytest.raises(UsageError, match=r"r\.jsonl:1: prompt_token_ids: id"):
        load(path, vocab_size=3)
    path.write_text(path.read_text()[:-9])
    with pytest.raises(UsageError, match=r"r\.jsonl:2"):
        load(path)
    path.write_text("")
    with pytest.raises(UsageError, match="0 of 0 rows usable"):
        load(path)


@pytest.mark.parametrize("row_id", [["a"], {"a": 1}, 1.5, True, None])
def test_id_that_is_no_string_or_integer_is_refused(tmp_path, row_id):
    given = random_rows(2)
    given[1]["id"] = row_id
    with pytest.raises(UsageError, match=r"r\.jsonl:2: id: need a string or an integer, got "):
        load(write(tmp_path / "r.jsonl", given))


def test_integer_ids_are_taken(tmp_path):
    given = [{**row, "id": i} for i, row in enumerate(random_rows(2))]
    assert [row.id for row in load(write(tmp_path / "r.jsonl", given))[0]] == ["0", "1"]


def test_rows_longer_than_the_targets_context_are_refused(tmp_path):
    path = write(tmp_path / "r.jsonl", random_rows(2))
    assert load(path, max_context=64)[0]
    with pytest.raises(UsageError, match=r"data\.max_tokens 64: allowed 2\.\.63 \(context"):
        load(path, max_context=63)
