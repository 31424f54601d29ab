# SPDX-License-Identifier: Apache-2.0
"""Every operator's kernel, emulated, against the operator's own reference on random calls.

Tokens, columns, parents and masks are compared exactly. Sizes, types, core counts and modes are
drawn from the lists below, and every entry of a list is drawn at least once.
"""

import math

import pytest
import torch

from npu_ops.emulator import operators
from tests.ops.emulator import markov_topk_world as markov
from tests.ops.emulator import tree_attention_world as attention
from tests.ops.emulator.pack_tree_world import random_trees

REASON = "the operators' references are not in this checkout"
pack_tree = pytest.importorskip("npu_ops.pack_tree.reference", reason=REASON)
markov_topk = pytest.importorskip("npu_ops.markov_topk.reference", reason=REASON)
tree_attention = pytest.importorskip("npu_ops.tree_attention.reference", reason=REASON)

BLOCKS = [1, 2, 3, 20, 24]
VOCABULARIES = [1, 17, 255, 1000, 2500, 49152]
PREFIXES = [0, 1, 127, 512, 513]


def integer(generator, low, high):
    return int(torch.randint(low, high + 1, (1,), generator=generator))


def strided(tensor):
    """The same values, not contiguous."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("seed", range(10))
def test_pack_tree_is_its_reference(seed):
    generator = torch.Generator().manual_seed(seed)
    requests = [1, 12, integer(generator, 2, 11)][seed % 3]
    candidates = integer(generator, 1, 600)
    depth = min(integer(generator, 1, 9), candidates)
    scores, parents, depths = random_trees(seed, requests, candidates, depth, ties=True)
    scores[torch.rand(requests, candidates, generator=generator) < 0.05] = math.nan
    counts = torch.randint(0, candidates + 1, (requests,), generator=generator).int()
    bias = torch.randn(depth + 1, generator=generator).round()
    n = integer(generator, 1, 127)
    arguments = (strided(scores), strided(parents), depths, counts, bias, n)
    launch = {"blocks": BLOCKS[seed % 5], "strict": seed % 2 == 0}
    results = operators.pack_tree(*arguments, **launch).results
    for result, wanted in zip(results, pack_tree.reference(*arguments), strict=True):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("seed", range(12))
def test_markov_topk_is_its_reference(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = [1, 12, integer(generator, 2, 70)][seed % 3]
    vocabulary = VOCABULARIES[seed // 2]
    if vocabulary == 49152:
        rows = 12
    k = min([1, 4, 8, 32][seed % 4], vocabulary)
    base_dtype = [torch.bfloat16, torch.float16, torch.float32][seed % 3]
    dtype = [torch.bfloat16, torch.float16][seed // 2 % 2]
    base_rows = integer(generator, 1, rows)
    rank = 16 * integer(generator, 1, 32)
    base, *others = markov.operands(seed, rows, base_rows, vocabulary, rank, base_dtype, dtype)
    base[torch.rand(base.shape, generator=generator) < 0.01] = math.nan
    arguments = (strided(base), *others)
    temperature = [1.0, 0.5][seed % 2]
    launch = {"blocks": BLOCKS[seed % 5], "strict": seed % 2 == 0}
    results = operators.markov_topk(*arguments, k, temperature, **launch).results
    values, indices, lse = markov_topk.reference(*arguments, k, temperature)
    assert torch.equal(results[0], values)
    assert torch.equal(results[1], indices)
    # The order of the sums, and Exp and Ln, differ: test_markov_topk.py.
    torch.testing.assert_close(results[2], lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_tree_attention_is_its_reference(seed):
    generator = torch.Generator().manual_seed(seed)
    kv_heads, group = integer(generator, 1, 3), integer(generator, 1, 5)
    rows = [1, 8, 33, 64][seed % 4]
    prefixes = [PREFIXES[seed % 5], integer(generator, 0, 300), integer(generator, 0, 300)]
    valid = [rows, integer(generator, 0, rows), rows]
    dtype = [torch.bfloat16, torch.float16][seed % 2]
    sizes = (prefixes, rows, kv_heads * group, kv_heads, [64, 128][seed // 2 % 2])
    query, key, value, seq_lens, mask = attention.operands(seed, *sizes, dtype, valid)
    words, table, block_size = attention.words_of(mask), None, [0, 16, 128][seed % 3]
    if block_size:
        (key, table), (value, _) = (attention.paged(cache, block_size) for cache in (key, value))
    arguments = (strided(query), strided(key), value, seq_lens, words, table, 0.0, block_size)
    launch = {"blocks": BLOCKS[seed % 5], "strict": seed % 2 == 0}
    out, lse = operators.tree_attention(*arguments, **launch).results
    wanted_out, wanted_lse = tree_attention.reference(*arguments)
    tolerance = attention.TOLERANCE[dtype]
    torch.testing.assert_close(out.float(), wanted_out.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)
