# SPDX-License-Identifier: Apache-2.0
"""The Drafter protocol, what serving needs from any drafter, and the loader for a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from treespark.drafter.config import DrafterConfig, TreeSparkConfig
from treespark.drafter.eagle3 import Eagle3Config, Eagle3Drafter
from treespark.drafter.loading import TargetWeights, load_folder
from treespark.drafter.modeling import TreeSparkDrafter
from treespark.tree.policy import NodeChildren, children_of_logits

AnyDrafter = TreeSparkDrafter | Eagle3Drafter
DRAFTERS: dict[type[DrafterConfig], type[AnyDrafter]] = {
    TreeSparkConfig: TreeSparkDrafter,
    Eagle3Config: Eagle3Drafter,
}
"""Every architecture, by its config."""


@runtime_checkable
class Drafter(Protocol):
    """What the engine calls.

    R requests, B depths, H hidden size, m taps, V vocabulary, W parents. A drafter whose
    `config.chain_only` is not None has no `node_children`.
    """

    config: Any

    def new_cache(self, num_slots: int, max_len: int) -> Any:
        """Return empty per-slot context state."""

    def extend_context(
        self,
        cache: Any,
        slot: int,
        start: int,
        features: Tensor,
        token_ids: Tensor | None = None,
    ) -> None:
        """Append context for committed positions from features [n, m*H] and their tokens [n]."""

    def extend_contexts(
        self,
        cache: Any,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        features: Tensor,
        token_ids: Tensor | None = None,
    ) -> None:
        """`extend_context` for several slots in one pass."""

    def draft_block(
        self,
        cache: Any,
        slots: Sequence[int],
        lengths: Sequence[int],
        anchor_tokens: Tensor,
        num_depths: int | None = None,
    ) -> Tensor:
        """Return hidden [R, D, H] of the first D = num_depths (None = B) depths of a block each."""

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, B, V] by depth alone, float32."""

    def confidence_logits(self, hidden: Tensor, parent_tokens: Tensor) -> Tensor:
        """Return logits [R, D] of the drafts' survival; raises UsageError without such a head."""

    def node_children(self, hidden: Tensor) -> NodeChildren:
        """Return (depth, parent_tokens [R, W], k) -> k best children, for tree expansion."""

    def chain(self, hidden: Tensor, anchor_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the greedy chain: tokens [R, B] and logits [R, B, V]."""


def load_drafter(
    folder: str | Path,
    target_embed: Tensor,
    target_head: Tensor,
    target_fingerprint: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    num_target_layers: int | None = None,
) -> AnyDrafter:
    """Return the drafter in `folder` bound to a target's embedding and head [V, H].

    dtype and device default to the target's. Raises `UsageError` naming folder and field where the
    drafter does not fit the target or the folder is damaged.
    """
    target = TargetWeights(target_embed, target_head, target_fingerprint, num_target_layers)
    return load_folder(Path(folder), DRAFTERS, target, dtype=dtype, device=device)


def drafted_children(drafter: Drafter, hidden: Tensor, anchor_tokens: Tensor) -> NodeChildren:
    """Return the children per node of drafted blocks, for tree expansion.

    hidden [R, B, H] of `draft_block`, anchor_tokens [R]. Of a drafter of chains they are those of
    its greedy chain, whatever the parent: right for the only child that such a policy proposes.
    """
    if drafter.config.chain_only is None:
        return drafter.node_children(hidden)
    _, logits = drafter.chain(hidden, anchor_tokens)
    return children_of_logits(lambda depth, _: logits[:, depth - 1 : depth])


for _config, _drafter in DRAFTERS.items():
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _drafter, exist_ok=True)
