# SPDX-License-Identifier: Apache-2.0
"""The operators' own kernels on CPU tensors: host part, tiling and kernel as on a card.

The results are those of `torch.ops.treespark.*`; the counters of the launch come with them.
"""

import ctypes
import operator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_ops.emulator.build import build
from npu_ops.emulator.launch import In, Library, Out, Workspace

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"


class PackTreeTiling(ctypes.Structure):
    """Mirrors pack_tree/op_host/pack_tree_tiling.h."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            *("num_requests", "num_candidates", "budget"),
            *("max_depth", "sort_length", "num_words"),
        )
    )


class MarkovTopkTiling(ctypes.Structure):
    """Mirrors markov_topk/op_host/markov_topk_tiling.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rows", "base_rows", "vocab", "num_tokens", "rank")),
        *((name, ctypes.c_int32) for name in ("k", "base_dtype", "latent_dtype", "row_tile")),
        *((name, ctypes.c_int32) for name in ("tile_columns", "slice_columns", "num_tiles")),
        *((name, ctypes.c_int32) for name in ("tiles_per_block", "used_blocks")),
        ("inv_temperature", ctypes.c_float),
    )


class TreeAttentionTiling(ctypes.Structure):
    """Mirrors tree_attention/op_host/tree_attention_tiling.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("requests", "rows", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("num_words", "cache_rows", "block_size")),
        *((name, ctypes.c_int32) for name in ("max_blocks", "is_half", "group", "sub_queries")),
        *((name, ctypes.c_int32) for name in ("passes", "splits")),
        ("scale", ctypes.c_float),
    )


# kTreeSubRows and kTreeColumns of tree_attention_tiling.h.
_SUB_ROWS, _COLUMNS = 80, 128
# MarkovDtype of markov_topk_tiling.h.
_MARKOV_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_MARKOV_SLOTS, _MARKOV_LIST = 2, 32


class Emulated(NamedTuple):
    """Results in the order of the operator's schema, and the counters of `Library.launch`."""

    results: tuple[Tensor, ...]
    counters: dict


def pack_tree(
    scores: Tensor,
    parents: Tensor,
    depths: Tensor,
    counts: Tensor,
    depth_bias: Tensor,
    n: int,
    *,
    blocks: int = 20,
    strict: bool = True,
    library: Library | None = None,
) -> Emulated:
    """Run pack_tree's kernel on `blocks` emulated vector cores; contract of the operator's README.

    library: another build of the kernel.
    Raises RuntimeError for sizes that the host part refuses, EmulatorError for a broken kernel.
    """
    library = library or pack_tree_library()
    tiling = _pack_tree_tiling(library, *scores.shape, n, len(depth_bias) - 1)
    requests, rows = tiling.num_requests, n + 1
    shapes = {
        "index": (requests, n),
        "parent": (requests, rows),
        "depth": (requests, rows),
        "position": (requests, rows),
        "mask": (requests, rows, tiling.num_words),
        "count": (requests,),
    }
    results = {name: torch.empty(shape, dtype=torch.int32) for name, shape in shapes.items()}
    inputs = {"scores": scores, "parents": parents, "depths": depths, "counts": counts}
    inputs["depth_bias"] = depth_bias
    arguments = [In(name, _array(tensor)) for name, tensor in inputs.items()]
    arguments += [Out(name, tensor.numpy()) for name, tensor in results.items()]
    counters = library.launch("pack_tree", [*arguments, tiling], blocks=blocks, strict=strict)
    return Emulated(tuple(results.values()), counters)


