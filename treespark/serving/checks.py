# SPDX-License-Identifier: Apache-2.0
"""What the engine refuses, before it spends anything on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from treespark.errors import UsageError
from treespark.tree.policy import TreePolicy

if TYPE_CHECKING:
    from treespark.drafter.auto import Drafter
    from treespark.serving.engine import Engine
    from treespark.serving.scheduler import Request
    from treespark.target.model import TargetModel

# Far above what any device holds; a number with too many zeros should not end in an allocation.
MAX_SLOTS = 4096
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def default_policy(drafter: Drafter | None) -> TreePolicy:
    """Return the policy that the drafter was trained for; the empty tree without a drafter."""
    if drafter is None:
        return TreePolicy(budget=0)
    return TreePolicy(**(drafter.config.tree or {"depth": drafter.config.block_size}))


def text_tokenizer(target: TargetModel) -> Tokenizer | None:
    """Return what turns the target's ids into text, None if its folder has no tokenizer at all.

    Raises UsageError for a tokenizer that cannot be loaded or cannot decode token by token.
    """
    if not any((target.path / name).is_file() for name in TOKENIZER_FILES):
        return None
    backend = getattr(target.tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UsageError(
            f"target {target.path}: only fast tokenizers (tokenizer.json) are supported"
        )
    return backend


def check_sizes(
    target: TargetModel, max_num_seqs: int, max_model_len: int, prefill_chunk: int
) -> None:
    """Refuse engine sizes that hold no request. Raises UsageError."""
    if not 1 <= max_num_seqs <= MAX_SLOTS:
        raise UsageError(f"--max-num-seqs {max_num_seqs}: allowed: 1..{MAX_SLOTS}")
    if prefill_chunk < 1:
        raise UsageError(f"prefill_chunk {prefill_chunk}: allowed: 1 and more")
    if not 2 <= max_model_len <= target.max_context:
        raise UsageError(
            f"--max-model-len {max_model_len}: allowed: 2..{target.max_context} (target's context)"
        )


def check_drafter(
    target: TargetModel, drafter: Drafter | None, policy: TreePolicy, speculation: str | None = None
) -> None:
    """Refuse a drafter of another target and a policy beyond the drafter. Raises UsageError."""
    if drafter is None:
        if speculation not in (None, "off"):
            raise UsageError(f"--speculation {speculation}: needs a drafter; give --drafter")
        return
    config = drafter.config
    for name in ("vocab_size", "hidden_size"):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise UsageError(
                f"drafter: {name} is {ours}, the target's is {theirs}; they must agree"
            )
    if policy.depth > config.block_size:
        raise UsageError(
            f"--depth {policy.depth}: allowed: 1..{config.block_size} (the drafter's block_size)"
        )
    if config.chain_only is not None and policy.branching > 1:
        raise UsageError(
            f"--branching {policy.branching}: allowed: 1, a drafter with {config.chain_only} "
            "drafts chains"
        )


def check_request(engine: Engine, request: Request) -> None:
    """Refuse a request that cannot be served, naming value and limit. Raises UsageError."""
    name, ids = request.request_id, request.prompt_token_ids
    limit, vocab_size = engine.max_model_len, engine.target.vocab_size
    if engine.scheduler.holds(name):
        raise UsageError(f"request_id {name!r}: already in use by a request that has not ended")
    if not ids:
        raise UsageError(f"request {name!r}: the prompt is empty; at least 1 token is needed")
    if len(ids) >= limit:
        raise UsageError(
            f"request {name!r}: the prompt has {len(ids)} tokens, allowed: at most {limit - 1} "
            f"(--max-model-len {limit} less one to generate)"
        )
    wrong = [token for token in (min(ids), max(ids)) if not 0 <= token < vocab_size]
    if wrong:
        raise UsageError(
            f"request {name!r}: prompt token id {wrong[0]}, allowed: 0..{vocab_size - 1}"
        )
    unknown = [token for token in request.params.stop_token_ids if token >= vocab_size]
    if unknown:
        raise UsageError(
            f"request {name!r}: stop_token_ids {unknown[0]}, allowed: 0..{vocab_size - 1}"
        )
    if request.params.stop and engine.tokenizer is None:
        raise UsageError(f"request {name!r}: stop strings need a tokenizer, the target has none")
