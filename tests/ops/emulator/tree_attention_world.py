# SPDX-License-Identifier: Apache-2.0
"""Operands of tree_attention, contiguous or paged, and attention over the rows a node sees."""

import math

import torch

TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


def words_of(mask):
    """Mask words [B, Q, W] int32 of a bool mask [B, Q, Q]."""
    width = 2 * ((mask.shape[-1] + 63) // 64)
    words = torch.zeros(*mask.shape[:2], width, dtype=torch.int64)
    for column in range(mask.shape[-1]):
        words[..., column // 32] |= mask[..., column].long() << column % 32
    return (words - ((words >> 31) << 32)).int()


def random_mask(generator, requests, rows, valid=None):
    """Ancestor masks of random trees; rows from `valid` on see nothing."""
    mask = torch.zeros(requests, rows, rows, dtype=torch.bool)
    for request in range(requests):
        for row in range(rows if valid is None else valid[request]):
            if row:
                parent = int(torch.randint(row, (1,), generator=generator))
                mask[request, row] = mask[request, parent]
            mask[request, row, row] = True
    return mask


def operands(seed, prefixes, rows, heads, kv_heads, dim, dtype=torch.bfloat16, valid=None, room=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).clamp(-4, 4).to(dtype)

    requests, size = len(prefixes), max(prefixes) + rows + room
    return [
        normal(requests, rows, heads, dim),
        normal(requests, size, kv_heads, dim),
        normal(requests, size, kv_heads, dim),
        torch.tensor(prefixes, dtype=torch.int32),
        random_mask(generator, requests, rows, valid),
    ]


def expected(query, key, value, seq_lens, mask, scale=0.0):
    rows, heads, dim = query.shape[1:]
    group, scale = heads // key.shape[2], scale or dim**-0.5
    out = torch.zeros(query.shape)
    lse = torch.full(query.shape[:3], -math.inf)
    for request, prefix in enumerate(seq_lens.tolist()):
        for row in range(rows):
            seen = mask[request, row].nonzero().flatten()
            if not len(seen):
                continue
            columns = torch.cat([torch.arange(prefix), prefix + seen])
            keys = key[request, columns].float().repeat_interleave(group, 1)
            values = value[request, columns].float().repeat_interleave(group, 1)
            scores = torch.einsum("hd,nhd->hn", query[request, row].float(), keys) * scale
            lse[request, row] = scores.logsumexp(-1)
            out[request, row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
    return out, lse


def paged(cache, block_size, seed=0):
    """The same cache in shuffled blocks, and the table that finds them."""
    requests, size = cache.shape[:2]
    count = -(-size // block_size)
    order = torch.randperm(requests * count, generator=torch.Generator().manual_seed(seed))
    blocks = torch.zeros(requests * count, block_size, *cache.shape[2:], dtype=cache.dtype)
    table = order.reshape(requests, count)
    for request in range(requests):
        for block in range(count):
            rows = cache[request, block * block_size : (block + 1) * block_size]
            blocks[table[request, block], : len(rows)] = rows
    return blocks, table.int()
