# SPDX-License-Identifier: Apache-2.0
"""Bodies and fields out of bounds are refused with the field's name, before they cost anything."""

import time

import pytest

from treespark.errors import UsageError
from treespark.serving.api_error import ApiError
from treespark.serving.limits import (
    COUNTS,
    LENGTHS,
    MAX_BODY_BYTES,
    NUMBERS,
    parse_body,
    refusal_of,
)
from treespark.serving.protocol import (
    LABELS,
    NEUTRAL,
    ChatBody,
    CompletionBody,
    prompts_of,
    validated,
)

MESSAGES = [{"role": "user", "content": "a"}]
IN_CHAT = {"top_logprobs", "max_completion_tokens"}


def refusal(call) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call()
    assert caught.value.status == 400
    assert "\n" not in caught.value.message
    return caught.value


def completion(**fields):
    return validated(CompletionBody, {"prompt": "a"} | fields)


def chat(**fields):
    return validated(ChatBody, {"messages": MESSAGES} | fields)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b"null", "need an object, got NoneType"),
        (b"42", "need an object, got int"),
        (b'"text"', "need an object"),
        (b"[]", "need an object"),
        (b'{"temperature": NaN}', "NaN is not JSON"),
        (b'{"temperature": -Infinity}', "-Infinity is not JSON"),
        (b'{"temperature": 1e999}', "1e999 is beyond the range"),
        (b'{"n": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
        (b'{"prompt": {"a": ["\\uDC00"]}}', "half a surrogate pair"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        (b'{"a":' * 17 + b"1" + b"}" * 17, "nested too deeply"),
        (b"[" * 20_000, "nested too deeply"),
        (b'{"a":' + b"[" * 1_000_000, "nested too deeply"),
    ],
)
def test_a_body_that_is_no_plain_object_is_refused(body, words):
    assert words in refusal(lambda: parse_body(body)).message


def test_a_whole_surrogate_pair_and_sixteen_levels_are_read():
    assert parse_body(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    assert parse_body(b'{"a":' * 16 + b"1" + b"}" * 16)


def test_the_largest_body_is_read_in_a_moment():
    body = b'{"prompt": [' + b"1," * (MAX_BODY_BYTES // 2 - 10) + b"1]}"
    start_s = time.process_time()
    parse_body(body)
    assert time.process_time() - start_s < 2


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_taken_at_its_bounds_and_refused_beyond(name):
    make = chat if name in IN_CHAT else completion
    extra = {"logprobs": True} if name == "top_logprobs" else {}
    extra |= {"echo": True} if name == "max_tokens" else {}
    bounds = NUMBERS[name]
    for value in (bounds.low, bounds.high):
        assert getattr(make(**{name: value}, **extra), name) == value
    for value in (bounds.high + 1, bounds.low - 1, 2**63, -(2**63) - 1, True, "1", [1], {}):
        problem = refusal(lambda value=value: make(**{name: value}, **extra))
        assert problem.param == name, value
        assert name in problem.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["x"] * (COUNTS["stop"] + 1)),
        ("stop", "x" * (LENGTHS["stop"] + 1)),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [1]),
        ("stop_token_ids", [1] * (COUNTS["stop_token_ids"] + 1)),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("model", "x" * (LENGTHS["model"] + 1)),
        ("stream", 1),
        ("echo", "yes"),
        ("stream_options", {"include_usage": True}),
        ("max_tokens", 0),
    ],
)
def test_a_field_out_of_bounds_is_named(field, value):
    assert refusal(lambda: completion(**{field: value})).param == field


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", 3, "temperature 3: Input should be less than or equal to 2"),
        ("n", "2", 'n "2": Input should be a valid integer'),
        ("seed", 10**40, "seed (over 30 digits): Input should be"),
        ("stop_token_ids", [-7], "stop_token_ids.0 -7: Input should be greater than or equal to 0"),
        ("max_tokens", 0, "max_tokens: 0 is allowed only with echo true"),
        ("prompt", 5, "prompt 5: need text, a list of token ids, or a list of either"),
        ("prompt", ["a", 1], "prompt 1: need text, a list of token ids, or a list of either"),
    ],
)
def test_a_refusal_names_field_value_and_what_is_allowed(field, value, message):
    problem = refusal(lambda: prompts_of(completion(**{field: value})))
    assert problem.message.startswith(message)


