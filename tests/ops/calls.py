# SPDX-License-Identifier: Apache-2.0
"""One small, ordinary call of every operator, for tests that are the same for all."""

import torch

from npu_ops import words_from_mask
from npu_ops.markov_topk import PARENT
from npu_ops.markov_topk import SPEC as MARKOV_TOPK
from npu_ops.pack_tree import SPEC as PACK_TREE
from npu_ops.tree_attention import SPEC as TREE_ATTENTION

SPECS = (MARKOV_TOPK, TREE_ATTENTION, PACK_TREE)


def overload(spec):
    """The operator as torch has it."""
    name, _, variant = spec.name.partition(".")
    return getattr(getattr(torch.ops.treespark, name), variant or "default")


def markov_arguments(requires_grad=False):
    torch.manual_seed(0)
    base, latent, w2 = torch.randn(2, 50), torch.randn(6, 16), torch.randn(50, 16)
    for leaf in (base, latent, w2):
        leaf.requires_grad_(requires_grad)
    return base, torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32), latent, w2, 4


def parent_arguments():
    base, base_row, _, w2, k = markov_arguments()
    return base, base_row, torch.randn(50, 16), torch.arange(6).int(), w2, k


def attention_arguments(paged=False):
    torch.manual_seed(1)
    query = torch.randn(2, 3, 4, 64)
    words = words_from_mask(torch.ones(2, 3, 3, dtype=torch.bool).tril())
    seq_lens = torch.tensor([4, 0], dtype=torch.int32)
    if paged:
        cache = torch.randn(2, 3, 16, 2, 64)
        table = torch.tensor([[2], [0]], dtype=torch.int32)
        return query, *cache, seq_lens, words, table, 0.0, 16
    return query, *torch.randn(2, 2, 9, 2, 64), seq_lens, words


def pack_arguments():
    torch.manual_seed(2)
    parents = torch.tensor([[-1, -1, 0, 1, 1]] * 2, dtype=torch.int32)
    depths = torch.tensor([[1, 1, 2, 2, 2]] * 2, dtype=torch.int32)
    counts = torch.tensor([5, 3], dtype=torch.int32)
    return torch.randn(2, 5), parents, depths, counts, torch.zeros(3), 3


CALLS = {
    "markov_topk": (MARKOV_TOPK, markov_arguments),
    "markov_topk with gradients": (MARKOV_TOPK, lambda: markov_arguments(requires_grad=True)),
    "markov_topk.parent": (PARENT, parent_arguments),
    "tree_attention": (TREE_ATTENTION, attention_arguments),
    "tree_attention, paged": (TREE_ATTENTION, lambda: attention_arguments(paged=True)),
    "pack_tree": (PACK_TREE, pack_arguments),
}
