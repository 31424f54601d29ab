# SPDX-License-Identifier: Apache-2.0
"""The doctor finds what was broken on purpose, and nothing on a drafter that works."""

import json
import shutil

import pytest
import torch

from tests.bench import doctor_world
from tests.drafter.helpers import edit_config, edit_tensors
from tests.serving_world import TEXT_VOCAB, world
from treespark import cli
from treespark.bench.doctor import examine, run_doctor
from treespark.bench.workload import load_prompts
from treespark.drafter.eagle3 import Eagle3Config, Eagle3Drafter
from treespark.errors import UsageError
from treespark.target.model import TargetModel

GOOD = 3.0


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learned") / "drafter"
    doctor_world.learned().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(learned, tmp_path):
    return shutil.copytree(learned, tmp_path / "drafter")


def asked(tmp_path, model):
    return load_prompts([doctor_world.questions(tmp_path / "questions.jsonl")], model)


def diagnose(folder, tmp_path, model=None):
    model = model or doctor_world.target()
    return examine(model, folder, asked(tmp_path, model), doctor_world.TOKENS)


def failed(found):
    return [check.name for check in found.checks if not check.passed]


def test_a_drafter_that_works_is_healthy(folder, tmp_path):
    found = diagnose(folder, tmp_path)
    assert found.healthy
    assert found.acceptance["chain"] > GOOD
    assert found.acceptance["tree of 32"] >= found.acceptance["chain"]
    assert {probe["cause"] for probe in found.probes} == {
        None,
        "block layout",
        "layer offset",
        "mask token",
    }
    others = [probe["acceptance"] for probe in found.probes if probe["cause"]]
    assert max(others) < found.probes[0]["acceptance"]


BROKEN = [
    ({"target_layer_ids": [2]}, "layer offset: with target_layer_ids [1]"),
    ({"target_layer_ids": [0]}, "layer offset: with target_layer_ids [1]"),
    (
        {"anchor_predicts_next": False, "block_size": 3},
        "block layout: with anchor_predicts_next true, block_size 4",
    ),
    # By heart it also knows what a fifth slot says.
    (
        {"anchor_predicts_next": False},
        "block layout: with anchor_predicts_next true, block_size",
    ),
    ({"mask_token_id": 200}, "mask token: with mask_token_id 258"),
]


@pytest.mark.parametrize(("change", "cause"), BROKEN)
def test_what_is_wrong_in_the_config_is_named_with_what_helps(folder, tmp_path, change, cause):
    depth = change.get("block_size", doctor_world.DEPTH)
    tree = {"tree": {"depth": depth, "branching": 4, "budget": 32}}
    edit_config(folder, lambda raw: raw.update(change | tree))
    found = diagnose(folder, tmp_path)
    assert not found.healthy
    assert found.causes[0].startswith(cause)
    right = max(probe["acceptance"] for probe in found.probes)
    assert right > GOOD
    assert f"reach {right:.2f} tokens a round" in found.causes[0]


def test_numbers_too_large_for_a_dtype_are_named(folder, tmp_path):
    # The norm behind it takes the factor out again, where it can be written down.
    edit_tensors(folder, lambda tensors: tensors["fc.weight"].mul_(1e5))
    assert diagnose(folder, tmp_path).healthy
    half = TargetModel.from_pretrained(doctor_world.target().path, dtype="float16", device="cpu")
    found = diagnose(folder, tmp_path, half)
    assert "numbers" in failed(found)
    assert found.causes[0].startswith("dtype: with the drafter in float32")


def test_a_drafter_of_another_target_is_named(folder, tmp_path):
    other = world(vocab=TEXT_VOCAB, eos=271, seed=4).target
    found = diagnose(folder, tmp_path, other)
    assert failed(found) == ["target", "acceptance"]
    assert "target_fingerprint" in found.checks[0].detail
    edit_config(folder, lambda raw: raw.update(target_fingerprint=None))
    found = diagnose(folder, tmp_path, other)
    assert failed(found) == ["acceptance"]
    assert found.causes[0].startswith("another target: no change")


def test_another_embedding_in_the_folder_is_named(tmp_path, capsys):
    target = doctor_world.target()
    drafter = doctor_world.drafter(
        target, target_layer_ids=[1], markov_rank=8, block_size=doctor_world.DEPTH
    )
    drafter.attach_target(target.embed_weight + 1, target.head_weight)
    drafter.export_deepspec(tmp_path / "deepspec")
    found = diagnose(tmp_path / "deepspec", tmp_path)
    assert failed(found) == ["embedding and head", "acceptance"]
    assert not found.causes
    questions = doctor_world.questions(tmp_path / "questions.jsonl")
    assert not run_doctor(target.path, tmp_path / "deepspec", questions, dtype="float32")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("the problems above are embedding and head, acceptance")


def test_sizes_that_do_not_fit_are_said_without_a_forward_pass(folder, tmp_path):
    edit_config(folder, lambda raw: raw.update(num_target_layers=9, vocab_size=300))
    found = diagnose(folder, tmp_path)
    assert found.acceptance == {}
    assert "vocab_size: the drafter has 300, the target 272" in found.checks[0].detail
    assert "num_target_layers: the drafter has 9, the target 4" in found.checks[0].detail
    assert found.causes == ["another target: its sizes differ, see above"]