def markov_topk(
    base_logits: Tensor,
    base_row: Tensor,
    latent: Tensor,
    w2: Tensor,
    k: int,
    inv_temperature: float = 1.0,
    vocab_size: int = -1,
    *,
    blocks: int = 20,
    strict: bool = True,
    library: Library | None = None,
) -> Emulated:
    """Run markov_topk's two kernels on `blocks` cube cores and twice as many vector cores.

    The counters are those of both launches added; the contract is in the operator's README.
    library: another build of the kernels.
    Raises RuntimeError for sizes that the host part refuses, EmulatorError for a broken kernel.
    """
    library = library or markov_topk_library()
    num_tokens = base_logits.shape[1] if vocab_size == -1 else vocab_size
    tiling = _markov_topk_tiling(
        library, base_logits, latent, num_tokens, k, inv_temperature, blocks
    )
    rows, used = tiling.rows, tiling.used_blocks
    ring = (blocks, _MARKOV_SLOTS, tiling.row_tile, tiling.tile_columns)
    shapes = {"ring": ring, "lists": (used, rows, _MARKOV_LIST, 2)}
    shapes |= {"maxima": (rows, used), "sums": (rows, used)}
    scratch = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
    inputs = {"base_logits": base_logits, "base_row": base_row, "latent": latent, "w2": w2}
    first = library.launch(
        "markov_topk",
        [
            *(In(name, _array(tensor)) for name, tensor in inputs.items()),
            *(Workspace(name, array) for name, array in scratch.items()),
            tiling,
        ],
        blocks=blocks,
        kind="mix_aic_1_2",
        strict=strict,
    )
    values, lse = torch.empty(rows, k), torch.empty(rows)
    indices = torch.empty(rows, k, dtype=torch.int32)
    results = {"values": values, "indices": indices, "lse": lse}
    second = library.launch(
        "markov_topk_merge",
        [
            *(In(name, scratch[name]) for name in ("lists", "maxima", "sums")),
            *(Out(name, tensor.numpy()) for name, tensor in results.items()),
            tiling,
        ],
        blocks=min(2 * blocks, 64),
        strict=strict,
    )
    return Emulated(tuple(results.values()), _added(first, second))


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    block_table: Tensor | None = None,
    scale: float = 0.0,
    block_size: int = 0,
    *,
    blocks: int = 20,
    strict: bool = True,
    library: Library | None = None,
) -> Emulated:
    """Run tree_attention's two kernels on `blocks` cube cores and twice as many vector cores.

    The counters are those of both launches added; the contract is in the operator's README.
    library: another build of the kernels.
    Raises RuntimeError for sizes that the host part refuses, EmulatorError for a broken kernel.
    """
    library = library or tree_attention_library()
    tiling = _tree_attention_tiling(library, query, key, block_table, scale, block_size, blocks)
    out_rows, dim = query[..., 0].numel(), query.shape[-1]
    item = np.float16 if query.dtype == torch.float16 else np.int16
    scratch = {
        "scores": np.empty((blocks, 2, 2, _SUB_ROWS, _COLUMNS), np.float32),
        "weights": np.empty((blocks, 2, _SUB_ROWS, _COLUMNS), item),
        "sums": np.empty((blocks, 2, _SUB_ROWS, dim), np.float32),
    }
    out, lse = torch.empty(query.shape, dtype=query.dtype), torch.empty(query.shape[:3])
    results = [Out("out", _array(out)), Out("lse", lse.numpy())]
    parts = [
        Workspace("parts", np.empty((out_rows, tiling.splits, dim), np.float32)),
        Workspace("lses", np.empty((out_rows, tiling.splits), np.float32)),
    ]
    inputs = {"query": query, "key": key, "value": value}
    inputs |= {"seq_lens": seq_lens, "tree_mask": tree_mask}
    counters = library.launch(
        "tree_attention",
        [
            *(In(name, _array(tensor)) for name, tensor in inputs.items()),
            None if block_table is None else In("block_table", _array(block_table)),
            *(Workspace(name, array) for name, array in scratch.items()),
            # With one split the first kernel writes the results.
            *(results if tiling.splits == 1 else parts),
            tiling,
        ],
        blocks=blocks,
        kind="mix_aic_1_2",
        strict=strict,
    )
    if tiling.splits > 1:
        done = [In(part.name, part.array) for part in parts]
        arguments = [*done, In("tree_mask", _array(tree_mask)), *results, tiling]
        combine = library.launch(
            "tree_attention_combine", arguments, blocks=min(2 * blocks, 64), strict=strict
        )
        counters = _added(counters, combine)
    return Emulated((out, lse), counters)


@cache
def tree_attention_library(folder: Path = ROOT / "tree_attention") -> Library:
    """Return the compiled kernels and host part of tree_attention, from the operator's folder."""
    return build(
        folder / "op_kernel" / "tree_attention.cpp",
        ["tree_attention", "tree_attention_combine"],
        more=[folder / "op_kernel" / "tree_attention_combine.cpp"],
        host=[folder / "op_host" / "tree_attention_tiling.cpp"],
        include=[CSRC],
    )


