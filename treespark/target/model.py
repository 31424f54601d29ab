# SPDX-License-Identifier: Apache-2.0
"""The target model: a Hugging Face causal LM run over packed ragged rows with our own cache.

Shapes: R requests, N nodes of a packed tree without its root, T rows of one segment, S sequences, L
padded sequence length, m tapped layers, H hidden size, V vocabulary. "Features" are the outputs of
the tapped decoder layers, side by side in the order of `target_layer_ids`; "last hidden" is the
output of the final norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import npu_ops
from npu_ops.tree_attention import fits as within_limits
from treespark.device import resolve_device, resolve_dtype
from treespark.errors import UsageError
from treespark.prepack import prepack_linears
from treespark.target.attention import AttentionPlan, Span, TreeRows, attention_bias
from treespark.target.families import TargetFamily, family_of
from treespark.target.folder import (
    check_folder,
    eos_token_ids,
    fingerprint,
    load_config,
    load_weights,
)
from treespark.target.kv_cache import KVCache, TargetState
from treespark.target.padded import PaddedPlan, padded_plan
from treespark.target.template import open_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from treespark.tree.packed import PackedTree

LogitsOf = Literal["all", "last", "none"]

# Cache rows of one block where a kernel reads the cache: its tile of keys.
KERNEL_BLOCK = 128


@dataclass
class Segment:
    """Rows of one slot in a forward, written at cache rows [start, start + T).

    They see all rows before.  token_ids, position_ids: [T] int64.  mask: [T, T] bool, row sees
    column, among the new rows; None is causal.
    """

    slot: int
    start: int
    token_ids: Tensor
    position_ids: Tensor
    mask: Tensor | None = None


@dataclass
class RowsOutput:
    """Results of a forward over n segments, rows in segment order.

    logits: float32 [sum T, V], [n, V] or [0, V], as asked for.  features: [sum T, m * H].
    last_hidden: [sum T, H].
    """

    logits: Tensor
    features: Tensor
    last_hidden: Tensor


@dataclass
class VerifyOutput:
    """Results at every node: logits [R, N + 1, V] float32, features [R, N + 1, m * H].

    Pads are 0, or finite and meaningless where the target `runs_padding`.
    """

    logits: Tensor
    features: Tensor


class TargetModel:
    """A frozen target with packed forwards, taps, a slot cache, and tree verification."""

    def __init__(
        self,
        model: Any,
        family: TargetFamily,
        *,
        path: Path,
        fingerprint: str,
        eos_token_ids: set[int],
        target_layer_ids: Sequence[int] | None = None,
        prepack: bool = True,
    ) -> None:
        self._base, self._head = model.base_model, model.get_output_embeddings()
        self.family = family
        self.path = path
        self.fingerprint = fingerprint
        self.eos_token_ids = eos_token_ids
        self.config = model.config
        self.vocab_size: int = self.config.vocab_size
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.max_context: int = self.config.max_position_embeddings
        self.embed_weight: Tensor = model.get_input_embeddings().weight
        self.head_weight: Tensor = self._head.weight
        self.device, self.dtype = self.embed_weight.device, self.embed_weight.dtype
        num_heads = self.config.num_attention_heads
        self._num_kv_heads: int = getattr(self.config, "num_key_value_heads", None) or num_heads
        self._head_dim: int = (
            getattr(self.config, "head_dim", None) or self.hidden_size // num_heads
        )
        self._groups = num_heads // self._num_kv_heads
        # Whether trees are verified as a rectangle, their padding computed like nodes. That keeps
        # shapes few and spares a round the wait for the numbers of nodes; a CPU would pay for every
        # row and column.
        self.runs_padding = self.device.type != "cpu"
        self._tapped: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        if prepack:
            prepack_linears(model)
            self._head = model.get_output_embeddings()
        self.set_taps(target_layer_ids or ())

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        target_layer_ids: Sequence[int] | None = None,
        prepack: bool = True,
    ) -> TargetModel:
        """Load a local Hugging Face folder (safetensors only, no custom code) for inference.

        device, dtype: as treespark.device resolves them.  target_layer_ids: see set_taps; None taps
        no layer. prepack: see treespark.prepack; False computes with the very products
        transformers uses. Raises UsageError for a folder that cannot be used, a family that is not
        supported, or a wrong tap.
        """
        folder = Path(path)
        files = check_folder(folder)
        config = load_config(folder)
        family = family_of(config)
        resolved = resolve_device(device)
        model = load_weights(folder, config, resolve_dtype(dtype, resolved))
        return cls(
            model.to(resolved).eval().requires_grad_(False),
            family,
            path=folder,
            fingerprint=fingerprint(config, files),
            eos_token_ids=eos_token_ids(folder, config),
            target_layer_ids=target_layer_ids,
            prepack=prepack,
        )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The folder's tokenizer. Raises UsageError when it has none."""
        return open_tokenizer(self.path, "target")

    def set_taps(self, target_layer_ids: Sequence[int]) -> None:
        """Tap the outputs of these decoder layers: id i is Hugging Face's hidden_states[i + 1].

        Raises UsageError for an id out of range, a repeated one, and the last layer: what Hugging
        Face calls its hidden state has passed the final norm, a layer's output has not.
        """
        ids = [int(i) for i in target_layer_ids]
        if any(not 0 <= i < self.num_layers - 1 for i in ids) or len(set(ids)) < len(ids):
            raise UsageError(
                f"target_layer_ids {ids}: allowed are distinct ids 0..{self.num_layers - 2} "
                f"(the last of the target's {self.num_layers} layers cannot be tapped)"
            )
        for hook in self._hooks:
            hook.remove()
        self.target_layer_ids = ids
        self._hooks = [self._base.layers[i].register_forward_hook(self._tap(i)) for i in ids]

    def _tap(self, layer_id: int) -> Any:
        """A forward hook that keeps the layer's output of the current forward."""

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._tapped[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep

    def new_cache(self, num_slots: int, max_len: int) -> KVCache:
        """Return a cache of `num_slots` x `max_len` rows; a round needs its N + 1 rows free."""
        return KVCache(
            self.num_layers,
            num_slots,
            self._num_kv_heads,
            max_len,
            self._head_dim,
            dtype=self.dtype,
            device=self.device,
            zeroed=self.runs_padding,
            block_size=KERNEL_BLOCK if self._has_tree_kernel else 0,
        )

    @property
    def _has_tree_kernel(self) -> bool:
        """Whether a kernel of tree_attention serves this target on its device.

        Elsewhere `attend` is faster: one request at a time, over the rows that are there.
        """
        kernel = npu_ops.has_kernel("tree_attention", self.device)
        return kernel and within_limits(self._head_dim, 1)

    def _run(
        self, token_ids: Tensor, position_ids: Tensor, plan: AttentionPlan | PaddedPlan
    ) -> tuple[Tensor, Tensor]:
        """Features [n, m * H] and last hidden [n, H] of n packed rows."""
        self._tapped.clear()
        output = self._base(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            treespark_plan=plan,
        )
        hidden = output.last_hidden_state[0]
        taps = [self._tapped[i][0] for i in self.target_layer_ids]
        self._tapped.clear()
        if not taps:
            return hidden.new_empty(len(hidden), 0), hidden
        return (torch.cat(taps, dim=-1) if len(taps) > 1 else taps[0]), hidden

    @property
    def head(self) -> nn.Module:
        """The output head as it is used here, [..., H] -> [..., V] in the model's dtype."""
        return self._head

    @torch.no_grad()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """Return logits [..., V] of last hidden rows [..., H]: model dtype, then float32."""
        return self._head(last_hidden).float()

    @torch.no_grad()
    def forward_rows(
        self, segments: Sequence[Segment], cache: TargetState, *, logits: LogitsOf = "last"
    ) -> RowsOutput:
        """Run all rows of all segments at once and write their keys and values to the cache.

        logits: "all" rows, the "last" row of each segment, or "none".
        """
        spans, offset = [], 0
        for s in segments:
            num_rows = s.token_ids.shape[0]
            assert s.start + num_rows <= cache.max_len, (s.slot, s.start, num_rows, cache.max_len)
            bias = attention_bias(num_rows, s.start, s.mask, self._groups, self.dtype, self.device)
            spans.append(Span(offset, num_rows, s.slot, s.start, bias))
            offset += num_rows
        token_ids = torch.cat([s.token_ids for s in segments]).to(self.device)
        position_ids = torch.cat([s.position_ids for s in segments]).to(self.device)
        features, hidden = self._run(token_ids, position_ids, AttentionPlan(spans, cache))
        if logits == "all":
            rows = hidden
        elif logits == "none":
            rows = hidden[:0]
        elif len(spans) == offset:
            rows = hidden
        else:
            rows = hidden[[span.offset + span.length - 1 for span in spans]]
        return RowsOutput(self.logits(rows), features, hidden)

    def prefill(self, cache: TargetState, slot: int, start: int, token_ids: Tensor) -> RowsOutput:
        """Run one chunk [T] of a prompt at positions start..start + T - 1; logits of its last row.

        Raises UsageError when the chunk is empty or reaches beyond the target's context or the
        cache.
        """
        end, limit = start + len(token_ids), min(self.max_context, cache.max_len)
        if not len(token_ids):
            raise UsageError("prompt: has no token, at least one is needed")
        if end > limit:
            raise UsageError(
                f"prompt of {end} tokens: allowed are at most {limit} "
                f"(context of the target {self.max_context}, cache {cache.max_len})"
            )
        positions = torch.arange(start, end, device=self.device)
        return self.forward_rows([Segment(slot, start, token_ids, positions)], cache, logits="last")

    def verify(
        self, tree: PackedTree, cache: TargetState, slots: list[int], lengths: list[int]
    ) -> VerifyOutput:
        """Run every request's tree behind the committed rows `lengths[i]` of its `slots[i]`.

        A node sees the committed rows and its ancestors, at position lengths[i] + depth. Its rows
        stay tentative in the cache until commit. See `runs_padding`.  Source: TreeSpark A.3.
        """
        width = tree.tokens.shape[1]
        if isinstance(cache, KVCache) and cache.block_size and within_limits(self._head_dim, width):
            return self._verify_by_kernel(tree, cache, slots, lengths)
        if self.runs_padding:
            return self._verify_padded(tree, cache, slots, lengths)
        counts = (tree.num_nodes + 1).tolist()
        masks = tree.ancestor_mask()
        positions = tree.position_ids(torch.tensor(lengths, device=tree.tokens.device))
        segments = [
            Segment(
                slot,
                length,
                tree.tokens[i, :n],
                positions[i, :n],
                masks[i, :n, :n] if n > 1 else None,
            )
            for i, (slot, length, n) in enumerate(zip(slots, lengths, counts, strict=True))
        ]
        out = self.forward_rows(segments, cache, logits="all")
        return VerifyOutput(
            _padded(out.logits, counts, width), _padded(out.features, counts, width)
        )

    @torch.no_grad()
    def _verify_padded(
        self, tree: PackedTree, cache: TargetState, slots: list[int], lengths: list[int]
    ) -> VerifyOutput:
        """`verify` as one rectangle of all slots of all trees."""
        assert isinstance(cache, KVCache)
        mask = tree.ancestor_mask()
        plan = padded_plan(mask, cache, slots, lengths, self._groups, self.dtype)
        positions = tree.position_ids(plan.starts)
        features, hidden = self._run(tree.tokens.flatten(), positions.flatten(), plan)
        logits, shape = self.logits(hidden), tree.tokens.shape
        return VerifyOutput(
            logits.view(*shape, logits.shape[-1]), features.reshape(*shape, features.shape[-1])
        )

    @torch.no_grad()
    def _verify_by_kernel(
        self, tree: PackedTree, cache: KVCache, slots: list[int], lengths: list[int]
    ) -> VerifyOutput:
        """`verify` over all slots of the trees, padding included, without waiting for the device.

        Every shape is that of the budget, so that a captured graph can be replayed.
        """
        num_trees, width = tree.tokens.shape
        assert max(lengths) + width <= cache.max_len, (lengths, width, cache.max_len)
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        is_node = tree.valid[..., None]
        words = npu_ops.words_from_mask(tree.ancestor_mask() & is_node)
        trees = TreeRows(cache, slots, lengths, seq_lens, words, cache.block_table(slots))
        positions = tree.position_ids(seq_lens).long()
        plan = AttentionPlan([], trees=trees)
        features, hidden = self._run(tree.tokens.flatten(), positions.flatten(), plan)
        logits, features = (
            rows.unflatten(0, (num_trees, width)).masked_fill(~is_node, 0)
            for rows in (self.logits(hidden), features)
        )
        return VerifyOutput(logits, features)

    def commit(
        self, cache: TargetState, slots: list[int], lengths: list[int], paths: list[list[int]]
    ) -> None:
        """Make the rows of each request's accepted node indices, root first, committed rows."""
        cache.commit(slots, lengths, paths)

    @torch.no_grad()
    def sequence_outputs(
        self, input_ids: Tensor, lengths: Sequence[int] | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return features [S, L, m * H] and last hidden [S, L, H] of right-padded sequences.

        input_ids: [S, L] int64.  Rows of padding are 0. Causal over each sequence's first
        lengths[i] tokens, without a cache; pad tokens are not computed.
        """
        counts = [int(n) for n in lengths]
        width = input_ids.shape[1]
        spans, offset = [], 0
        for n in counts:
            spans.append(Span(offset, n))
            offset += n
        token_ids = torch.cat([row[:n] for row, n in zip(input_ids, counts, strict=True)]).to(
            self.device
        )
        position_ids = torch.cat([torch.arange(n, device=self.device) for n in counts])
        features, hidden = self._run(token_ids, position_ids, AttentionPlan(spans))
        return _padded(features, counts, width), _padded(hidden, counts, width)


def _padded(rows: Tensor, counts: list[int], width: int) -> Tensor:
    """Packed rows [sum counts, ...] as [len(counts), width, ...], zeros behind each count."""
    if all(n == width for n in counts):
        return rows.view(len(counts), width, *rows.shape[1:])
    out = rows.new_zeros(len(counts), width, *rows.shape[1:])
    for target, part in zip(out, rows.split(counts), strict=True):
        target[: len(part)] = part
    return out
