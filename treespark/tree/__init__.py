# SPDX-License-Identifier: Apache-2.0
"""The draft tree: proposed by `policy`, stored by `packed`, judged by `verify`.

Pure tensor functions, shared unchanged by training replay and by serving. Nothing here waits for
the device, and no shape depends on the data, unless `expand_children` is asked for no more than a
tree needs.
"""

from treespark.tree.packed import PackedTree
from treespark.tree.policy import (
    CandidatePool,
    Children,
    NodeChildren,
    NodeLogits,
    TreePolicy,
    expand,
    expand_children,
    ordered_topk,
    pack,
)
from treespark.tree.verify import AcceptedPath, accept_greedy, accept_tokens, path_ranks

__all__ = [
    "AcceptedPath",
    "CandidatePool",
    "Children",
    "NodeChildren",
    "NodeLogits",
    "PackedTree",
    "TreePolicy",
    "accept_greedy",
    "accept_tokens",
    "expand",
    "expand_children",
    "ordered_topk",
    "pack",
    "path_ranks",
]