def _tree_attention_tiling(
    library: Library,
    query: Tensor,
    key: Tensor,
    block_table: Tensor | None,
    scale: float,
    block_size: int,
    blocks: int,
) -> TreeAttentionTiling:
    """Return the tiling of the host part, which checks the sizes."""
    tiling, error = TreeAttentionTiling(), ctypes.create_string_buffer(320)
    requests, rows, heads, dim = query.shape
    max_blocks = 0 if block_table is None else block_table.shape[1]
    sizes = (requests, rows, heads, key.shape[2], dim, key.shape[1], block_size, max_blocks)
    failed = library.function("tree_attention_tiling")(
        *map(ctypes.c_int64, sizes),
        ctypes.c_int32(query.dtype == torch.float16),
        ctypes.c_float(scale),
        ctypes.c_int64(blocks),
        ctypes.byref(tiling),
        error,
        ctypes.c_int32(len(error)),
    )
    if failed:
        raise RuntimeError(error.value.decode())
    return tiling


def _added(first: dict, second: dict) -> dict:
    """Return the counters of two launches that follow each other; peaks are the larger ones."""
    total = {}
    for name, counter in first.items():
        if isinstance(counter, dict):
            combine = max if name == "peak" else operator.add
            keys = counter | second[name]
            total[name] = {
                key: combine(counter.get(key, 0), second[name].get(key, 0)) for key in keys
            }
        else:
            total[name] = counter + second[name]
    return total


@cache
def markov_topk_library(folder: Path = ROOT / "markov_topk") -> Library:
    """Return the compiled kernels and host part of markov_topk, from the operator's folder."""
    return build(
        folder / "op_kernel" / "markov_topk.cpp",
        ["markov_topk", "markov_topk_merge"],
        more=[folder / "op_kernel" / "markov_topk_merge.cpp"],
        host=[folder / "op_host" / "markov_topk_tiling.cpp"],
        include=[CSRC],
    )


def _markov_topk_tiling(
    library: Library,
    base_logits: Tensor,
    latent: Tensor,
    num_tokens: int,
    k: int,
    inv_temperature: float,
    blocks: int,
) -> MarkovTopkTiling:
    """Return the tiling of the host part, which checks the sizes."""
    tiling, error = MarkovTopkTiling(), ctypes.create_string_buffer(256)
    sizes = (latent.shape[0], *base_logits.shape, num_tokens, latent.shape[1], k)
    function = library.function("markov_topk_tiling")
    failed = function(
        *map(ctypes.c_int64, sizes),
        ctypes.c_int32(_MARKOV_DTYPES[base_logits.dtype]),
        ctypes.c_int32(_MARKOV_DTYPES[latent.dtype]),
        ctypes.c_float(inv_temperature),
        ctypes.c_int64(blocks),
        ctypes.byref(tiling),
        error,
        ctypes.c_int32(len(error)),
    )
    if failed:
        raise RuntimeError(error.value.decode())
    return tiling


@cache
def pack_tree_library(folder: Path = ROOT / "pack_tree") -> Library:
    """Return the compiled kernel and host part of pack_tree, from the operator's folder."""
    return build(
        folder / "op_kernel" / "pack_tree.cpp",
        ["pack_tree"],
        host=[folder / "op_host" / "pack_tree_tiling.cpp"],
        include=[CSRC],
    )


def _pack_tree_tiling(
    library: Library, requests: int, candidates: int, n: int, max_depth: int
) -> PackTreeTiling:
    """Return the tiling of the host part, which checks the sizes."""
    tiling, error = PackTreeTiling(), ctypes.create_string_buffer(256)
    sizes = (ctypes.c_int64(size) for size in (requests, candidates, n, max_depth))
    function = library.function("pack_tree_tiling")
    if function(*sizes, ctypes.byref(tiling), error, ctypes.c_int32(len(error))):
        raise RuntimeError(error.value.decode())
    return tiling


def _array(tensor: Tensor) -> np.ndarray:
    """Return a contiguous array; the binding makes tensors contiguous in the same way."""
    tensor = tensor.detach().contiguous()
    # NumPy has no bfloat16; the kernel reads the bits.
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
