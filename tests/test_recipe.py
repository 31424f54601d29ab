# SPDX-License-Identifier: Apache-2.0
"""Recipes: what is refused and with which words, paths, overrides, `extends`, and the dump."""

import inspect
import re
import types
import typing
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from treespark import recipe as recipes
from treespark.errors import UsageError
from treespark.recipe import dump_recipe, load_recipe

MINIMAL = """\
target:
  model: ../target
drafter:
  num_attention_heads: 6
  num_key_value_heads: 2
  head_dim: 96
  intermediate_size: 1536
data:
  continuations: [a.jsonl, /data/b.jsonl]
train:
  epochs: 2
output:
  dir: run
"""


@pytest.fixture
def write(tmp_path):
    """Write a recipe file and return its path."""

    def write(text, name="recipe.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def refusal(path, *overrides):
    with pytest.raises(UsageError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_are_the_published_recipe(write):
    recipe = load_recipe(write(MINIMAL))
    assert (recipe.policy.depth, recipe.policy.branching, recipe.policy.budget) == (7, 4, 32)
    losses = recipe.losses
    weights = (losses.ce, losses.l1, losses.confidence, losses.survival, losses.coverage)
    assert weights == (0.1, 0.9, 1.0, 0.1, 0.1)
    assert (losses.gamma, losses.top_j, losses.margin, losses.cap) == (4.0, 4, 1.0, 4.0)
    assert (recipe.optim.lr, recipe.optim.warmup_ratio, recipe.optim.weight_decay) == (
        6e-4,
        0.04,
        0,
    )
    assert (recipe.data.num_anchors, recipe.data.tree_anchors) == (512, 128)
    assert (recipe.train.global_batch, recipe.train.seed) == (64, 42)


def test_paths_are_relative_to_the_recipe_and_overrides_to_the_current_folder(
    write, tmp_path, monkeypatch
):
    path = write(MINIMAL)
    recipe = load_recipe(path)
    assert recipe.target.model == tmp_path.parent / "target"
    assert recipe.data.continuations == (tmp_path / "a.jsonl", Path("/data/b.jsonl"))
    assert recipe.output.dir == tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    overridden = load_recipe(path, ["output.dir=other", "data.continuations=[c.jsonl]"])
    assert overridden.output.dir == elsewhere / "other"
    assert overridden.data.continuations == (elsewhere / "c.jsonl",)


def path_fields(section, prefix=()):
    for name, field in section.model_fields.items():
        annotations = [field.annotation, *typing.get_args(field.annotation)]
        if Path in annotations:
            yield (*prefix, name)
        for annotation in annotations:
            if (
                inspect.isclass(annotation)
                and not isinstance(annotation, types.GenericAlias)
                and issubclass(annotation, BaseModel)
            ):
                yield from path_fields(annotation, (*prefix, name))


def test_every_path_of_a_recipe_is_made_absolute():
    assert set(path_fields(recipes.Recipe)) == set(recipes.PATH_KEYS)


def test_overrides_replace_single_values_in_order(write):
    recipe = load_recipe(
        write(MINIMAL),
        ["optim.lr=3e-4", "train.seed=1", "train.seed=2", "losses.warmup={fraction: 0.25, l1: 0}"],
    )
    assert (recipe.optim.lr, recipe.train.seed) == (3e-4, 2)
    assert (recipe.losses.warmup.fraction, recipe.losses.warmup.l1) == (0.25, 0)
    assert recipe.drafter.head_dim == 96


def test_extends_takes_the_other_recipe_first_with_its_own_paths(write, tmp_path):
    (tmp_path / "base").mkdir()
    write(MINIMAL + "optim: {lr: 0.001, grad_clip: 2}\n", "base/base.yaml")
    recipe = load_recipe(
        write("extends: base/base.yaml\noptim: {lr: 0.002}\noutput: {dir: here}\n")
    )
    assert (recipe.optim.lr, recipe.optim.grad_clip) == (0.002, 2)
    assert recipe.data.continuations[0] == tmp_path / "base" / "a.jsonl"
    assert recipe.output.dir == tmp_path / "here"


def test_extends_goes_several_levels_and_refuses_a_circle(write, tmp_path):
    write(MINIMAL + "optim: {lr: 0.001, grad_clip: 2, weight_decay: 0.5}\n", "base.yaml")
    (tmp_path / "deep").mkdir()
    write("extends: ../base.yaml\noptim: {lr: 0.002, grad_clip: 3}\n", "deep/middle.yaml")
    recipe = load_recipe(write("extends: deep/middle.yaml\noptim: {lr: 0.004}\n"))
    optim = recipe.optim
    assert (optim.lr, optim.grad_clip, optim.weight_decay) == (0.004, 3, 0.5)
    assert recipe.data.continuations[0] == tmp_path / "a.jsonl"
    own = write("extends: own.yaml\n", "own.yaml")
    assert refusal(own) == f"{own}: extends: {own} extends this recipe in turn"
    last = write("extends: first.yaml\n", "last.yaml")
    # The same file by another name.
    (tmp_path / "alias.yaml").symlink_to(last)
    first = write("extends: alias.yaml\n", "first.yaml")
    assert refusal(last) == f"{first}: extends: {tmp_path}/alias.yaml extends this recipe in turn"


def test_mistakes_in_an_extended_recipe_name_the_file_they_are_in(write, tmp_path):
    write(MINIMAL.replace("head_dim: 96", "head_dim: 95"), "base.yaml")
    child = write("extends: base.yaml\n")
    assert refusal(child).startswith(f"{tmp_path}/base.yaml:6: drafter.head_dim: 95 is not allowed")
    fixed = write("extends: base.yaml\ndrafter: {head_dim: 94.5}\n", "fixed.yaml")
    assert refusal(fixed).startswith(f"{fixed}:2: drafter.head_dim: 94.5 is not allowed")
    grandchild = write("extends: recipe.yaml\n", "grandchild.yaml")
    assert refusal(grandchild) == refusal(child)


def test_unknown_key_names_file_line_key_and_the_nearest_name(write):
    path = write(MINIMAL.replace("epochs: 2", "epochs: 2\n  micro_bacth: 4"))
    expected = f"{path}:12: unknown key 'train.micro_bacth': did you mean 'micro_batch'?"
    assert refusal(path) == expected


def test_unknown_section_and_unknown_nested_key_are_refused(write):
    path = write(MINIMAL)
    assert "'trian': did you mean 'train'?" in refusal(path, "trian.seed=1")
    assert "did you mean 'fraction'?" in refusal(path, "losses.warmup.frction=0.1")
    assert "known keys: epochs, max_steps" in refusal(path, "train.zzz=1")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lr=0", "optim.lr: 0 is not allowed: need > 0"),
        ("optim.lr=.nan", "optim.lr: nan is not allowed"),
        ("optim.betas=[0.9, 1]", "optim.betas.1: 1 is not allowed: input should be less than 1"),
        ("optim.schedule=step", "optim.schedule: 'step' is not allowed: input should be 'cosine'"),
        ("train.seed=-1", "train.seed: -1 is not allowed: need >= 0 and < 4294967296"),
        ("train.seed=1.5", "train.seed: 1.5 is not allowed: need >= 0 and < 4294967296"),
        ("train.global_batch=true", "train.global_batch: True is not allowed"),
        ("train.micro_batch=3", "global_batch 64 must be a multiple of micro_batch 3"),
        ("train.epochs=null", "give epochs, max_steps or both"),
        ("train.dtype=float16", "input should be 'bfloat16' or 'float32'"),
        ("drafter.head_dim=97", "need >= 2 and <= 4096 and a multiple of 2"),
        ("drafter.num_key_value_heads=4", "num_attention_heads 6 must be a multiple of"),
        ("drafter.block_size=x", "drafter.block_size: 'x' is not allowed: need >= 1 and <= 64"),
        ("drafter.mask_token_id=-1", "drafter.mask_token_id: -1 is not allowed: need >= 0"),
        ("drafter.target_layer_ids=[]", "drafter.target_layer_ids: [] is not allowed"),
        ("policy.depth=8", "policy.depth 8: allowed 1..7 (drafter.block_size)"),
        ("policy.budget=-1", "need >= 0 and <= 1024"),
        ("data.features=store", "features: store needs data.store"),
        ("data.store_bytes=500X", "data.store_bytes: need a size as 64G or 1.5T (units M, G, T)"),
        ("data.store_bytes=0", "data.store_bytes: 0 is not allowed: need >= 1 and <= "),
        ("data.taps_dtype=int4", "'plain', 'int8' or 'float8_e4m3'"),
        ("data.tree_anchors=513", "tree_anchors 513: allowed 0..512 (data.num_anchors)"),
        ("data.continuations=a.jsonl", "is not allowed: need a list"),
        ("target.model=3", "target.model: 3 is not allowed: need a path"),
        ("losses.warmup.fraction=1", "need > 0 and < 1"),
        ("losses={ce: 0, l1: 0, confidence: 0, survival: 0, coverage: 0}", "--set losses="),
        ("train=3", "--set train=3: need section.key=value"),
        ("train.seed", "--set train.seed: need section.key=value"),
        ("train.seed=[", "the value is not YAML"),
        ("train.seed=2024-13-45", "'2024-13-45' cannot be read as timestamp); quote it"),
        ("train.seed=0x_", "'0x_' cannot be read as int"),
        ("train.seed=!!int x", "'x' cannot be read as int"),
        ("train.seed=!!int ''", "'' cannot be read as int"),
        ("train.seed=!!bool abc", "'abc' cannot be read as bool"),
        ("train.seed=!!float abc", "'abc' cannot be read as float"),
        ("train.seed=!!timestamp abc", "'abc' cannot be read as timestamp"),
        ("train.seed=" + "9" * 5000, "cannot be read as int"),
        ("train.seed=0x" + "f" * 5000, "cannot be read as int"),
        ("optim.lr=" + "1:" * 300 + "0.5", "cannot be read as float"),
        ("data.continuations=&a [*a]", "aliases (*) are not allowed"),
        ("losses.warmup=" + "{a: " * 1000, "nested too deeply"),
        ("losses.warmup={1: 2}", "unknown key 'losses.warmup.1'"),
        (
            "target.model=~nosuchuser/x",
            "--set: target.model: '~nosuchuser/x' is not allowed: no such",
        ),
        ('output.dir="a\\0"', "--set: output.dir: 'a\\x00' is not allowed"),
        ('data.store="a\\ud800"', "--set: data.store: 'a\\ud800' is not allowed"),
        ("drafter.intermediate_size=1000000000000", "need >= 1 and <= 1000000"),
        ("train.global_batch=" + "9" * 23, "need >= 1 and <= 65536"),
    ],
)
def test_value_out_of_range_is_refused_with_what_is_allowed(write, override, words):
    assert words in refusal(write(MINIMAL), override)


