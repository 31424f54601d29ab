# SPDX-License-Identifier: Apache-2.0
"""A tiny world for serving tests: random targets and drafters, stubborn proposers, the reference.

The reference is transformers' own greedy `generate`, which shares no code with the engine.
"""

from __future__ import annotations

import functools
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from treespark.drafter.config import TreeSparkConfig
from treespark.drafter.eagle3 import Eagle3Config, Eagle3Drafter
from treespark.drafter.modeling import TreeSparkDrafter
from treespark.serving.scheduler import Request, RequestOutput, SamplingParams
from treespark.target.model import TargetModel
from treespark.tree.packed import PackedTree
from treespark.tree.policy import TreePolicy

if TYPE_CHECKING:
    from treespark.serving.engine import Engine, RoundBatch

VOCAB = 128
EOS = 2
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
# Byte-level tokenizer: one token per byte, then the end of sequence and two two-byte merges.
TEXT_VOCAB = 272


@dataclass(frozen=True)
class World:
    """One random target, as ours and as transformers' own model."""

    target: TargetModel
    model: torch.nn.Module

    def reference(
        self,
        prompt: list[int],
        max_tokens: int,
        stop_ids: tuple[int, ...] = (),
        min_tokens: int = 0,
    ) -> list[int]:
        """Greedy continuation by transformers' generate, ended after a stop id."""
        out = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=min_tokens or None,
                eos_token_id=list(stop_ids) or None,
                pad_token_id=0,
            ),
        )
        return out[0, len(prompt) :].tolist()

    @torch.no_grad()
    def log_probs(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """Log-softmax [len(output), V] of what chose each output token, by one plain forward."""
        logits = self.model(torch.tensor([prompt + output])).logits[0]
        return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


_FOLDERS = tempfile.TemporaryDirectory(prefix="treespark-test-")


@functools.cache
def world(
    family: str = "llama",
    vocab: int = VOCAB,
    seed: int = 0,
    eos: int | tuple[int, ...] = EOS,
    max_context: int = 256,
) -> World:
    """A random float32 target of 4 layers, hidden 32; with a tokenizer if `vocab` is TEXT_VOCAB."""
    folder = Path(_FOLDERS.name) / f"{family}-{vocab}-{seed}-{eos}-{max_context}"
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_context,
        tie_word_embeddings=False,
        # Wide enough that the next token depends on the whole context and near ties are rare.
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model_class(config).save_pretrained(folder)
    GenerationConfig(eos_token_id=list(eos) if isinstance(eos, tuple) else eos).save_pretrained(
        folder
    )
    if vocab == TEXT_VOCAB:
        byte_tokenizer().save_pretrained(folder)
    target = TargetModel.from_pretrained(folder, dtype="float32", device="cpu")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    # The reference stops only where a test says so.
    model.generation_config.eos_token_id = None
    return World(target, model.eval())


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 0..255 in byte order), id 256 the end of sequence, id 257 "ha"."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    by_byte = {_byte_of(char): char for char in alphabet}
    vocab = {by_byte[byte]: byte for byte in range(256)} | {"<eos>": 256, "ha": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return wrapped


def _byte_of(char: str) -> int:
    """The byte that a character of the byte-level alphabet stands for, as in GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return ord(char) if ord(char) in printable else others[ord(char) - 256]


def drafter(target: TargetModel, seed: int = 0, **options: object) -> TreeSparkDrafter:
    """A random drafter of two layers and 5 depths for a target."""
    defaults = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "block_size": 5,
        "target_layer_ids": [0, 2],
        "num_target_layers": target.num_layers,
        "mask_token_id": 0,
        "markov_rank": 8,
        "initializer_range": 0.4,
        "max_position_embeddings": target.max_context,
    }
    torch.manual_seed(seed)
    config = TreeSparkConfig(**(defaults | options))
    return TreeSparkDrafter.init_from_target(config, target.embed_weight, target.head_weight).eval()


def eagle3_drafter(target: TargetModel, seed: int = 0, **options: object) -> Eagle3Drafter:
    """A random drafter of chains of 5 tokens for a target."""
    defaults = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "block_size": 5,
        "target_layer_ids": [0, 2],
        "num_target_layers": target.num_layers,
        "initializer_range": 0.4,
        "max_position_embeddings": target.max_context,
    }
    torch.manual_seed(seed)
    config = Eagle3Config(**(defaults | options))
    return Eagle3Drafter.init_from_target(config, target.embed_weight, target.head_weight).eval()


def prompts(number: int, vocab: int = VOCAB, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Ragged random prompts, 1 to `longest` tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(draw.randint(1, longest))] for _ in range(number)]


def run(
    engine: Engine, requests: list[Request], arrivals: list[int] | None = None
) -> dict[str, RequestOutput]:
    """Serve requests, request i joining before step arrivals[i]; final outputs by request id."""
    arrivals = arrivals or [0] * len(requests)
    waiting = sorted(zip(arrivals, range(len(requests)), strict=True))
    finished: dict[str, RequestOutput] = {}
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            engine.add(requests[waiting.pop(0)[1]])
        for output in engine.step():
            if output.finish_reason is not None:
                finished[output.request_id] = output
        step += 1
    return finished


def requests_for(
    prompt_list: list[list[int]], max_tokens: int | list[int], **params: object
) -> list[Request]:
    """Requests named "0", "1", ... one limit for all or one each, eos ids ignored."""
    limits = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompt_list)
    options = {"ignore_eos": True} | params
    pairs = enumerate(zip(prompt_list, limits, strict=True))
    return [
        Request(str(i), prompt, SamplingParams(max_tokens=limit, **options))
        for i, (prompt, limit) in pairs
    ]


# ------------------------------------------------------------------ proposers


class RandomTrees:
    """Random shapes, random tokens, another number of nodes in every round and row."""

    def __init__(self, seed: int, vocab: int, budget: int) -> None:
        self.draw, self.vocab, self.budget = random.Random(seed), vocab, budget

    def __call__(self, batch: RoundBatch) -> PackedTree:
        tokens, parents = [], []
        for anchor in batch.anchors.tolist():
            row, row_parents = [anchor], [-1]
            for _ in range(self.draw.randint(0, self.budget)):
                add_node(
                    row, row_parents, self.draw.randrange(len(row)), self.draw.randrange(self.vocab)
                )
            tokens.append(row)
            parents.append(row_parents)
        return PackedTree.from_parents(tokens, parents)


class Oracle:
    """Knows every continuation: a true path of 0 to `depth` tokens among random wrong nodes."""

    def __init__(
        self, answers: dict[str, list[int]], vocab: int, depth: int, noise: int, seed: int = 0
    ) -> None:
        self.answers, self.vocab, self.depth, self.noise = answers, vocab, depth, noise
        self.draw = random.Random(seed)

    def __call__(self, batch: RoundBatch) -> PackedTree:
        trees = [self.tree(truth, anchor) for truth, anchor in self.truths(batch)]
        return PackedTree.from_parents(
            [tokens for tokens, _ in trees], [parents for _, parents in trees]
        )

    def truths(self, batch: RoundBatch) -> list[tuple[list[int], int]]:
        """What the target will say next, and the anchor, per request."""
        answers = [self.answers[r.request_id][len(r.output_token_ids) :] for r in batch.requests]
        return list(zip(answers, batch.anchors.tolist(), strict=True))

    def tree(self, truth: list[int], anchor: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of one row: wrong nodes before, beside and below the true ones."""
        row, row_parents, last = [anchor], [-1], 0
        for token in truth[: self.draw.randint(0, self.depth)]:
            for _ in range(self.draw.randint(0, self.noise)):
                wrong = (token + self.draw.randrange(1, self.vocab)) % self.vocab
                add_node(
                    row, row_parents, self.draw.choice([last, self.draw.randrange(len(row))]), wrong
                )
            last = add_node(row, row_parents, last, token)
        return row, row_parents


class AntiTarget(Oracle):
    """Proposes anything but the target's next token; true tokens come only below wrong ones."""

    def tree(self, truth: list[int], anchor: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of one row of which the target accepts nothing."""
        row, row_parents = [anchor], [-1]
        for _ in range(self.noise):
            wrong = (truth[0] + self.draw.randrange(1, self.vocab)) % self.vocab
            last = add_node(row, row_parents, 0, wrong)
            for token in truth[: self.depth]:
                last = add_node(row, row_parents, last, token)
        return row, row_parents


def add_node(row: list[int], row_parents: list[int], parent: int, token: int) -> int:
    """Append a child, unless the parent has one of that token; return its index."""
    for node, (other, at) in enumerate(zip(row, row_parents, strict=True)):
        if at == parent and other == token:
            return node
    row.append(token)
    row_parents.append(parent)
    return len(row) - 1


def true_chain(answers: dict[str, list[int]], depth: int) -> Oracle:
    """The continuation itself, always `depth` tokens of it."""
    oracle = Oracle(answers, 1, depth, 0)
    oracle.draw.randint = lambda low, high: high  # type: ignore[method-assign]
    return oracle


def whole_vocabulary(vocab: int, depth: int) -> TreePolicy:
    """The policy that proposes every continuation of `depth` tokens."""
    return TreePolicy(
        depth,
        vocab,
        sum(vocab**d for d in range(1, depth + 1)),
        vocab ** (depth - 1) if depth > 1 else None,
    )


def answers_of(outputs: dict[str, RequestOutput]) -> dict[str, list[int]]:
    """Token ids by request id."""
    return {name: output.token_ids for name, output in outputs.items()}
