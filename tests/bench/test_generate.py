# SPDX-License-Identifier: Apache-2.0
"""generate and the shown trees: the same text with and without a drafter, paths marked."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.bench.bench_world import QUESTIONS, text_target, write_drafter, write_prompts
from treespark import LLM, SamplingParams, cli
from treespark.bench.generate import run_generate
from treespark.bench.show import render_tree, show_rounds
from treespark.errors import UsageError
from treespark.serving.commit import Proposal
from treespark.serving.engine import Accepted
from treespark.tree.packed import PackedTree


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """Folder of a random drafter."""
    return write_drafter(tmp_path_factory.mktemp("generate") / "d")


def answers(capsys, *args, **options):
    options.setdefault("params", SamplingParams(10))
    run_generate(text_target().path, *args, as_json=True, **options)
    return json.loads(capsys.readouterr().out)


def test_drafter_changes_no_answer(draft, tmp_path, capsys):
    file = write_prompts(tmp_path / "p.jsonl")
    plain = answers(capsys, None, ["hi"], [file])
    tree = answers(capsys, draft, ["hi"], [file])
    assert plain["answers"] == tree["answers"]
    assert [a["prompt"] for a in tree["answers"]] == ["0", "p-0", "p-1", "p-2"]
    assert plain["summary"]["mean_nodes"] == 0
    assert tree["summary"]["mean_nodes"] > 0
    assert (
        answers(capsys, draft, [QUESTIONS[0]])["answers"][0]["token_ids"]
        == (tree["answers"][1]["token_ids"])
    )


def test_text_and_speed_are_printed(draft, capsys):
    run_generate(text_target().path, draft, ["hi"], params=SamplingParams(5))
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "acceptance length" in printed


def test_sampled_answers_repeat_with_their_seed_and_say_that_nothing_was_drafted(draft, capsys):
    options = {"params": SamplingParams(20, temperature=1.0, seed=5, ignore_eos=True)}
    first, again = (answers(capsys, draft, ["hi"], **options) for _ in range(2))
    assert first["answers"] == again["answers"]
    assert first["summary"]["plain_decoding"] == {"sampling": 1}
    assert first["summary"]["mean_nodes"] == 0
    greedy = answers(capsys, draft, ["hi"], params=SamplingParams(20, ignore_eos=True))
    assert greedy["answers"][0]["token_ids"] != first["answers"][0]["token_ids"]
    run_generate(text_target().path, draft, ["hi"], **options)
    assert "without drafts: sampled" in capsys.readouterr().out


def test_the_commands_pass_their_sampling_flags(monkeypatch):
    calls = []
    drawn = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3}
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in drawn.items()]
    flags = [word for pair in pairs for word in pair]
    monkeypatch.setattr("treespark.bench.generate.run_generate", lambda **o: calls.append(o))
    monkeypatch.setattr("treespark.bench.chat.run_chat", lambda **o: calls.append(o))
    more = ["--no-drafter", "--max-tokens", "9", "--stop", "a", "--stop", "b", "--ignore-eos"]
    cli.app(["generate", "t", "hello", *flags, *more], standalone_mode=False)
    cli.app(["chat", "t", "--system", "s", *flags], standalone_mode=False)
    assert calls[0]["params"] == SamplingParams(9, ("a", "b"), ignore_eos=True, **drawn)
    assert calls[1]["params"] == SamplingParams(512, **drawn)
    assert (calls[1]["drafter"], calls[1]["system"]) == (None, "s")
    with pytest.raises(UsageError, match=r"temperature 3.0: allowed: numbers in 0..2"):
        cli.app(
            ["generate", "t", "hello", "--no-drafter", "--temperature", "3"], standalone_mode=False
        )


@pytest.mark.parametrize(
    ("prompts", "word"),
    [
        ([], "PROMPT: missing"),
        ([""], "PROMPT '': is empty"),
        (["hi", " \n"], r"PROMPT ' \\n': is empty"),
        (["bad \udcff"], r"PROMPT 'bad \\udcff': is not UTF-8"),
    ],
)
def test_missing_empty_and_unreadable_prompts_are_refused_before_loading(prompts, word, tmp_path):
    with pytest.raises(UsageError, match=word):
        run_generate(tmp_path / "nowhere", None, prompts)


@pytest.mark.parametrize(
    ("drafter", "options", "word"),
    [
        (None, {"budget": 4}, "--budget 4: shapes the draft tree"),
        (None, {"depth": 400}, "--depth 400: need an integer"),
        (Path("d"), {"budget": 10**20}, f"--budget {10**20}: need an integer"),
        (Path("d"), {"branching": 100_000}, "--branching 100000: need an integer"),
    ],
)
def test_tree_options_that_cannot_work_are_refused_before_loading(drafter, options, word, tmp_path):
    with pytest.raises(UsageError, match=word):
        run_generate(tmp_path / "nowhere", drafter, ["hi"], **options)


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([{"input_ids": [1, 99999]}], "p.jsonl:1: token id 99999, allowed: 0..271"),
        ([{"prompt": " "}], "p.jsonl:1: the prompt is empty"),
        ([{"prompt": "a", "id": [1]}], "p.jsonl:1: id: need a string"),
        ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}], "p.jsonl:2: duplicate id '1'"),
    ],
)
def test_bad_row_of_a_prompt_file_is_named_by_its_line(rows, word, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UsageError, match=word):
        run_generate(text_target().path, None, [], [path])


def drawn(renderable) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return console.file.getvalue()


def test_shown_tree_marks_the_accepted_path_and_the_bonus():
    tree = PackedTree.from_parents([[97, 98, 99, 100, 101]], [[-1, 0, 0, 1, 3]])
    tree.scores = torch.log(torch.tensor([[1.0, 0.5, 0.25, 0.25, 0.125]]))
    accepted = Accepted([0, 1, 3], [98, 100, 102], Proposal(2, 4, 3))
    lines = drawn(render_tree(tree, 0, accepted, text_target().tokenizer)).splitlines()
    marked = [line.strip("│├└─ ").strip() for line in lines]
    assert marked == [
        "'a' anchor",
        "✓ 'b' 50%",
        "✓ 'd' 25%",
        "'e' 12%",
        "+ 'f' by the target",
        "'c' 25%",
    ]


def test_rounds_are_shown_up_to_the_number_and_change_no_answer(draft):
    llm = LLM(text_target(), draft, max_num_seqs=1, max_model_len=64)
    prompt = list(b"hello")
    console = Console(file=io.StringIO(), width=100)
    text = show_rounds(llm, prompt, 2, 12, console)
    shown = console.file.getvalue()
    assert shown.count("round ") == shown.count("anchor") == shown.count("by the target") == 2
    assert llm.engine.on_round is None
    (plain,) = LLM(text_target(), max_num_seqs=1).generate([prompt], None)
    assert plain.text.startswith(text)
