# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3: one decoder layer that drafts token by token, each step fed with its own last output.

A row pairs what is known of position j, the target's fused features or the layer's own output, with
the embedding of token j + 1, and predicts token j + 2 at rotary position j. Committed pairs are
context; the layer is the only one, so their keys and values need no attention of their own.

Shapes: S sequences, L positions, A anchors, R requests, B draft depths (`block_size`), H hidden
size, m taps, V vocabulary, D head size. Source: algorithms 1.7, 2.7, 3.6; DeepSpec's weight names.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from treespark.drafter.attention import context_bias, packed_attention, training_attention
from treespark.drafter.backbone import Attend, BlockAttention, Rope
from treespark.drafter.base import DrafterModel
from treespark.drafter.cache import DraftCache
from treespark.drafter.config import DrafterConfig
from treespark.errors import UsageError
from treespark.tree.policy import NodeChildren

# As many as the block drafters of five layers have.
NUM_DEFAULT_TAPS = 5


class Eagle3Config(DrafterConfig):
    """Sizes of an `Eagle3Drafter`; `block_size` is the number of its steps, DeepSpec's ttt_length.

    step_loss_decay: weight of a step's loss over that of the step before, as it was trained.
    qk_norm: whether query and key heads are normed, as in Qwen3; in Llama they are not.
    norm_before_residual: the residual is the normed hidden state instead of the plain one.
    draft_vocab_size: rows of a head of the drafter's own, whose row i stands for token i + d2t[i];
    None uses the target's head.
    """

    model_type = "treespark_eagle3"

    num_hidden_layers: int = 1
    step_loss_decay: float = 0.8
    qk_norm: bool = True
    norm_before_residual: bool = False
    draft_vocab_size: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill the derived defaults, then check every field."""
        if self.tree is None:
            self.tree = {"depth": self.block_size, "branching": 1, "budget": self.block_size}
        super().__post_init__(**kwargs)

    @property
    def attention_input_size(self) -> int:
        """See DrafterConfig: an embedding and a hidden state side by side."""
        return 2 * self.hidden_size

    @property
    def num_default_taps(self) -> int:
        """See DrafterConfig."""
        return NUM_DEFAULT_TAPS

    @property
    def chain_only(self) -> str:
        """See DrafterConfig: a token's hidden state depends on its whole path."""
        return f"model_type {self.model_type!r}"

    @property
    def norms_heads(self) -> bool:
        """See DrafterConfig."""
        return self.qk_norm

    @property
    def num_head_rows(self) -> int:
        """See DrafterConfig."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def has_own_head(self) -> bool:
        """See DrafterConfig."""
        return self.draft_vocab_size is not None

    def check(self) -> None:
        """See DrafterConfig."""
        super().check()
        _check_eagle3_options(self)
        if self.num_hidden_layers != 1:
            raise UsageError(
                f"drafter config: num_hidden_layers is {self.num_hidden_layers!r}; an EAGLE-3 "
                "drafter has 1"
            )
        decay = self.step_loss_decay
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay <= 1:
            raise UsageError(
                f"drafter config: step_loss_decay is {decay!r}; a number in 0..1 is needed"
            )


def _check_eagle3_options(config: Eagle3Config) -> None:
    for field in ("qk_norm", "norm_before_residual"):
        if not isinstance(getattr(config, field), bool):
            raise UsageError(
                f"drafter config: {field} is {getattr(config, field)!r}; true or false is needed"
            )
    rows = config.draft_vocab_size
    if rows is not None and (
        not isinstance(rows, int) or isinstance(rows, bool) or not 1 <= rows <= config.vocab_size
    ):
        raise UsageError(
            f"drafter config: draft_vocab_size is {rows!r}; null or 1..{config.vocab_size} "
            "(vocab_size) is needed"
        )


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads embedding and hidden state side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = BlockAttention(config)
        self.mlp = Qwen3MLP(config)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)

    def attention_input(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return [..., 2H]: the normed embeddings, then the normed hidden states."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)

    def context(self, hidden: Tensor, embedded: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return keys and values [..., Hkv, D] of committed pairs."""
        return self.self_attn.project_kv(self.attention_input(hidden, embedded), rope)

    def forward(self, hidden: Tensor, embedded: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Return hidden [..., H] after attention (done by `attend`) and MLP, not normed."""
        attention, rows = self.self_attn, self.attention_input(hidden, embedded)
        out = attend(attention.project_query(rows, rope), attention.project_kv(rows, rope))
        residual = self.hidden_norm(hidden) if self.norm_before_residual else hidden
        hidden = residual + attention.o_proj(out.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Cache(DraftCache):
    """Keys and values of committed pairs, and the fused features of every committed position.

    Row j belongs to the pair of position j and token j + 1; the last position's pair waits for its
    token.
    """

    def __init__(
        self,
        config: Eagle3Config,
        num_slots: int,
        max_len: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(config, num_slots, max_len, device, dtype)
        shape = (num_slots, 1, max_len, config.hidden_size)
        # Among the keys, so that whoever copies or counts the rows of a slot has them, too.
        self.keys.append(torch.zeros(shape, device=device, dtype=dtype))

    @property
    def fused(self) -> Tensor:
        """Fused features [num_slots, max_len, H]."""
        return self.keys[1][:, 0]


class Eagle3Drafter(DrafterModel):
    """Proposes a chain of B tokens after an anchor, one layer pass for each."""

    config: Eagle3Config
    config_class = Eagle3Config
    # The heads that block drafters may have.
    markov_head = None
    confidence_head = None

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.has_own_head:
            self.register_buffer("d2t", torch.zeros(config.num_head_rows, dtype=torch.long))
        self.finish_init()

    @property
    def layer(self) -> Eagle3Layer:
        """The only layer."""
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer

    def fuse(self, features: Tensor) -> Tensor:
        """Return [..., H] from features [..., m*H]; no norm follows."""
        return self.fc(features.to(self.compute_dtype))

    def base_logits(self, hidden: Tensor) -> Tensor:
        """See DrafterModel; -inf for tokens that a head of the drafter's own does not have."""
        if not self.config.has_own_head:
            return super().base_logits(hidden)
        drafted = self.lm_head(hidden).float()
        logits = drafted.new_full((*hidden.shape[:-1], self.config.vocab_size), float("-inf"))
        logits[..., head_tokens(self.d2t)] = drafted
        return logits

    # ------------------------------------------------------------------ training

    def training_blocks(
        self, input_ids: Tensor, features: Tensor, anchors: Tensor, keep: Tensor
    ) -> Tensor:
        """Return hidden [S, A, B, H] of the training-time test at all anchors, after the norm.

        input_ids [S, L] int64; features [S, L, m*H]; anchors [S, A] int64 positions; keep [S, A]
        bool. Depth d of an anchor at a is step d - 1 of index a - 1: it is given the row's own
        token a + d - 1 and the output of the step before, and attends the pairs before index a - 1
        and its own steps so far. An anchor that is not kept gives finite values. Where the row
        continues with the drafted tokens this equals `draft_block`.
        """
        anchors = torch.where(keep, anchors, torch.zeros_like(anchors))
        length = input_ids.shape[1]
        fused, embedded = self.fuse(features), self.embed(input_ids)
        cos, sin = self._rotary.rows(length + self.config.block_size, fused.device, fused.dtype)
        context_rope = (cos[: length - 1, None], sin[: length - 1, None])
        context_kv = self.layer.context(fused[:, :-1], embedded[:, 1:], context_rope)
        index = (anchors - 1).clamp(min=0)
        # An anchor at position 0 has nothing before it.
        hidden = _rows_at(pad(fused, (0, 0, 1, 0)), anchors)
        steps: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for step in range(self.config.block_size):
            bias = context_bias(index, length - 1, step + 1)

            def attend(query: Tensor, kv: tuple[Tensor, Tensor], bias: Tensor = bias) -> Tensor:
                own = _append(steps, kv, 2)
                return training_attention(query.unsqueeze(2), own, context_kv, bias).squeeze(2)

            rope = (cos[index + step].unsqueeze(-2), sin[index + step].unsqueeze(-2))
            tokens = _rows_at(embedded, (anchors + step).clamp(max=length - 1))
            hidden = self.layer(hidden, tokens, rope, attend)
            outputs.append(hidden)
        return self.norm(torch.stack(outputs, 2))

    # ------------------------------------------------------------------ drafting

    def new_cache(self, num_slots: int, max_len: int) -> Eagle3Cache:
        """Return an empty context cache in the backbone's dtype and device."""
        device = self.embed_tokens.weight.device
        return Eagle3Cache(self.config, num_slots, max_len, device, self.compute_dtype)

    @torch.no_grad()
    def extend_contexts(
        self,
        cache: Eagle3Cache,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        features: Tensor,
        token_ids: Tensor | None = None,
    ) -> None:
        """Commit counts[i] positions from starts[i] on for each slot.

        features [sum counts, m*H] and token_ids [sum counts] of these positions, the slots one
        after the other. Each token completes the pair of the position before it.
        """
        assert token_ids is not None, "an EAGLE-3 context needs the tokens"
        assert features.shape[0] == token_ids.shape[0] == sum(counts)
        rows = self.fuse(features).split(list(counts))
        hidden: list[Tensor] = []
        tokens: list[Tensor] = []
        positions: list[int] = []
        sizes: list[int] = []
        for slot, start, own, ids in zip(
            slots, starts, rows, token_ids.split(list(counts)), strict=True
        ):
            cache.fused[slot, start : start + len(own)] = own
            # The first token of a slot has no position before it.
            tokens.append(ids if start else ids[1:])
            sizes.append(len(tokens[-1]))
            first = max(start - 1, 0)
            positions += range(first, first + sizes[-1])
            hidden.append(cache.fused[slot, first : first + sizes[-1]])
        if positions:
            pairs = torch.cat(hidden)
            rope = self._rope_rows(positions, pairs)
            keys, values = self.layer.context(pairs, self.embed(torch.cat(tokens)), rope)
            parts = zip(slots, starts, keys.split(sizes), values.split(sizes), strict=True)
            for slot, start, key, value in parts:
                cache.write(0, slot, max(start - 1, 0), key, value)

    @torch.no_grad()
    def draft_block(
        self,
        cache: Eagle3Cache,
        slots: Sequence[int],
        lengths: Sequence[int],
        anchor_tokens: Tensor,
        num_depths: int | None = None,
    ) -> Tensor:
        """Return hidden [R, D, H] along the greedy chain of each request, after the final norm.

        Request i has lengths[i] >= 1 committed positions in slots[i] and its anchor,
        anchor_tokens[i], at position lengths[i]. The cache is only read. The lowest id wins a tie.
        num_depths: D, the number of steps that are taken; None = B.
        """
        num_steps = self.config.block_size if num_depths is None else num_depths
        last = [n - 1 for n in lengths]
        hidden, tokens = cache.fused[list(slots), last], anchor_tokens
        views = [cache.view(0, slot, n) for slot, n in zip(slots, last, strict=True)]
        steps: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []

        def attend(query: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
            return packed_attention(query.unsqueeze(1), _append(steps, kv, 1), views).squeeze(1)

        for step in range(num_steps):
            rope = self._rope_rows([n + step for n in last], hidden)
            hidden = self.layer(hidden, self.embed(tokens), rope, attend)
            outputs.append(self.norm(hidden))
            if step + 1 < num_steps:
                tokens = self.base_logits(outputs[-1]).argmax(-1)
        return torch.stack(outputs, 1)

    def node_children(self, hidden: Tensor) -> NodeChildren:
        """Raise `UsageError`: there are no trees."""
        raise UsageError(f"{self.config.chain_only} can only draft chains, not trees")

    @torch.no_grad()
    def chain(self, hidden: Tensor, anchor_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the greedy chain: tokens [R, B] int64 and the logits [R, B, V] they come from.

        hidden [R, B, H] of `draft_block`, which has the anchors in it, or of `training_blocks`:
        then up to the first token that differs from the row's.
        """
        logits = self.base_logits(hidden)
        return logits.argmax(-1), logits


def head_tokens(d2t: Tensor) -> Tensor:
    """Return the token of every row of a head [rows] int64, from its offsets d2t [rows]."""
    return torch.arange(len(d2t), device=d2t.device) + d2t


def _rows_at(table: Tensor, positions: Tensor) -> Tensor:
    """Rows [S, A, H] of table [S, L, H] at positions [S, A]."""
    return table.gather(1, positions.unsqueeze(-1).expand(-1, -1, table.shape[-1]))


def _append(
    steps: list[tuple[Tensor, Tensor]], kv: tuple[Tensor, Tensor], dim: int
) -> tuple[Tensor, Tensor]:
    """Add a step's keys and values to `steps`; return those of all steps, stacked along `dim`."""
    steps.append(kv)
    keys, values = zip(*steps, strict=True)
    return torch.stack(keys, dim), torch.stack(values, dim)
