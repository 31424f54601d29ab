# SPDX-License-Identifier: Apache-2.0
"""TreeSparkDrafter: block backbone and heads; `base.py` has the target's embedding and head.

Shapes: S sequences, L positions, A anchors, R requests, B draft depths (`block_size`), W input
slots of a block (B, or B + 1 in the in-place layout), H hidden size, m taps, V vocabulary, r Markov
rank.
State-dict keys are those of DeepSpec checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treespark.drafter.attention import context_bias, packed_attention, training_attention
from treespark.drafter.backbone import BlockLayer
from treespark.drafter.base import DrafterModel
from treespark.drafter.cache import DraftCache
from treespark.drafter.children import markov_children
from treespark.drafter.config import TreeSparkConfig
from treespark.drafter.heads import ConfidenceHead, MarkovHead
from treespark.errors import UsageError
from treespark.tree.policy import children_of_logits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treespark.tree.policy import NodeChildren, NodeLogits


class TreeSparkDrafter(DrafterModel):
    """Proposes B depths of tokens after an anchor from the target's features, in one pass."""

    config: TreeSparkConfig
    config_class = TreeSparkConfig

    def __init__(self, config: TreeSparkConfig) -> None:
        super().__init__(config)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.finish_init()

    # ------------------------------------------------------------------ backbone

    def fuse(self, features: Tensor) -> Tensor:
        """Return the fused context [..., H] that all layers share, from features [..., m*H]."""
        return self.hidden_norm(self.fc(features.to(self.compute_dtype)))

    def training_blocks(
        self, input_ids: Tensor, features: Tensor, anchors: Tensor, keep: Tensor
    ) -> Tensor:
        """Return hidden [S, A, B, H] of all blocks, after the final norm.

        input_ids [S, L] int64; features [S, L, m*H]; anchors [S, A] int64 positions; keep [S, A]
        bool. Block n sees context rows < anchors[., n] and its own slots; a block that is not kept
        sees no context and gives finite values. Equals `draft_block` on the same context.
        """
        anchors = torch.where(keep, anchors, torch.zeros_like(anchors))
        length, num_slots = input_ids.shape[1], self.config.num_slots
        context, hidden = self.fuse(features), self._embed_blocks(input_ids.gather(1, anchors))
        positions = anchors.unsqueeze(-1) + torch.arange(num_slots, device=anchors.device)
        cos, sin = self._rotary.rows(length + num_slots, hidden.device, hidden.dtype)
        block_rope = (cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2))
        context_rope = (cos[:length, None], sin[:length, None])
        bias = context_bias(anchors, length, num_slots)
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            context_kv = layer.self_attn.project_kv(context, context_rope)

            def attend(
                query: Tensor,
                block_kv: tuple[Tensor, Tensor],
                context_kv: tuple[Tensor, Tensor] = context_kv,
            ) -> Tensor:
                return training_attention(query, block_kv, context_kv, bias)

            hidden = layer(hidden, block_rope, attend)
        return self.norm(self._drafted(hidden))

    def new_cache(self, num_slots: int, max_len: int) -> DraftCache:
        """Return an empty context cache in the backbone's dtype and device."""
        return DraftCache(
            self.config, num_slots, max_len, self.embed_tokens.weight.device, self.compute_dtype
        )

    @torch.no_grad()
    def extend_contexts(
        self,
        cache: DraftCache,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        features: Tensor,
        token_ids: Tensor | None = None,
    ) -> None:
        """Write counts[i] context rows from starts[i] on for each slot, in one packed pass.

        features [sum counts, m*H]: the rows of all slots one after the other. token_ids: of these
        rows, not used here: a block drafter sees no token but its anchor.
        """
        assert features.shape[0] == sum(counts)
        context = self.fuse(features)
        spans = [range(a, a + n) for a, n in zip(starts, counts, strict=True)]
        rope = self._rope_rows([p for span in spans for p in span], context)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, BlockLayer)
            keys, values = layer.self_attn.project_kv(context, rope)
            parts = zip(keys.split(list(counts)), values.split(list(counts)), strict=True)
            for slot, start, (key, value) in zip(slots, starts, parts, strict=True):
                cache.write(index, slot, start, key, value)

    @torch.no_grad()
    def draft_block(
        self,
        cache: DraftCache,
        slots: Sequence[int],
        lengths: Sequence[int],
        anchor_tokens: Tensor,
        num_depths: int | None = None,
    ) -> Tensor:
        """Return hidden [R, D, H] of one block per request, after the final norm.

        Request i has its context in rows < lengths[i] of slots[i] and its anchor, anchor_tokens[i],
        at position lengths[i]. The cache is only read. num_depths: D, None = B; a pass takes the
        whole block in any case.
        """
        num_slots = self.config.num_slots
        hidden = self._embed_blocks(anchor_tokens)
        positions = [p for n in lengths for p in range(n, n + num_slots)]
        cos, sin = self._rope_rows(positions, hidden)
        shape = (len(slots), num_slots, 1, -1)
        rope = (cos.view(shape), sin.view(shape))
        for index, layer in enumerate(self.layers):
            views = [cache.view(index, s, n) for s, n in zip(slots, lengths, strict=True)]

            def attend(
                query: Tensor,
                block_kv: tuple[Tensor, Tensor],
                views: list[tuple[Tensor, Tensor]] = views,
            ) -> Tensor:
                return packed_attention(query, block_kv, views)

            hidden = layer(hidden, rope, attend)
        return self.norm(self._drafted(hidden)[:, :num_depths])

    def _embed_blocks(self, anchor_tokens: Tensor) -> Tensor:
        """Return slot inputs [..., W, H]: the anchor's embedding, then the mask token's."""
        shape = (*anchor_tokens.shape, self.config.num_slots)
        ids = anchor_tokens.new_full(shape, self.config.mask_token_id)
        ids[..., 0] = anchor_tokens
        return self.embed(ids)

    def _drafted(self, hidden: Tensor) -> Tensor:
        """Drop the slot that predicts nothing (in-place layout): [..., W, H] -> [..., B, H]."""
        return hidden if self.config.anchor_predicts_next else hidden[..., 1:, :]

    # ------------------------------------------------------------------ logits

    def markov_bias(self, parent_tokens: Tensor, hidden: Tensor) -> Tensor | None:
        """Return bias rows [..., V] float32 for parent_tokens [...] and hidden [..., H].

        None if there is no Markov head. For the rnn head the last dimension of parent_tokens is a
        whole path, depths 1..B.
        """
        return None if self.markov_head is None else self.markov_head(parent_tokens, hidden)

    def teacher_forced_logits(self, hidden: Tensor, parent_tokens: Tensor) -> Tensor:
        """Return logits [..., B, V] float32 given every depth's parent; for small shapes only."""
        logits = self.base_logits(hidden)
        bias = self.markov_bias(parent_tokens, hidden)
        return logits if bias is None else logits + bias

    def confidence_logits(self, hidden: Tensor, parent_tokens: Tensor) -> Tensor:
        """Return the confidence head's logits [...] float32; raises UsageError without the head."""
        if self.confidence_head is None:
            raise UsageError("enable_confidence_head is false: this drafter has no confidence")
        embedded = None if self.markov_head is None else self.markov_head.markov_w1(parent_tokens)
        return self.confidence_head(hidden, embedded)

    def node_logits(self, hidden: Tensor) -> NodeLogits:
        """Return f(depth in 1..B, parent_tokens [R, W] int64) -> logits [R, W, V] float32.

        hidden [R, B, H]; the base logits of all depths are computed once, here.
        Raises `UsageError` for the rnn head, which has a state per path: use `chain`.
        """
        self._require_tree_head()
        return self._node_logits(hidden, self.base_logits(hidden))

    def node_children(self, hidden: Tensor, base: Tensor | None = None) -> NodeChildren:
        """Return f(depth in 1..B, parent_tokens [R, W], k) -> the parents' k best children.

        hidden [R, B, H]; base [R, B, V]: its base logits in any dtype, if they are known already.
        What `node_logits` says, without logits per parent: by npu_ops.markov_topk within its
        limits, beyond them (or without a Markov head) from the logits. Serving and replay in
        training both call this.
        Raises `UsageError` for the rnn head, which has a state per path: use `chain`.
        """
        self._require_tree_head()
        head, base = self.markov_head, self.base_logits(hidden) if base is None else base
        from_logits = children_of_logits(self._node_logits(hidden, base))
        return from_logits if head is None else markov_children(head, hidden, base, from_logits)

    def _require_tree_head(self) -> None:
        if self.markov_head is not None and self.markov_head.head_type == "rnn":
            raise UsageError("markov_head_type 'rnn' can only draft chains, not trees")

    def _node_logits(self, hidden: Tensor, base: Tensor) -> NodeLogits:
        """Return `node_logits` on base logits [R, B, V], which it shares."""
        head = self.markov_head

        def logits(depth: int, parent_tokens: Tensor) -> Tensor:
            at = slice(depth - 1, depth)
            if head is None:
                return base[:, at].expand(-1, parent_tokens.shape[1], -1)
            return head(parent_tokens, hidden[:, at]).add_(base[:, at])

        return logits

    @torch.no_grad()
    def chain(self, hidden: Tensor, anchor_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the greedy chain: tokens [R, B] int64 and the logits [R, B, V] they come from.

        hidden [R, B, H], of the first B depths; anchor_tokens [R]; every head type. The lowest id
        wins a tie.
        """
        logits, head = self.base_logits(hidden), self.markov_head
        parents, tokens = anchor_tokens, []
        state = (
            None
            if head is None
            else hidden.new_zeros(
                hidden.shape[0], self.config.markov_rank, dtype=head.markov_w1.weight.dtype
            )
        )
        for depth in range(hidden.shape[1]):
            if head is not None and head.head_type == "rnn":
                assert state is not None
                embedded = head.markov_w1(parents)
                latent, state = head.rnn_step(embedded, hidden[:, depth].to(embedded), state)
                logits[:, depth] += head.bias_rows(latent)
            elif head is not None:
                logits[:, depth] += head(parents, hidden[:, depth])
            parents = logits[:, depth].argmax(-1)
            tokens.append(parents)
        return torch.stack(tokens, 1), logits