def test_what_differs_from_the_training_record_is_named(folder, tmp_path):
    record = {
        "trained": {"mask_token_id": 7, "block_size": doctor_world.DEPTH},
        "target": {"template": "0123", "tokenizer": None},
        "held_out": {"chain": 40.0},
    }
    (folder / "treespark.json").write_text(json.dumps(record))
    found = diagnose(folder, tmp_path)
    assert failed(found) == ["training record", "template", "acceptance"]
    details = {check.name: check.detail for check in found.checks}
    assert "mask_token_id was 7 in training, config.json says 258" in details["training record"]
    assert "the target's template is not the one of training" in details["template"]
    assert "reached 40.00" in details["acceptance"]


def test_a_drafter_that_had_not_learnt_is_not_blamed_on_its_target(tmp_path):
    made = doctor_world.drafter(doctor_world.target(), target_layer_ids=[1], mask_token_id=258)
    made.save_pretrained(tmp_path / "random")
    record = {"held_out": {"chain": 1.01}}
    (tmp_path / "random" / "treespark.json").write_text(json.dumps(record))
    found = diagnose(tmp_path / "random", tmp_path)
    assert found.causes == ["training: it had not learnt to draft when it ended"]


def test_a_drafter_of_this_target_by_its_fingerprint_is_not_blamed_on_it(tmp_path):
    target = doctor_world.target()
    made = doctor_world.drafter(target, target_layer_ids=[1], mask_token_id=258)
    made.save_pretrained(tmp_path / "random")
    (tmp_path / "random" / "treespark.json").write_text(json.dumps({"steps": 4, "held_out": {}}))
    edit_config(tmp_path / "random", lambda raw: raw.update(target_fingerprint=target.fingerprint))
    found = diagnose(tmp_path / "random", tmp_path)
    assert found.causes[0].startswith("training: no change of layout")
    assert "the training record has no held-out rows" in found.checks[-1].detail


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"held_out": 5}, "held_out is 5; need an object"),
        ({"held_out": {"chain": "x"}}, r"held_out\.chain is 'x'; need a number"),
        ({"steps": [1]}, r"steps is \[1\]; need a number"),
        ({"trained": [1]}, r"trained is \[1\]; need an object"),
        ({"target": "x"}, "target is 'x'; need an object"),
    ],
)
def test_a_record_of_another_shape_is_named_before_the_target_is_loaded(
    folder, tmp_path, record, message
):
    (folder / "treespark.json").write_text(json.dumps(record))
    with pytest.raises(UsageError, match=rf"treespark\.json {message}"):
        run_doctor(tmp_path / "nowhere", folder)


def test_a_template_that_the_drafter_does_not_know_is_named(folder, tmp_path):
    shutil.copytree(doctor_world.target().path, tmp_path / "target")
    other = TargetModel.from_pretrained(tmp_path / "target", dtype="float32", device="cpu")
    # As the drafter has seen the questions: by a template that this target no longer has.
    seen = [
        other.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in doctor_world.QUESTIONS
    ]
    other.tokenizer.chat_template = "{% for m in messages %}Q: {{ m.content }} A:{% endfor %}"
    path = tmp_path / "seen.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in seen))
    found = examine(other, folder, load_prompts([path], other), doctor_world.TOKENS)
    assert found.causes[0].startswith("template: without the chat template")


def test_the_chain_drafter_is_examined_without_layout_and_mask(tmp_path):
    target = doctor_world.target()
    config = Eagle3Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=24,
        block_size=3,
        target_layer_ids=[0, 1, 2],
        num_target_layers=target.num_layers,
        max_position_embeddings=target.max_context,
    )
    torch.manual_seed(0)
    Eagle3Drafter.init_from_target(config, target.embed_weight, target.head_weight).save_pretrained(
        tmp_path / "eagle3"
    )
    found = diagnose(tmp_path / "eagle3", tmp_path)
    assert {probe["cause"] for probe in found.probes} == {None, "normed residual", "template"}
    assert list(found.acceptance) == ["chain"]
    assert not found.healthy


def test_more_prompts_than_are_built_in_are_refused_before_loading(folder, monkeypatch, capsys):
    args = ["treespark", "doctor", "nowhere", str(folder), "--num-prompts", "21"]
    monkeypatch.setattr("sys.argv", args)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "--num-prompts 21: 20 are built in" in capsys.readouterr().err


@pytest.mark.parametrize("broken", [False, True])
def test_the_verb_says_it_as_json_and_by_its_exit_code(
    folder, tmp_path, monkeypatch, capsys, broken
):
    if broken:
        edit_config(folder, lambda raw: raw.update(target_layer_ids=[2]))
    questions = doctor_world.questions(tmp_path / "questions.jsonl")
    options = ["--prompts", questions, "--max-tokens", doctor_world.TOKENS, "--json"]
    args = ["doctor", doctor_world.target().path, folder, "--dtype", "float32", *options]
    monkeypatch.setattr("sys.argv", ["treespark", *map(str, args)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    facts = json.loads(capsys.readouterr().out)
    assert stopped.value.code == int(broken)
    assert facts["healthy"] is not broken
    assert bool(facts["causes"]) is broken