def test_a_mixed_store_needs_its_size_which_is_read_as_people_write_it(write, tmp_path):
    mixed = ["data.features=mixed", "data.store=s"]
    assert "features: mixed needs data.store_bytes" in refusal(write(MINIMAL), *mixed)
    recipe = load_recipe(write(MINIMAL), [*mixed, "data.store_bytes=1.5T"])
    assert recipe.data.store_bytes == 3 << 39
    dumped = write(dump_recipe(recipe, tmp_path), "dumped.yaml")
    assert load_recipe(dumped) == recipe


def number_fields(section):
    for name, field in section.model_fields.items():
        for annotation in (field.annotation, *typing.get_args(field.annotation)):
            if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
                yield from number_fields(annotation)
        # `int`, `int | None` and tuples of them; their bounds are in the text of the annotation.
        if re.search(r"\bint\b", str(field.annotation)) or field.annotation is int:
            yield f"{section.__name__}.{name}", str(field)


def test_every_integer_of_a_recipe_has_an_upper_bound():
    fields = dict(number_fields(recipes.Recipe))
    assert len(fields) > 20
    assert [name for name, text in fields.items() if not re.search(r"\b(le|lt)=", text)] == []


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["policy.depth=8"], "--set: policy.depth 8"),
        (["drafter.block_size=3"], "--set: policy.depth 7"),
        (["drafter.num_key_value_heads=4"], "--set: drafter: num_attention_heads 6"),
        (["losses.warmup={fraction: 0.5, ce: -1}"], "--set: losses.warmup.ce: -1"),
        ([f"losses.{name}=0" for name in recipes.LossWeights.model_fields], "--set: losses: all"),
    ],
)
def test_option_is_named_for_a_mistake_of_several_fields(write, overrides, where):
    path = write(MINIMAL + "losses: {warmup: {fraction: 0.1, ce: 1}}\n")
    assert refusal(path, *overrides).startswith(where)


