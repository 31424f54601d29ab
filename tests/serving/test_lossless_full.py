# SPDX-License-Identifier: Apache-2.0
"""The lossless promise in full: SmolLM2-135M in float32, 64 prompts x 128 tokens; hours on a CPU.

The 64 prompts are eight of each of the seven sets under recipes/prompts, plus the second eight of
gsm8k as the eighth set. They come in four parts of 16, two prompts of every set in each, and each
part, decoder and batch is a test of its own, so that a run can be split and taken up again:

    bash tools/test.sh tests/serving/test_lossless_full.py -m slow -k "part0 and anti"
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.serving_world import (
    AntiTarget,
    Oracle,
    answers_of,
    drafter,
    requests_for,
    run,
)
from tools.check_margins import is_within, measure
from treespark.data.formats import first_user_turn
from treespark.data.jsonl import iter_jsonl
from treespark.serving.engine import Engine
from treespark.serving.llm import load_drafter_for
from treespark.target.model import TargetModel
from treespark.target.template import render_prompt
from treespark.tree.policy import TreePolicy

if TYPE_CHECKING:
    from treespark.drafter.auto import Drafter

RECIPES = Path(__file__).parent.parent.parent / "recipes"
SHIPPED_DRAFTER = RECIPES / "smollm2-135m" / "drafter"
SETS = ["gsm8k", "mt-bench", "humaneval", "math500", "mbpp", "arena-hard-v2", "writingbench"]
NUM_TOKENS = 128
# User turns are cut here, so that a float32 prefill of the longest does not rule the run time.
MAX_TURN_TOKENS = 200
MAX_MODEL_LEN = 512
TREE = TreePolicy(depth=7, branching=4, budget=32)
POLICIES = {
    "autoregressive": None,
    "tree": TREE,
    "chain": TreePolicy(depth=7, branching=1, budget=7),
    "empty": TreePolicy(depth=7, branching=4, budget=0),
    "anti": TREE,
    "oracle": TREE,
}


def shipped_prompts(name: str) -> list[str]:
    """First user turns of a shipped prompt file."""
    path = RECIPES / "prompts" / f"{name}.jsonl"
    turns = [first_user_turn(row, f"{path}:{n}", pytest.fail) for n, row in iter_jsonl(path)]
    assert all(isinstance(turn, str) for turn in turns)
    return turns


def part_texts(part: int) -> list[str]:
    """The 16 prompts of a part: two of each of the eight sets."""
    sets = [shipped_prompts(name)[:8] for name in SETS] + [shipped_prompts("gsm8k")[8:16]]
    return [text for texts in sets for text in texts[2 * part : 2 * part + 2]]


def encode(target: TargetModel, text: str) -> list[int]:
    """Token ids of a prompt whose user turn is cut to MAX_TURN_TOKENS."""
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"][:MAX_TURN_TOKENS]
    return render_prompt(target.tokenizer, target.tokenizer.decode(ids))


@functools.cache
def load_target(folder: Path, dtype: str) -> TargetModel:
    """The target, loaded once per dtype."""
    return TargetModel.from_pretrained(folder, dtype=dtype, device="cpu")


def load_or_make_drafter(target: TargetModel) -> Drafter:
    """The shipped drafter where there is one, else a small random one."""
    if not SHIPPED_DRAFTER.is_dir():
        return drafter(target, initializer_range=0.02, block_size=7)
    return load_drafter_for(SHIPPED_DRAFTER, target)


def decode(
    target: TargetModel,
    kind: str,
    prompts: list[list[int]],
    answers: dict[str, list[int]],
    num_slots: int,
    num_tokens: int,
) -> dict[str, list[int]]:
    """Output ids of a decoder; requests join at uneven steps and leave as they end."""
    proposers = {
        "anti": lambda: AntiTarget(answers, target.vocab_size, 5, 4),
        "oracle": lambda: Oracle(answers, target.vocab_size, 7, 2),
    }
    engine = Engine(
        target,
        load_or_make_drafter(target) if kind in ("tree", "chain", "empty") else None,
        POLICIES[kind],
        max_num_seqs=num_slots,
        max_model_len=MAX_MODEL_LEN,
        propose=proposers[kind]() if kind in proposers else None,
    )
    # Every third arrives with its predecessor, the others some steps later.
    arrivals = [i + i // 3 for i in range(len(prompts))]
    return answers_of(run(engine, requests_for(prompts, num_tokens), arrivals))


@functools.cache
def part_answers(
    folder: Path, part: int, num_prompts: int, num_tokens: int
) -> tuple[list[list[int]], dict[str, list[int]]]:
    """Prompts of a part and their autoregressive answers, made one at a time, once a session."""
    target = load_target(folder, "float32")
    prompts = [encode(target, text) for text in part_texts(part)[:num_prompts]]
    return prompts, decode(target, "autoregressive", prompts, {}, 1, num_tokens)


def check(
    folder: Path, part: int, kind: str, num_slots: int, num_prompts: int, num_tokens: int
) -> None:
    """A decoder writes the autoregressive ids, all of them."""
    prompts, answers = part_answers(folder, part, num_prompts, num_tokens)
    target = load_target(folder, "float32")
    assert [len(answers[str(i)]) for i in range(num_prompts)] == [num_tokens] * num_prompts
    assert decode(target, kind, prompts, answers, num_slots, num_tokens) == answers


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("num_slots", [1, 6, 12], ids="batch{}".format)
@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("part", range(4), ids="part{}".format)
def test_float32_ids_equal_autoregressive(smollm2_dir, part, kind, num_slots):
    if kind == "autoregressive" and num_slots == 1:
        pytest.skip("that is the reference itself")
    check(smollm2_dir, part, kind, num_slots, 16, NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
def test_first_cut_of_the_full_run(smollm2_dir, kind):
    """Two prompts x 16 tokens through the same code: run this before the hours above."""
    check(smollm2_dir, 0, kind, 2, 2, 16)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(4), ids="part{}".format)
def test_bfloat16_tokens_are_within_the_margin(smollm2_dir, part, capsys):
    target = load_target(smollm2_dir, "bfloat16")
    prompts = [encode(target, text) for text in part_texts(part)]
    baseline = measure(target, None, POLICIES["empty"], prompts, NUM_TOKENS, batch_size=6)
    report = measure(target, load_or_make_drafter(target), TREE, prompts, NUM_TOKENS, batch_size=6)
    with capsys.disabled():
        print(f"\nautoregressive {baseline.text()}\ntree {report.text()}")
    assert report.num_above == baseline.num_above == 0
    # Both flip near ties, as bfloat16 sums depend on the shapes; trees must not add wrong tokens.
    assert is_within(report, baseline)


def test_the_parts_are_64_different_prompts_of_all_sets():
    texts = [text for part in range(4) for text in part_texts(part)]
    assert len(texts) == len(set(texts)) == 64


def test_margins_of_a_wrong_token_are_found():
    """The bfloat16 check notices a token that the target would not have written."""
    from tests.serving_world import prompts, world

    target, some = world().target, prompts(1, seed=5)
    truth = world().reference(some[0], 6)
    good = measure(target, None, TreePolicy(budget=0), some, 6, outputs=[truth])
    assert (good.num_tokens, good.num_flips, good.num_above) == (6, 0, 0)
    wrong = [*truth[:3], (truth[3] + 1) % target.vocab_size]
    bad = measure(target, None, TreePolicy(budget=0), some, 6, outputs=[wrong])
    assert (bad.num_flips, bad.num_above, bad.first_flip[:2]) == (1, 1, (0, 3))
    assert bad.max_gap > 1e-3
    assert 0 <= bad.tau < bad.max_gap