def test_a_refusal_of_the_engine_is_told_without_its_own_names():
    problem = refusal_of(UsageError("request 'cmpl-7-0': stop_token_ids 9, allowed: 0..5"))
    assert (problem.message, problem.param) == ("stop_token_ids 9, allowed: 0..5", "stop_token_ids")
    problem = refusal_of(UsageError("request 'cmpl-7-0': the prompt is empty"))
    assert (problem.message, problem.param) == ("prompt is empty", "prompt")
    assert refusal_of(UsageError("something else")).param is None


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], [""], ["a", []], ["a", 1], [1, "a"], [1.0], [True], {}, 1]
)
def test_a_prompt_that_is_none_is_refused(prompt):
    assert refusal(lambda: prompts_of(completion(prompt=prompt))).param == "prompt"


def test_prompts_come_as_text_or_ids_one_or_many():
    assert prompts_of(completion(prompt="ab")) == ["ab"]
    assert prompts_of(completion(prompt=[1, 2])) == [[1, 2]]
    assert prompts_of(completion(prompt=["a", "b"])) == ["a", "b"]
    assert prompts_of(completion(prompt=[[1], [2]])) == [[1], [2]]
    refusal(lambda: prompts_of(completion(prompt=["a"] * (COUNTS["prompt"] + 1))))


@pytest.mark.parametrize("name", sorted(set(CompletionBody.model_fields) - {"prompt"}))
def test_null_is_the_same_as_absent(name):
    assert completion(**{name: None}) == completion()


@pytest.mark.parametrize("name", NEUTRAL)
def test_an_unsupported_field_is_refused_unless_it_asks_for_nothing(name):
    for value in NEUTRAL[name]:
        assert completion(**{name: value}) == completion()
    problem = refusal(lambda: completion(**{name: "something"}))
    assert problem.param == name
    assert "not supported" in problem.message


@pytest.mark.parametrize(
    "field",
    [{"guided_json": {}}, {"prompt_embeds": "x"}, {"no_such_field": 1}, {"best_of": True},
     {"response_format": {"type": "json_object"}}, {"prompt_logprobs": 1}],
)  # fmt: skip
def test_an_unknown_field_is_never_ignored(field):
    assert refusal(lambda: completion(**field)).param == next(iter(field))


def test_a_label_changes_nothing():
    assert completion(**dict.fromkeys(LABELS, "x")) == completion()


def test_a_field_name_of_a_megabyte_comes_back_short():
    problem = refusal(lambda: completion(**{"x\n\x1b" * 500_000: 1}))
    assert len(problem.message) < 600
    assert "\x1b" not in problem.message


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "robot", "content": "a"}], [{"role": "user"}], [{"content": "a"}], ["a"],
     [{"role": "user", "content": 1}], [{"role": "user", "content": []}],
     [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
     [{"role": "user", "content": "a", "name": "b"}]],
)  # fmt: skip
def test_messages_that_cannot_be_read_are_refused(messages):
    assert refusal(lambda: chat(messages=messages)).param == "messages"


def test_text_parts_and_the_later_word_for_system_are_read():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "developer", "content": parts}])
    assert body.messages[0].as_text() == {"role": "system", "content": "a\nb"}


@pytest.mark.parametrize(
    "fields",
    [{"top_logprobs": 1}, {"chat_template_kwargs": {"tokenize": False}}, {"chat_template": "{{"}],
)
def test_what_a_chat_may_not_ask_is_refused(fields):
    assert refusal(lambda: chat(**fields)).param == next(iter(fields))
