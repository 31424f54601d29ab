# SPDX-License-Identifier: Apache-2.0
"""Operands of markov_topk whose sums are exact, and its results from the whole logits."""

import math

import torch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def operands(seed, rows, base_rows, vocab, rank, base_dtype=BF16, latent_dtype=BF16):
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape):
        return torch.randint(-3, 4, shape, generator=generator)

    base_row = torch.arange(rows) * base_rows // rows
    return (
        (whole(base_rows, vocab) / 2).to(base_dtype),
        base_row.int(),
        (whole(rows, rank) * (whole(rows, rank) > 1)).to(latent_dtype),
        whole(vocab, rank).to(latent_dtype),
    )


def expected(base_logits, base_row, latent, w2, k, inv_temperature=1.0, vocab_size=-1):
    tokens = base_logits.shape[1] if vocab_size == -1 else vocab_size
    base = base_logits[base_row.long(), :tokens].float()
    z = (base + latent.float() @ w2[:tokens].float().T) * inv_temperature
    z = z.masked_fill(z.isnan(), -math.inf)
    values, indices = z.sort(dim=1, descending=True, stable=True)
    return values[:, :k], indices[:, :k].int(), torch.logsumexp(z, 1)
