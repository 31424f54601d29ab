# SPDX-License-Identifier: Apache-2.0
"""One rendering of a prompt for training, serving and evaluation."""

import pytest

from tests.data.tiny import CHATML, THINKING, make_tokenizer
from treespark.errors import UsageError
from treespark.target.template import (
    load_tokenizer,
    render_prompt,
    render_text,
    template_fingerprint,
    user_turn_marks,
)


def test_rendered_ids_are_those_of_the_chat_template_with_generation_prompt():
    tokenizer = make_tokenizer()
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hé 12"}], add_generation_prompt=True, return_dict=False
    )
    assert render_prompt(tokenizer, "Hé 12") == expected
    assert render_text(tokenizer, "Hé 12").endswith("Hé 12<|im_end|>\n<|im_start|>assistant\n")


def test_text_and_its_single_message_render_alike():
    tokenizer = make_tokenizer()
    messages = [{"role": "user", "content": "a"}]
    assert render_prompt(tokenizer, "a") == render_prompt(tokenizer, messages)


def test_no_special_token_is_added_to_the_template():
    tokenizer = make_tokenizer()
    tokenizer.add_bos_token = tokenizer.add_eos_token = True
    ids = render_prompt(tokenizer, "a")
    assert tokenizer.decode(ids) == render_text(tokenizer, "a")


def test_thinking_is_off_where_the_template_knows_it():
    assert render_text(make_tokenizer(THINKING), "a").endswith("assistant\n<think></think>\n")


def test_serving_turns_continue_the_training_prompt():
    """Messages with a history begin with the ids of the first turn alone."""
    tokenizer = make_tokenizer()
    first = render_prompt(tokenizer, "a")
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    later = render_prompt(tokenizer, [{"role": r, "content": c} for r, c in turns])
    assert later[: len(first)] == first


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_user_turn_marks_surround_exactly_the_user_turn(template):
    before, after = user_turn_marks(make_tokenizer(template))
    assert before == "<|im_end|>\n<|im_start|>user\n"
    assert after == "<|im_end|>\n<|im_start|>assistant\n"


def test_fingerprint_tells_templates_apart():
    prints = {template_fingerprint(make_tokenizer(t)) for t in (CHATML, THINKING, CHATML + " ")}
    assert len(prints) == 3


def test_tokenizer_without_chat_template_is_refused(tmp_path):
    make_tokenizer(None).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="no chat template"):
        load_tokenizer(tmp_path)


def test_missing_and_empty_tokenizer_folders_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