def test_file_and_line_are_named_for_a_mistake_of_several_fields(write):
    path = write(MINIMAL.replace("heads: 2", "heads: 4"))
    assert refusal(path, "drafter.block_size=8").startswith(f"{path}:4: drafter: num_attention")
    shallow = write(MINIMAL.replace("head_dim: 96", "head_dim: 96\n  block_size: 5"))
    assert refusal(shallow).startswith(f"{shallow}:7: policy.depth 7: allowed 1..5")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("target:\n  model: !!bool abc\n", ":2: bad YAML: 'abc' cannot be read as bool"),
        ("a: 2024-13-45\n", ":1: bad YAML: '2024-13-45' cannot be read as timestamp"),
        ("a: &a {b: *a}\n", ":1: bad YAML: aliases (*) are not allowed"),
        ("a: " + "{b: " * 1000, ":1: bad YAML: nested too deeply"),
        ("a: \0\n", ": bad YAML: unacceptable character #x0000"),
        ("!!set {a, b}\n", ": need a mapping of sections"),
        ("1: x\n", ":1: unknown key '1': known keys: target, "),
        ("<<: {extends: 3}\n", ":1: unknown key '<<'"),
        ("? [a]\n: 1\n", ":1: bad YAML: found unhashable key"),
        ('extends: "a\\0"\n', ":1: extends: 'a\\x00' is not allowed"),
        (
            "data: {continuations: [~nosuchuser/x]}",
            ":1: data.continuations: '~nosuchuser/x' is not",
        ),
    ],
)
def test_what_python_cannot_read_is_refused_with_file_and_line(write, text, words):
    path = write(text)
    assert refusal(path).startswith(f"{path}{words}")


