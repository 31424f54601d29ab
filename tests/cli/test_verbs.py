# SPDX-License-Identifier: Apache-2.0
"""The calls that verbs make, and the options they refuse."""

import sys
from pathlib import Path

import pytest


def test_train_passes_the_resolved_recipe_and_flags(run, room, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "target: {model: t}\n"
        "drafter: {num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16,"
        " intermediate_size: 64}\n"
        "data: {continuations: [c.jsonl]}\ntrain: {epochs: 1}\noutput: {dir: o}\n"
    )
    calls = room("treespark.training.loop", "train", Path("done"))
    flags = ["--resume", "never", "--start-from", "r@5", "--until", "warmup"]
    code, out, _ = run("train", recipe, "--set", "train.seed=7", *flags)
    (((loaded,), options),) = calls
    assert (code, out) == (0, "done\n")
    assert loaded.train.seed == 7
    assert options == {"resume": "never", "start_from": "r@5", "until": "warmup"}


def test_prompts_build_passes_its_recipe(run, room):
    calls = room("treespark.data.mixture", "run_mixture")
    assert run("prompts", "build", "r.yaml")[0] == 0
    assert calls == [((Path("r.yaml"),), {})]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "Missing command"),
        (("a.jsonl", "--out", "o"), "No such command 'a.jsonl' (see "),
    ],
)
def test_prompts_without_collect_or_build_is_one_line(run, args, message):
    code, _, err = run("prompts", *args)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("flags", "room_name", "options"),
    [
        (
            ["--batch-size", 2, "--drop-truncated", "--drafter", "d"],
            "continuations",
            {"batch_size": 2, "dtype": "auto", "device": None, "drafter": Path("d")},
        ),
        (
            ["--server", "u", "--model", "m", "--retries", 0, "--drop-truncated"],
            "server_continuations",
            {"server": "u", "model": "m", "concurrency": 32, "retries": 0, "temperature": 0.0}
            | {"api_key_env": "OPENAI_API_KEY"},
        ),
    ],
)
def test_continuations_passes_its_flags(run, room, flags, room_name, options):
    calls = room(f"treespark.data.{room_name}", f"run_{room_name}")
    assert run("continuations", "t", "p", "--out", "o", *flags)[0] == 0
    shared = {"target": Path("t"), "prompts": Path("p"), "out": Path("o")}
    shared |= {"max_tokens": 512, "drop_truncated": True}
    assert calls == [((), {**shared, **options})]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "m"], "--model m: only with --server"),
        (["--temperature", "0"], "--temperature 0.0: only with --server"),
        (["--server", "u", "--drafter", "d"], "--drafter d: not allowed with --server"),
        (["--server", "u", "--batch-size", "4"], "--batch-size 4: not allowed with --server"),
    ],
)
def test_continuations_refuses_options_of_the_other_way(run, flags, message):
    code, _, err = run("continuations", "t", "p", "--out", "o", *flags)
    assert (code, err) == (2, f"error: {message}\n")


def test_prompts_collect_passes_its_flags(run, room, tmp_path):
    calls = room("treespark.data.prompts", "run_prompts")
    sys.modules["treespark.data.prompts"].parse_shares = lambda text: {"parsed": text}
    flags = ["--out", "o", "--tokenizer", "t", "--count", 5, "--seed", 3, "--shares", "a=1"]
    assert (
        run("prompts", "collect", "a.jsonl", "b.jsonl", *flags, "--evaluation", "e.jsonl")[0] == 0
    )
    assert calls == [
        (
            (),
            {
                "inputs": [Path("a.jsonl"), Path("b.jsonl")],
                "out": Path("o"),
                "tokenizer": Path("t"),
                "max_prompt_tokens": 2048,
                "count": 5,
                "seed": 3,
                "shares": {"parsed": "a=1"},
                "evaluation": [Path("e.jsonl")],
            },
        )
    ]


def test_generate_wants_a_drafter_or_the_word_that_there_is_none(run, room):
    calls = room("treespark.bench.generate", "run_generate")
    code, _, err = run("generate", "target", "hello")
    assert code == 2
    assert err.startswith("error: --drafter: missing")
    code, _, err = run("generate", "target", "hello", "--drafter", "d", "--no-drafter")
    assert code == 2
    assert "contradicts --drafter d" in err
    assert calls == []
    assert run("generate", "target", "hello", "--no-drafter")[0] == 0
    assert run("generate", "target", "hello", "--drafter", "d", "--budget", 0)[0] == 0
    (_, plain), (_, tree) = calls
    assert (plain["drafter"], tree["drafter"]) == (None, Path("d"))
    assert (plain["budget"], tree["budget"]) == (None, 0)


def test_compare_refuses_budgets_that_are_no_numbers(run, room):
    calls = room("treespark.bench.compare", "run_compare")
    flags = ["--prompts", "p", "--out", "o", "--drafter", "d", "--budgets"]
    code, _, err = run("compare", "target", *flags, "8,x")
    assert code == 2
    assert err == "error: --budgets 8,x: need whole numbers separated by commas, as in 8,16,32\n"
    assert calls == []
    assert run("compare", "target", *flags, "9" * 5000)[0] == 2
    assert run("compare", "target", *flags, "8, 16")[0] == 0
    assert calls[0][1]["budgets"] == [8, 16]
    assert run("compare", "target", *flags[:-1])[0] == 0
    assert calls[1][1]["budgets"] == [8, 12, 16, 20, 32]


@pytest.mark.parametrize("other", [("--no-drafter",), ("--drafter", "d", "--budget", 4)])
def test_compare_refuses_budgets_beside_what_overrules_them(run, room, other):
    calls = room("treespark.bench.compare", "run_compare")
    flags = ["--prompts", "p", "--out", "o", "--budgets", 9]
    code, _, err = run("compare", "target", *flags, *other)
    assert code == 2
    assert err.startswith("error: --budgets 9: contradicts --")
    assert calls == []


def test_export_onto_its_source_is_refused_before_loading(run, tmp_path):
    (tmp_path / "d").mkdir()
    code, _, err = run("export", tmp_path / "d", "--target", "none", "--out", tmp_path / "d")
    assert code == 2
    assert "is the drafter that is exported" in err
