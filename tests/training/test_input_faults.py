# SPDX-License-Identifier: Apache-2.0
"""Input that cannot be trained on is refused by name before anything is made; what can be is."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving_world import TEXT_VOCAB, world
from tests.serving_world import drafter as tiny_drafter
from tests.training.tiny_run import MASK, random_rows, recipe, tiny_world, write
from treespark.data.batches import Row, collate, load_rows
from treespark.errors import UsageError
from treespark.training import loop
from treespark.training.losses import combine
from treespark.training.objective import MicroBatch, Objective, micro_batch_terms
from treespark.training.replay import CoverageSettings
from treespark.tree.policy import TreePolicy

BLOCK = 4
WEIGHTS = {"ce": 0.1, "l1": 0.9, "confidence": 1.0, "survival": 0.1, "coverage": 0.1}


def load(*paths, **options):
    return load_rows(paths, **{"max_tokens": 64, "block_size": BLOCK, "vocab_size": 272, **options})


def lines(rows):
    return [json.dumps(row).encode() for row in rows]


def refused(folder, rows, match, **changes):
    """Training raises one line and leaves nothing behind."""
    with pytest.raises(UsageError, match=match) as caught:
        loop.train(recipe(folder / "run", rows, **changes))
    assert "\n" not in str(caught.value)
    assert not (folder / "run").exists()


# --- files ------------------------------------------------------------------------------------


def test_byte_order_mark_line_ends_and_blank_lines_change_no_row(tmp_path):
    rows = lines(random_rows(3))
    forms = {
        "plain": b"\n".join(rows) + b"\n",
        "bom": b"\xef\xbb\xbf" + b"\n".join(rows) + b"\n",
        "crlf": b"\r\n".join(rows) + b"\r\n",
        "blank": b"\n\n" + b"\n  \n".join(rows) + b"\n\n",
        "open": b"\n".join(rows),
    }
    found = {}
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
        found[name] = [(r.id, r.prompt_len, r.token_ids.tolist()) for r in load(tmp_path / name)[0]]
    assert len(found["plain"]) == 3
    assert all(rows == found["plain"] for rows in found.values())


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (b'{"id": "x", "prompt_token_ids": [1', "truncated"),
        (b'{"id": "x" "prompt_token_ids": [1]}\n', "malformed JSON"),
        (b"[1, 2]\n", "need an object, got list"),
        (b'{"id": "\xff"}\n', "not UTF-8"),
        (b'{"id": "r0", "prompt_token_ids": [1], "output_token_ids": [2]}\n', "duplicate id 'r0'"),
    ],
    ids=["truncated", "malformed", "no object", "no text", "duplicate"],
)
def test_a_bad_line_stops_training_with_file_and_line(tmp_path, last, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines(random_rows(2))) + b"\n" + last)
    refused(tmp_path, path, rf"rows\.jsonl:3: {message}")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt_token_ids", None, "no field prompt_token_ids"),
        ("output_token_ids", None, "no field output_token_ids"),
        ("output_token_ids", "1 2 3", "must be a list of token ids"),
        ("output_token_ids", [1.0, 2.0], "must be a list of token ids"),
        ("output_token_ids", [True], "must be a list of token ids"),
        ("output_token_ids", [[1], [2]], "must be a list of token ids"),
        ("prompt_token_ids", [-1], r"id -1, allowed 0\.\.271"),
        ("prompt_token_ids", [272], r"id 272, allowed 0\.\.271"),
        ("output_token_ids", [2**63], r"id 9223372036854775808, allowed 0\.\.271"),
    ],
)
def test_a_row_without_token_ids_of_the_vocabulary_is_refused(tmp_path, field, value, message):
    rows = random_rows(2)
    if value is None:
        del rows[1][field]
    else:
        rows[1][field] = value
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UsageError, match=rf"rows\.jsonl:2: .*{message}"):
        load(path)


def test_an_id_in_two_files_is_named_with_both_places(tmp_path):
    one, two = (write(tmp_path / f"{n}.jsonl", random_rows(2, seed)) for n, seed in ("a1", "b2"))
    with pytest.raises(UsageError, match=r"b\.jsonl:1: duplicate id 'r0', first at .*a\.jsonl:1"):
        load(one, two)


def test_a_missing_file_is_named(tmp_path):
    refused(tmp_path, tmp_path / "gone.jsonl", r"gone\.jsonl: cannot be read: No such file")


# --- rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_empty_data_is_refused(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    refused(tmp_path, path, r"rows\.jsonl: 0 of 0 rows usable \(nothing in the files\)")


def test_data_of_which_nothing_is_left_is_refused_with_the_reasons(tmp_path):
    rows = random_rows(3)
    rows[0]["output_token_ids"] = []
    rows[1]["output_token_ids"] = [1] * (2 * BLOCK - 1)
    rows[2]["prompt_token_ids"] = [1] * 60
    path = write(tmp_path / "rows.jsonl", rows)
    refused(tmp_path, path, r"0 of 3 rows usable \(3 too few supervised tokens\)")


def test_more_held_out_rows_than_there_are_is_refused(tmp_path):
    path = write(tmp_path / "rows.jsonl", random_rows(3))
    refused(tmp_path, path, "holdout_rows 3: only 3 rows", data={"holdout_rows": 3})


def test_answers_of_another_target_are_refused_by_line(tmp_path):
    rows = random_rows(3)
    ours = tiny_world().target.fingerprint
    for row, made_by in zip(rows, (ours, "server", "f" * 64), strict=True):
        row["gen"] = {"fingerprint": made_by, "model": "other"}
    path = write(tmp_path / "rows.jsonl", rows)
    refused(tmp_path, path, r"rows\.jsonl:3: answer of the target f{16} \(other\), this target is")
    assert len(load(write(path, rows[:2]), fingerprint=ours)[0]) == 2


def micro_batch(rows):
    """The micro-batch of rows of token ids [prompt, answer], and a drafter for it."""
    target = tiny_world().target
    target.set_taps([0, 2])
    drafter = tiny_drafter(target, block_size=BLOCK, mask_token_id=MASK)
    made = [Row(str(i), np.array(p + a), len(p)) for i, (p, a) in enumerate(rows)]
    batch = collate(list(enumerate(made)), num_anchors=6, num_tree_anchors=3, seed=0)
    outputs = target.sequence_outputs(batch.input_ids, batch.lengths.tolist())
    return drafter.train(), MicroBatch(batch, *outputs)


def losses_and_gradients(rows):
    drafter, micro = micro_batch(rows)
    objective = Objective(TreePolicy(BLOCK, 2, 6), CoverageSettings())
    found = micro_batch_terms(drafter, micro, objective, WEIGHTS)
    total, values = combine(found.terms, WEIGHTS, denominators=found.plan.denominators)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    grads = torch.autograd.grad(total, trained, allow_unused=True)
    return found, values, [g for g in grads if g is not None]


@pytest.mark.parametrize("length", range(2 * BLOCK + 1))
def test_an_answer_of_any_length_gives_finite_losses(length):
    found, values, grads = losses_and_gradients([([5, 6, 7], list(range(30, 30 + length)))])
    assert all(value.isfinite() for value in values.values())
    assert all(bool(grad.isfinite().all()) for grad in grads)
    # The first token of an answer is prefill's own, so two are needed for one label.
    labels = sum(min(BLOCK, length - 1 - a) for a in range(max(0, length - 1)))
    counted = float(found.terms["ce"].denominator)
    assert (counted > 0) == (labels > 0)
    if not labels:
        assert all(float(value) == 0.0 for value in values.values())
        assert not any(bool(grad.any()) for grad in grads)


def test_an_answer_too_short_for_a_label_adds_nothing_to_its_batch():
    full = ([9, 8], list(range(40, 52)))
    alone, _, grads = losses_and_gradients([full])
    both, _, with_short = losses_and_gradients([full, ([1, 2, 3], [4])])
    for name, term in alone.terms.items():
        # 1e-5: another number of rows in the products of the backbone
        for part in ("numerator", "denominator"):
            one, other = getattr(term, part), getattr(both.terms[name], part)
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for one, other in zip(grads, with_short, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# --- weights ----------------------------------------------------------------------------------


def test_a_target_with_a_nan_is_refused_by_name_before_training(tmp_path):
    folder = shutil.copytree(tiny_world().target.path, tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rows = write(tmp_path / "rows.jsonl", random_rows(3))
    message = r"model\.layers\.2\.mlp\.up_proj\.weight holds NaN"
    refused(tmp_path, rows, message, target={"model": folder})


# --- resume -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of one step, and its rows."""
    root = tmp_path_factory.mktemp("begun")
    rows = write(root / "rows.jsonl", random_rows(5))
    loop.train(recipe(root / "run", rows, train={"max_steps": 1}))
    return root


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("drafter", "mask_token_id", 271),
        ("drafter", "head_dim", 8),
        ("drafter", "target_layer_ids", [0, 1]),
        ("policy", "budget", 5),
        ("data", "num_anchors", 5),
        ("losses", "survival", 0.2),
        ("optim", "warmup_ratio", 0.5),
        ("train", "seed", 7),
        ("train", "max_steps", 2),
        ("train", "dtype", "bfloat16"),
        ("target", "dtype", "bfloat16"),
    ],
)
def test_another_setting_on_resume_is_refused_by_name(begun, section, key, value):
    changes = {"train": {"max_steps": 1}}
    changes[section] = {**changes.get(section, {}), key: value}
    before = {p: p.stat().st_mtime_ns for p in (begun / "run").rglob("*") if p.is_file()}
    with pytest.raises(
        UsageError, match=rf"step-00000001: {section}\.{key} was .*, now "
    ) as caught:
        loop.train(recipe(begun / "run", begun / "rows.jsonl", **changes))
    assert "\n" not in str(caught.value)
    assert before == {p: p.stat().st_mtime_ns for p in (begun / "run").rglob("*") if p.is_file()}


def test_another_target_on_resume_is_refused_by_name(begun):
    other = world("llama", TEXT_VOCAB, seed=1, eos=256).target.path
    with pytest.raises(UsageError, match=r"step-00000001: target\.fingerprint was .*, now "):
        loop.train(recipe(begun / "run", begun / "rows.jsonl", other, train={"max_steps": 1}))


def test_settings_that_change_no_result_may_differ_on_resume(begun, tmp_path):
    shutil.copytree(begun / "run", tmp_path / "run")
    train = {"max_steps": 1, "save_every": 3, "chunk_rows": 5, "keep_logits": True}
    train |= {"micro_batch": 2, "decode_tokens": 5}
    loop.train(recipe(tmp_path / "run", begun / "rows.jsonl", train=train))
