# SPDX-License-Identifier: Apache-2.0
"""A tiny random target with a byte tokenizer and a chat template, written once per test session."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_ID = 2

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Puts an empty thought in front of the answer unless thinking is on, as Qwen3's template does.
THINKING = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>\n{% endif %}"
    "{% endif %}",
)


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 3 special tokens and the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[EOS_ID])
    fast.chat_template = template
    return fast


def make_target(folder: Path, seed: int = 0, template: str = CHATML) -> Path:
    """Write a Llama of 2 layers, hidden 32, with a context of 256 tokens; return the folder."""
    tokenizer = make_tokenizer(template)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        eos_token_id=EOS_ID,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write a JSONL file; return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