def test_all_loss_weights_zero_are_refused(write):
    zeros = [f"losses.{name}=0" for name in ("ce", "l1", "confidence", "survival", "coverage")]
    assert "all loss weights are 0" in refusal(write(MINIMAL), *zeros)


def test_bad_yaml_names_file_and_line(write):
    path = write("target:\n  model: [a\ndrafter: {}\n")
    assert refusal(path).startswith(f"{path}:3: bad YAML: ")
    doubled = write(MINIMAL + "train:\n  epochs: 3\n")
    assert refusal(doubled) == f"{doubled}:14: key 'train' given twice, first in line 10"
    in_list = write(MINIMAL + "x:\n- {a: 1}\n- a: 1\n  a: 2\n", "list.yaml")
    assert refusal(in_list) == f"{in_list}:17: key 'x.1.a' given twice, first in line 16"


@pytest.mark.parametrize("text", ["", "- target\n", "target\n"])
def test_file_that_is_no_mapping_is_refused(write, text):
    assert "need a mapping of sections" in refusal(write(text))


def test_missing_file_folder_and_binary_file_are_refused(write, tmp_path):
    assert refusal(tmp_path / "none.yaml") == f"{tmp_path}/none.yaml: No such file or directory"
    assert refusal(tmp_path) == f"{tmp_path}: Is a directory"
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert refusal(binary) == f"{binary}: not UTF-8 text"


def test_missing_key_is_named_and_further_mistakes_counted(write):
    message = refusal(
        write(MINIMAL.replace("  head_dim: 96\n", "").replace("epochs: 2", "epochs: 0"))
    )
    assert "missing key 'drafter.head_dim' (and 1 more)" in message


def test_yaml_tags_that_build_objects_are_refused(write, tmp_path):
    text = MINIMAL + "policy: !!python/object/apply:os.mkdir [made]\n"
    assert "bad YAML" in refusal(write(text))
    assert not (tmp_path / "made").exists()


def test_resolved_recipe_loads_to_the_same_values_from_another_folder(write, tmp_path):
    recipe = load_recipe(write(MINIMAL), ["drafter.target_layer_ids=[1, 9]"])
    folder = tmp_path / "out" / "deep"
    folder.mkdir(parents=True)
    dumped = folder / "recipe.yaml"
    dumped.write_text(dump_recipe(recipe, folder))
    assert load_recipe(dumped) == recipe
    assert yaml.safe_load(dumped.read_text())["output"]["dir"] == "../../run"
    dumped.write_text(dump_recipe(recipe))
    assert load_recipe(dumped) == recipe


def test_a_loaded_recipe_does_not_change(write):
    recipe = load_recipe(write(MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.seed = 3


EAGLE3 = {
    "drafter.architecture": "eagle3",
    "drafter.num_hidden_layers": 1,
    "drafter.markov_rank": 0,
    "drafter.enable_confidence_head": "false",
    "drafter.mask_token_id": "null",
    "policy.branching": 1,
}


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("drafter.num_hidden_layers", 5, "1"),
        ("drafter.markov_rank", 256, "0"),
        ("drafter.enable_confidence_head", True, "false"),
        ("drafter.anchor_predicts_next", False, "true"),
        ("drafter.mask_token_id", 7, "null"),
        ("policy.branching", 4, "1"),
    ],
)
def test_what_an_eagle3_drafter_cannot_be_is_refused_by_name(write, key, value, allowed):
    options = [f"{name}={setting}" for name, setting in {**EAGLE3, key: value}.items()]
    message = refusal(write(MINIMAL), *options)
    assert message == f"--set: {key} {value}: allowed {allowed} (drafter.architecture eagle3)"
