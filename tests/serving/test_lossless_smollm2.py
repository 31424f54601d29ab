# SPDX-License-Identifier: Apache-2.0
"""A small cut of the lossless promise on a real target: SmolLM2-135M-Instruct in float32."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.serving_world import AntiTarget, Oracle, drafter
from treespark import LLM, SamplingParams, TreePolicy
from treespark.serving.engine import Engine
from treespark.target.model import TargetModel
from treespark.target.template import render_prompt

QUESTIONS = [
    "What is 17 + 25?",
    "Name three fruits, one per line.",
    "Write a Python function that adds two numbers.",
    "인사말을 하나 알려 줘.",
]
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def target(smollm2_dir) -> TargetModel:
    """The real target in float32."""
    return TargetModel.from_pretrained(smollm2_dir, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def prompts(target) -> list[list[int]]:
    """The questions as the chat template spells them."""
    return [render_prompt(target.tokenizer, question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def answers(target, prompts) -> dict[str, list[int]]:
    """What transformers' own greedy decoding answers."""
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=sorted(target.eos_token_ids),
        pad_token_id=0,
    )
    found = {}
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        found[str(i)] = out[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("kind", ["autoregressive", "tree", "chain", "empty", "anti", "oracle"])
@pytest.mark.parametrize("num_slots", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_decoder_writes_what_generate_writes(target, prompts, answers, kind, num_slots):
    policies = {"chain": TreePolicy(5, 1, 5), "empty": TreePolicy(5, 4, 0)}
    policy = policies.get(kind, TreePolicy(5, 4, 12))
    model, propose = None, None
    if kind in ("tree", "chain", "empty"):
        model = drafter(target, initializer_range=0.02)
    elif kind != "autoregressive":
        kinds = {"anti": AntiTarget, "oracle": Oracle}
        noise = {"anti": 2, "oracle": 1}[kind]
        propose = kinds[kind](answers, target.vocab_size, 4, noise)
    llm = LLM(target, model, policy, max_num_seqs=num_slots, max_model_len=128)
    if propose is not None:
        llm.engine = Engine(
            target, policy=policy, max_num_seqs=num_slots, max_model_len=128, propose=propose
        )
    outputs = llm.generate(prompts, SamplingParams(NUM_TOKENS))
    assert {str(i): o.token_ids for i, o in enumerate(outputs)} == answers
    decode = target.tokenizer.decode
    for output in outputs:
        assert output.text == decode(output.token_ids, skip_special_tokens=True).rstrip("\ufffd")
