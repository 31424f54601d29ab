# SPDX-License-Identifier: Apache-2.0
"""What the operators have to move and compute at least, and how long a 910B would take for it.

Everything here is a model, not a measurement: counted bytes and operations over the peak rates of
the chip. A good kernel takes 1.3 to 1.5 times as long. The counts are also the lower bounds that
the traffic counted by the emulator is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

from npu_ops.words import num_words

_HALF, _WORD = 2, 4
# Vector operations per logit or score: scale, maximum, subtract, exp, sum, select and their like.
_VECTOR_OPS = 8
# Flops of one AI core's cube unit per cycle: 16 x 16 x 16 multiply-adds of half precision.
_CUBE_FLOPS_PER_CYCLE = 2 * 16**3
# Two vector units per AI core, 64 lanes of float32 each.
_VECTOR_LANES = 2 * 64
# A launch with nothing to do; estimated from neighbouring operators' times.
LAUNCH_S = 6e-6


@dataclass(frozen=True)
class Chip:
    """Peak rates of one NPU.

    Of 910B2 and 910B4 core counts and clocks are those of the vendor's platform files; those of
    910B1 and 910B3, and all bandwidths, are what documents and measurements suggest.
    """

    name: str
    num_cores: int
    clock_hz: float
    hbm_bytes_per_s: float
    l2_bytes_per_s: float = 7e12

    @property
    def cube_flops_per_s(self) -> float:
        """Half-precision multiply-adds of all cube units, counted as two operations."""
        return self.num_cores * _CUBE_FLOPS_PER_CYCLE * self.clock_hz

    @property
    def vector_ops_per_s(self) -> float:
        """float32 lane operations of all vector units."""
        return self.num_cores * _VECTOR_LANES * self.clock_hz


CHIPS = (
    Chip("910B1", 24, 1.85e9, 1.6e12),
    Chip("910B2", 24, 1.8e9, 1.6e12),
    Chip("910B3", 20, 1.8e9, 1.6e12),
    Chip("910B4", 20, 1.5e9, 0.8e12),
)


@dataclass(frozen=True)
class Work:
    """Lower bounds of one call.

    hbm_bytes: every input read once, every output written once.  l2_bytes: what cube and vector
    units have to hand each other, which on this chip goes through L2.  cube_flops, vector_ops.
    """

    hbm_bytes: int
    l2_bytes: int
    cube_flops: int
    vector_ops: int


@dataclass(frozen=True)
class ModelledTime:
    """seconds: of the slowest unit, all overlapping.  bound_by: hbm, l2, cube, vector or launch."""

    seconds: float
    bound_by: str


def modelled_time(work: Work, chip: Chip) -> ModelledTime:
    """Return the roofline time of a call; a model, at full peak rates."""
    parts = {
        "hbm": work.hbm_bytes / chip.hbm_bytes_per_s,
        "l2": work.l2_bytes / chip.l2_bytes_per_s,
        "cube": work.cube_flops / chip.cube_flops_per_s,
        "vector": work.vector_ops / chip.vector_ops_per_s,
        "launch": LAUNCH_S,
    }
    slowest = max(parts, key=parts.__getitem__)
    return ModelledTime(parts[slowest], slowest)


def markov_topk_work(num_rows: int, num_base_rows: int, vocab: int, rank: int, k: int) -> Work:
    """Return the work of markov_topk with half-precision inputs."""
    weights = vocab * rank * _HALF
    base = num_base_rows * vocab * _HALF
    latents = num_rows * (rank * _HALF + _WORD)
    results = num_rows * (2 * k + 1) * _WORD
    num_logits = num_rows * vocab
    return Work(
        hbm_bytes=weights + base + latents + results,
        # Products leave the cube unit and enter the vector unit in float32.
        l2_bytes=2 * num_logits * _WORD,
        cube_flops=2 * num_logits * rank,
        vector_ops=_VECTOR_OPS * num_logits,
    )


def tree_attention_work(
    num_requests: int, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, prefix: int
) -> Work:
    """Return the work of tree_attention with half-precision inputs, all prefixes equally long."""
    cache = 2 * num_requests * (prefix + num_rows) * num_kv_heads * head_dim * _HALF
    query = num_requests * num_rows * num_heads * head_dim * _HALF
    lse = num_requests * num_rows * num_heads * _WORD
    masks = num_requests * (num_rows * num_words(num_rows) + 1) * _WORD
    num_scores = num_requests * num_rows * num_heads * (prefix + num_rows)
    return Work(
        hbm_bytes=cache + 2 * query + lse + masks,
        # Scores out and in again in float32, probabilities in half precision.
        l2_bytes=2 * num_scores * (_WORD + _HALF),
        cube_flops=4 * num_scores * head_dim,
        vector_ops=_VECTOR_OPS * num_scores,
    )


def pack_tree_work(num_requests: int, num_candidates: int, n: int) -> Work:
    """Return the work of pack_tree; the launch takes longer than all of it."""
    inputs = 3 * num_candidates + 1
    results = n + (n + 1) * (3 + num_words(n + 1)) + 1
    return Work(
        hbm_bytes=num_requests * (inputs + results) * _WORD,
        l2_bytes=0,
        cube_flops=0,
        vector_ops=_VECTOR_OPS * num_requests * num_candidates,
    )
