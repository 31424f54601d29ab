# SPDX-License-Identifier: Apache-2.0
"""Attention of packed ragged rows, plugged into models by transformers' AttentionInterface.

Shapes: Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head size, T rows of a span, S visible
rows (prefix + T).

One forward runs the rows of all segments as one sequence [1, sum T]; only attention looks at them
separately, each span against its own slot's rows. Heads of a group are folded into rows
([Hkv, G * T, D]), so keys and values are never repeated, and one additive bias [G * T, S] hides
what a tree row may not see. Softmax accumulates in float32 inside scaled_dot_product_attention.
Measured on a CPU (2 threads; 9 heads over 3, D 64; T 9 to 33, S 256 and 1024; bfloat16) against
this: a prefix part without a mask merged with a tree part by log-sum-exp took 1.1 to 1.8 times as
long, unfolded heads 1.1 to 1.5 times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

import npu_ops
from npu_ops.tree_attention.fast import tree_bias
from treespark.target.padded import PaddedPlan, padded_attention

if TYPE_CHECKING:
    from treespark.target.kv_cache import KVCache, TargetState

ATTENTION_NAME = "treespark"


@dataclass
class Span:
    """One segment: its packed rows [offset, offset + length), its slot and its first cache row."""

    offset: int
    length: int
    slot: int = 0
    start: int = 0
    # [G * T, S] in the compute dtype. None: causal from row 0 on, or one row that sees everything.
    bias: Tensor | None = None


@dataclass
class TreeRows:
    """The trees of one verification for the operator tree_attention, padded to Q rows each.

    slots, starts: of each request, its cache rows and the first of its tree's.  seq_lens [R] int32:
    starts on the device.  words [R, Q, W] int32: ancestor masks.  block_table [R, M] int32.
    """

    cache: KVCache
    slots: list[int]
    starts: list[int]
    seq_lens: Tensor
    words: Tensor
    block_table: Tensor


@dataclass
class AttentionPlan:
    """What attention needs to know about one forward; without state, spans see only themselves.

    trees: instead of spans, where a kernel attends to all trees at once.
    """

    spans: list[Span]
    state: TargetState | None = None
    trees: TreeRows | None = None


def attention_bias(
    num_rows: int,
    start: int,
    mask: Tensor | None,
    groups: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Return [groups * num_rows, start + num_rows]: 0 where a row sees a column, else -inf.

    mask: [num_rows, num_rows] bool, row sees column, among the new rows; None is causal. All rows
    see the prefix. Returns None where attend needs no bias.
    """
    if num_rows == 1 or (mask is None and start == 0):
        return None
    if mask is None:
        mask = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril_()
    return tree_bias(mask, start, groups, dtype)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float
) -> Tensor:
    """Return [1, T, Hq, D]: query [1, Hq, T, D] over keys and values [1, Hkv, S, D].

    bias: [G * T, S], see attention_bias; without one the rows are causal (T == S) or see everything
    (T == 1).
    """
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    if bias is None and num_rows > 1:
        out = scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scaling, enable_gqa=num_heads != num_kv_heads
        )
        return out.transpose(1, 2)
    folded = query.reshape(1, num_kv_heads, num_heads // num_kv_heads * num_rows, head_dim)
    out = scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=scaling)
    return out.view(1, num_heads, num_rows, head_dim).transpose(1, 2)


def rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    treespark_plan: AttentionPlan | PaddedPlan | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend in one layer; transformers calls it with query, key, value [1, heads, sum T, D].

    Writes the rows' keys and values into the plan's state and returns ([1, sum T, Hq, D], None).
    """
    assert treespark_plan is not None, "the target's attention runs only inside TargetModel"
    if isinstance(treespark_plan, PaddedPlan):
        layer: int = module.layer_idx  # type: ignore[assignment]
        return padded_attention(layer, query, key, value, scaling, treespark_plan), None
    if treespark_plan.trees is not None:
        return _trees_attention(module, query, key, value, treespark_plan.trees, scaling), None
    state, outputs = treespark_plan.state, []
    for span in treespark_plan.spans:
        query_rows = query.narrow(2, span.offset, span.length)
        keys = key.narrow(2, span.offset, span.length)
        values = value.narrow(2, span.offset, span.length)
        if state is not None:
            keys, values = state.write(module.layer_idx, span.slot, span.start, keys, values)  # type: ignore[arg-type]
        outputs.append(attend(query_rows, keys, values, span.bias, scaling))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


def _trees_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, trees: TreeRows, scaling: float
) -> Tensor:
    """Write all trees' rows into the cache and return [1, R * Q, Hq, D] by one operator call."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    num_trees = len(trees.slots)
    rows = [part[0].unflatten(1, (num_trees, -1)) for part in (query, key, value)]
    for number, (slot, start) in enumerate(zip(trees.slots, trees.starts, strict=True)):
        keys, values = (part[None, :, number] for part in rows[1:])
        trees.cache.write(layer, slot, start, keys, values)
    out = npu_ops.tree_attention(
        rows[0].permute(1, 2, 0, 3),
        *trees.cache.blocks(layer),
        trees.seq_lens,
        trees.words,
        trees.block_table,
        scaling,
        trees.cache.block_size,
    ).out
    return out.flatten(0, 1)[None]


# No entry in transformers' AttentionMaskInterface: for a name without one, models build no mask and
# pass None.
AttentionInterface.register(ATTENTION_NAME, rows_attention)
