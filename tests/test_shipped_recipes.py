# SPDX-License-Identifier: Apache-2.0
"""The shipped recipes: each loads, and differs from TreeSpark of its target in what it names."""

import pytest

from treespark import recipe as recipes
from treespark.bench.suite_recipe import load_suite_recipe
from treespark.bench.workloads import WORKLOADS
from treespark.recipe import load_recipe


def training_recipes(repository):
    # Mixtures and evaluations are recipes of other kinds: tests/data/test_mixture.py, below.
    folders = (repository / "recipes", repository / "recipes" / "ablations")
    paths = [path for folder in folders for path in folder.glob("*.yaml")]
    return [path for path in paths if "mixture" not in path.name]


def shipped_drafters(repository):
    return [path.parent for path in (repository / "recipes").rglob("config.json")]


def shipped_recipes(repository):
    found = {path.stem: load_recipe(path) for path in training_recipes(repository)}
    return {name: recipe.model_dump(mode="json") for name, recipe in found.items()}


def differences(values, others):
    return {
        f"{section}.{name}": (values[section][name], others[section][name])
        for section in values
        for name in values[section]
        if values[section][name] != others[section][name]
    }


TREE_LOSSES = {"losses.survival": (0.1, 0.0), "losses.coverage": (0.1, 0.0)}


@pytest.mark.parametrize(
    ("target", "wide", "own"),
    [("smollm2-135m", 96, 64), ("qwen3-4b", 192, 128), ("qwen3-8b", 192, 128)],
)
def test_recipes_of_a_target_differ_from_treespark_in_what_they_name(repository, target, wide, own):
    found = shipped_recipes(repository)
    base, plain = found[f"{target}-treespark"], {"drafter.head_dim": (wide, own)}
    expected = {
        "dspark-tree": TREE_LOSSES,
        "dspark": TREE_LOSSES | plain,
        "no-survival": {"losses.survival": (0.1, 0.0)},
        "no-coverage": {"losses.coverage": (0.1, 0.0)},
        f"head-dim-{own}": plain,
    }
    for name, changes in expected.items():
        found_changes = differences(base, found[f"{target}-{name}"])
        output = found_changes.pop("output.dir")[1]
        assert output.endswith(f"/runs/{target}-{name}")
        assert found_changes == changes, name


@pytest.mark.parametrize("target", ["smollm2-135m", "qwen3-4b", "qwen3-8b"])
def test_baselines_differ_from_treespark_in_drafter_losses_and_policy_alone(repository, target):
    found = shipped_recipes(repository)
    for name, losses in (("dflash", {"ce": 1.0}), ("eagle3", {"soft_ce": 1.0})):
        values = found[f"{target}-{name}"]
        sections = {key.split(".")[0] for key in differences(found[f"{target}-treespark"], values)}
        assert sections <= {"drafter", "losses", "policy", "output"}
        weights = {key: values["losses"][key] for key in recipes.LossWeights.model_fields}
        assert {key: weight for key, weight in weights.items() if weight} == losses
        assert values["losses"]["warmup"] is None
        assert values["drafter"]["head_dim"] == found[f"{target}-dspark"]["drafter"]["head_dim"]


def test_every_shipped_recipe_loads_and_writes_to_a_folder_of_its_own(repository):
    paths = training_recipes(repository)
    found = shipped_recipes(repository)
    # 5 methods and 3 ablations for each of 3 targets.
    assert len(found) == len(paths) == 3 * 8
    outputs = [values["output"]["dir"] for values in found.values()]
    assert len(set(outputs)) == len(outputs)


def test_shipped_drafters_share_data_and_steps_and_follow_their_recipes(repository):
    found, folders = shipped_recipes(repository), shipped_drafters(repository)
    assert "drafter" in {folder.name for folder in folders}
    own = [load_recipe(folder / "recipe.yaml").model_dump(mode="json") for folder in folders]
    # The common budget, where it was trained, and how exactly that computed.
    free = {
        "output.dir",
        "data.continuations",
        "data.store",
        "target.dtype",
        "train.dtype",
        "train.max_steps",
        "train.eval_every",
        "train.decode_every",
        "losses.warmup",
    }
    for folder, values in zip(folders, own, strict=True):
        name = "treespark" if folder.name == "drafter" else folder.name
        changes = differences(found[f"smollm2-135m-{name}"], values)
        assert changes.keys() <= free, folder
        shared = {key: values["train"][key] for key in ("max_steps", "global_batch", "seed")}
        assert shared == {"max_steps": 4000, "global_batch": 2, "seed": 42}, folder
        assert values["data"]["continuations"] == own[0]["data"]["continuations"], folder
        assert (values["data"]["num_anchors"], values["optim"]) == (48, own[0]["optim"]), folder


def test_evaluation_recipes_name_drafters_that_training_recipes_make(repository):
    found = shipped_recipes(repository)
    made = {values["output"]["dir"] for values in found.values()}
    # Where tools/train_variants.py writes, a folder of each recipe's name.
    made |= {str(repository / "runs" / "variants" / name) for name in found}
    paths = sorted((repository / "recipes" / "bench").glob("*.yaml"))
    assert len(paths) == 4
    for path in paths:
        recipe = load_suite_recipe(path)
        for folder in recipe.drafters.values():
            shipped = folder in shipped_drafters(repository)
            trained = folder.name == "drafter" and str(folder.parent) in made
            assert shipped or trained, f"{path}: {folder}"


@pytest.mark.parametrize("size", ["4b", "8b"])
def test_the_papers_evaluation_has_its_prompts_and_methods(repository, size):
    recipe = load_suite_recipe(repository / "recipes" / "bench" / f"qwen3-{size}.yaml")
    assert [dataset.name for dataset in recipe.datasets] == list(WORKLOADS)
    assert all(dataset.count is None for dataset in recipe.datasets)
    assert (recipe.max_tokens, recipe.repeats) == (2048, 3)
    names = ["eagle3", "dflash", "dspark", "dspark-tree", "treespark"]
    assert [method.name for method in recipe.methods] == names
    assert (recipe.baseline, recipe.control) == ("dspark", "dspark-tree")
