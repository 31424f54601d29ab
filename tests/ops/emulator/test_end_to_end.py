# SPDX-License-Identifier: Apache-2.0
"""A real model decodes with all three kernels emulated, and says what it says without them."""

import json
from pathlib import Path

import pytest
import torch

import npu_ops
from npu_ops.emulator.dispatch import NAMES, emulated

pytest.importorskip("npu_ops.registry", reason="the operators are not in this checkout")

RECIPES = Path(__file__).parents[3] / "recipes"
NUM_PROMPTS, NUM_TOKENS = 4, 32


def prompts():
    lines = (RECIPES / "prompts" / "gsm8k.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[:NUM_PROMPTS]]
    return [[{"role": "user", "content": text}] for text in texts]


def decode(folder):
    from treespark import LLM, SamplingParams, TreePolicy

    drafter, policy = RECIPES / "smollm2-135m" / "drafter", TreePolicy(budget=8)
    llm = LLM(folder, drafter, policy, dtype="bfloat16", device="cpu")
    return [a.token_ids for a in llm.generate(prompts(), SamplingParams(NUM_TOKENS))]


def gap(folder, prompt, ids, others):
    """Distance of two tokens' logits in units in the last place of bfloat16, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    at = next(i for i, (one, other) in enumerate(zip(ids, others, strict=True)) if one != other)
    before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        logits = model(torch.tensor([[*before, *ids[:at]]])).logits[0, -1].float()
    unit = 2.0 ** (logits[ids[at]].abs().log2().floor() - 7)
    return float((logits[ids[at]] - logits[others[at]]).abs() / unit)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
def test_smollm2_gives_the_same_ids_with_emulated_kernels(smollm2_dir, monkeypatch):
    # The target asks whether a kernel serves it, and verifies its trees by one call if so.
    monkeypatch.setattr(npu_ops, "has_kernel", lambda *_: True)
    expected = decode(smollm2_dir)
    with emulated(blocks=8) as calls:
        answers = decode(smollm2_dir)
    assert set(calls) == set(NAMES)
    for prompt, ids, others in zip(prompts(), expected, answers, strict=True):
        assert len(ids) == NUM_TOKENS
        # In bfloat16 two tokens often tie exactly; there alone the order of sums decides.
        assert ids == others or gap(smollm2_dir, prompt, ids, others) <= 1
