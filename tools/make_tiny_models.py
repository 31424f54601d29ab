# SPDX-License-Identifier: Apache-2.0
"""Write tiny random target folders (config, safetensors, tokenizer with chat template) for tests
and trials.

    python tools/make_tiny_models.py OUT_DIR [--family llama qwen3 ...] [--layers 4] [--seed 0]

Nothing is downloaded: the tokenizer knows the 256 bytes and four special tokens. Weights are drawn
wide enough that greedy choices are clear.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

# 256 bytes and the special tokens; the rows behind them have no token, as in many real
# vocabularies.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB_SIZE = 272
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 259,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"tie_word_embeddings": False, "sliding_window": None, "head_dim": 8},
    "qwen2": {"tie_word_embeddings": False},
    # head_dim is not hidden_size / heads, as in the real models.
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
}


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a random causal LM of the family in float32; `overrides` replace config fields."""
    config = AutoConfig.for_model(family, **{**_SIZES, **FAMILIES[family], **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5, generator=generator)
            else:
                # Norm weights and biases, so that a missing one shows.
                parameter.add_(torch.empty_like(parameter).normal_(0, 0.2, generator=generator))
    return model.eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer without merges, with a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in SPECIAL_TOKENS]
    )
    unk, bos, eos, pad = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unk, bos_token=bos, eos_token=eos, pad_token=pad
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_tiny_model(family: str, out_dir: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write the folder of tiny_model(...) with its tokenizer to `out_dir` and return it."""
    model = tiny_model(family, seed, **overrides)
    model.save_pretrained(out_dir)
    tiny_tokenizer().save_pretrained(out_dir)
    ids = {key: _SIZES[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (Path(out_dir) / "generation_config.json").write_text(json.dumps(ids))
    return Path(out_dir)


def main() -> None:
    """Parse the command line and write one folder per family."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--family", nargs="+", choices=sorted(FAMILIES), default=["llama", "qwen3"])
    parser.add_argument("--layers", type=int, default=_SIZES["num_hidden_layers"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.layers < 1:
        parser.error(f"--layers {args.layers}: need at least 1")
    for family in args.family:
        folder = args.out_dir / f"tiny-{family}"
        print(make_tiny_model(family, folder, args.seed, num_hidden_layers=args.layers))


if __name__ == "__main__":
    main()
