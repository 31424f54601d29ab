# SPDX-License-Identifier: Apache-2.0
"""quickstart: all four parts run in a checkout, with a shipped drafter and without."""

import json
import random

import pytest

from tests.bench.bench_world import text_target, write_drafter, write_prompts
from treespark.bench import quickstart
from treespark.errors import UsageError
from treespark.recipe import load_recipe

RECIPE = """
target: {model: ../runs/smollm2-135m, dtype: bfloat16}
drafter:
  {num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16,
   intermediate_size: 32, markov_rank: 4, mask_token_id: 270, block_size: 5,
   target_layer_ids: [0, 2]}
policy: {depth: 5, branching: 2, budget: 6}
data:
  {continuations: [smollm2-135m/continuations.jsonl], max_tokens: 64, num_anchors: 4,
   tree_anchors: 2, features: store, store: ../runs/features, holdout_rows: 2}
losses:
  warmup: {fraction: 0.5, ce: 1.0, l1: 0.0, confidence: 0.0, survival: 0.0, coverage: 0.0}
train: {max_steps: 100000, global_batch: 2}
output: {dir: ../runs/out}
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The files that the quickstart needs, tiny."""
    recipes = tmp_path / "recipes"
    for name in quickstart.PROMPTS:
        write_prompts(recipes / "prompts" / f"{name}.jsonl")
    (recipes / "smollm2-135m-treespark.yaml").write_text(RECIPE)
    (recipes / "smollm2-135m").mkdir()
    draw = random.Random(0)
    rows = [
        {
            "id": str(i),
            "prompt_token_ids": [draw.randrange(250) for _ in range(5)],
            "output_token_ids": [draw.randrange(250) for _ in range(40)],
        }
        for i in range(8)
    ]
    path = recipes / "smollm2-135m" / "continuations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(quickstart, "ROOT", tmp_path)
    monkeypatch.setattr(quickstart, "fetch", lambda name, out: text_target().path)
    return tmp_path


def test_all_parts_run_with_the_shipped_drafter_and_again(checkout, capsys):
    write_drafter(checkout / "recipes" / "smollm2-135m" / "drafter")
    for _ in range(2):
        quickstart.run(checkout / "q", 0.01)
        printed = capsys.readouterr().out
        parts = ["by the target", "answers are equal", "losses, mean", "What to run next"]
        assert sorted(parts, key=printed.index) == parts
        assert "No trained drafter" not in printed
    assert (checkout / "q" / "compare" / "compare.svg").is_file()
    trained = checkout / "q" / "training" / "run" / "drafter"
    assert (trained / "config.json").is_file()
    # Not the recipe's bfloat16, which many processors emulate at a crawl.
    assert load_recipe(trained / "recipe.yaml").train.dtype == "float32"


def test_without_a_shipped_drafter_one_is_trained_first(checkout, capsys):
    quickstart.run(checkout / "q", 0.01)
    printed = capsys.readouterr().out
    parts = ["No trained drafter", "losses, mean", "by the target", "answers are equal"]
    assert sorted(parts, key=printed.index) == parts


def test_missing_file_of_the_checkout_is_named_before_anything_runs(checkout):
    (checkout / "recipes" / "prompts" / "mt-bench.jsonl").unlink()
    with pytest.raises(UsageError, match=r"mt-bench\.jsonl is missing"):
        quickstart.run(checkout / "q", 0.01)
    assert not (checkout / "q").exists()
