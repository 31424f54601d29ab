# SPDX-License-Identifier: Apache-2.0
"""Every row format yields its first user turn; wrong rows are named."""

import pytest

from treespark.data.formats import first_user_turn
from treespark.errors import UsageError

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "Q"}
LATER = [{"role": "assistant", "content": "A"}, {"role": "user", "content": "Q2"}]


def _read(row):
    return first_user_turn(row, "f:1", lambda: ("<U>", "<A>"))


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [SYSTEM, USER, *LATER]},
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "Q"}]},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"messages": [SYSTEM, USER, *LATER]},
        {"messages": [{"role": "prompter", "content": "Q"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}]},
        {"turns": ["Q", "Q2"]},
        {"prompt": "Q", "response": "A", "text": "x"},
        {"prompt": [SYSTEM, USER]},
        {"instruction": "Q"},
        {"instruction": "Q", "input": ""},
        {"instruction": "Q", "input": None, "output": "A"},
        {"text": "<S>s<U>Q<A>A<U>Q2<A>A2"},
        {"text": "<U>Q"},
        {"prompt": None, "messages": [USER]},
    ],
)
def test_first_user_turn_of_every_format(row):
    assert _read(row) == "Q"


def test_input_follows_its_instruction_after_an_empty_line():
    assert _read({"instruction": "Sum up", "input": "1 2"}) == "Sum up\n\n1 2"


def test_tokenised_rows_keep_the_ids_before_the_first_supervised_one():
    assert _read({"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 0]}) == [5, 6]
    assert _read({"input_ids": [5, 6]}) == [5, 6]
    assert _read({"input_ids": [5, 6], "loss_mask": [0, 0]}) == [5, 6]


@pytest.mark.parametrize(
    "row", [{"messages": [SYSTEM]}, {"turns": []}, {"input_ids": []}, {"conversations": []}]
)
def test_row_without_a_user_turn_yields_none(row):
    assert _read(row) is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "Q"}, "no prompt among the keys ['question']"),
        ({}, "no prompt among the keys []"),
        ({"prompt": 3}, "prompt: need a string, got int"),
        ({"messages": "Q"}, "messages: need a list, got str"),
        ({"messages": ["Q"]}, "messages: need objects, got str"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        ({"messages": [{"role": "user"}]}, "not text"),
        ({"turns": [{"role": "user"}]}, "turns: need strings"),
        ({"instruction": "Q", "input": 1}, "input: need a string"),
        ({"text": "Q"}, "no user turn '<U>'"),
        ({"input_ids": [1, True]}, "input_ids: need integers"),
        ({"input_ids": [1, -1]}, "input_ids: need integers"),
        ({"input_ids": [1, 2], "loss_mask": [0]}, "loss_mask: need 2 values"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "loss_mask: need 2 values"),
    ],
)
def test_wrong_row_is_named_with_file_line_and_key(row, reason):
    with pytest.raises(UsageError) as caught:
        _read(row)
    assert str(caught.value).startswith("f:1: ")
    assert reason in str(caught.value)
