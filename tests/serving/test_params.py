# SPDX-License-Identifier: Apache-2.0
"""Every field of SamplingParams is checked, and the refusal names field, value and range."""

import dataclasses

import pytest

from treespark.errors import UsageError
from treespark.serving.params import SamplingParams

NAN, INF = float("nan"), float("inf")

REFUSED = {
    "max_tokens": [0, -1, 2.5, True, None, "3", NAN],
    "stop": ["", ("a", ""), (1,), None, 5, {"a": 1}],
    "stop_token_ids": [(-4,), (1.0,), (True,), None, 3, "ab"],
    "ignore_eos": [0, 1, None, "yes"],
    "temperature": [-0.1, 2.1, NAN, INF, -INF, True, None, "1", 10**400],
    "top_p": [0, 0.0, -0.5, 1.01, NAN, INF, True, None],
    "top_k": [-2, 1.5, True, None],
    "min_p": [-0.1, 1.1, NAN, True, None],
    "seed": [1.0, True, 2**63, -(2**63) - 1, 10**5000],
    "logprobs": [-1, 21, 10**6, 1.0, True],
    "min_tokens": [-1, 129, 1.0, True, None],
    "include_stop_str_in_output": [0, 1, None, "yes"],
}
ALLOWED = {
    "max_tokens": [1, 10**9],
    "stop": [(), "a", ["a", "b"], ("안",)],
    "stop_token_ids": [(), [1, 2], (0,)],
    "ignore_eos": [True],
    "temperature": [0, 0.0, 5e-324, 1, 2],
    "top_p": [1e-9, 1, 0.5],
    "top_k": [-1, 0, 1, 10**9],
    "min_p": [0, 1, 0.05],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "logprobs": [None, 0, 20],
    "min_tokens": [0, 128],
    "include_stop_str_in_output": [True],
}


def test_every_field_has_values_that_are_refused_and_values_that_are_not():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == set(REFUSED) == set(ALLOWED)


def cases(table: dict):
    """One case per value; its number in the id, as the largest values cannot be printed."""
    return [
        pytest.param(name, value, id=f"{name}-{i}")
        for name, values in table.items()
        for i, value in enumerate(values)
    ]


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_a_wrong_value_is_refused_in_one_short_line_that_names_it(name, value):
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} ")
    assert "allowed: " in message
    assert "\n" not in message
    assert len(message) < 250


@pytest.mark.parametrize(("name", "value"), cases(ALLOWED))
def test_the_ends_of_a_range_are_in_it(name, value):
    SamplingParams(**{name: value})


def test_long_values_are_cut_in_the_message():
    with pytest.raises(UsageError) as caught:
        SamplingParams(temperature="x" * 10**6)
    assert len(str(caught.value)) < 250


def test_lists_are_stored_as_tuples():
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1])
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1,))
    assert SamplingParams(stop="a").stop == ("a",)
    hash(params)
