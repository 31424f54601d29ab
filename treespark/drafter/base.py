# SPDX-License-Identifier: Apache-2.0
"""What all drafters share: the target's frozen embedding and head, making, storing, logits.

Shapes: R requests, H hidden size, m taps, V vocabulary, D head size. State-dict keys are those of
DeepSpec checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treespark.drafter.backbone import Rope, RotaryTable
from treespark.drafter.config import DrafterConfig
from treespark.errors import UsageError
from treespark.prepack import prepack_linears

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from treespark.drafter.loading import TargetWeights


class DrafterModel(PreTrainedModel):
    """Base of all drafters; a subclass adds `layers` and `norm`, then calls `finish_init`.

    A new instance has no embedding and head (they are on the meta device): `init_from_target` and
    `from_pretrained` attach the target's, which are never trained.
    """

    config: DrafterConfig
    config_class = DrafterConfig
    base_model_prefix = "drafter"
    norm: nn.RMSNorm

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.lm_head: nn.Module = nn.Linear(
                config.hidden_size, config.num_head_rows, bias=False
            )
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self._rotary = RotaryTable(config.head_dim, config.rope_theta)

    def finish_init(self) -> None:
        """Initialise the weights and freeze what is the target's."""
        self.post_init()
        self.embed_tokens.requires_grad_(False)
        self.lm_head.requires_grad_(False)

    # ------------------------------------------------------------------ making and storing

    @classmethod
    def init_from_target(
        cls,
        config: DrafterConfig,
        embed_weight: Tensor,
        head_weight: Tensor,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Return a new drafter: weights N(0, initializer_range), norms 1, biases 0.

        embed_weight and head_weight [V, H] are the target's own tensors, shared and frozen; the
        other weights get `dtype` on the same device. Raises `UsageError` on a size mismatch.
        """
        drafter = cls(config)
        drafter.attach_target(embed_weight, head_weight)
        for name, module in drafter.named_children():
            if name not in ("embed_tokens", "lm_head"):
                module.to(device=embed_weight.device, dtype=dtype)
        return drafter

    def attach_target(self, embed_weight: Tensor, head_weight: Tensor) -> None:
        """Use the target's embedding and head [V, H], sharing their storage, without gradients.

        Raises `UsageError` on a size mismatch and for a drafter that has a head of its own.
        """
        if self.config.has_own_head:
            raise UsageError(
                "drafter config: draft_vocab_size is set; a new drafter uses the target's head"
            )
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name, weight in (("embedding", embed_weight), ("head", head_weight)):
            if tuple(weight.shape) != expected:
                raise UsageError(
                    f"the target's {name} is {list(weight.shape)}, the drafter was made for "
                    f"[vocab_size, hidden_size] = {list(expected)}"
                )
        self.embed_tokens.weight = nn.Parameter(embed_weight.detach(), requires_grad=False)
        self.lm_head.weight = nn.Parameter(head_weight.detach(), requires_grad=False)

    def prepack(self, target_head: nn.Module | None = None) -> None:
        """Prepare for drafting: linear layers become prepacked ones, see `treespark.prepack`.

        Their plain weights are gone afterwards, so it can be neither trained nor saved.
        target_head: the target's own head module, used where this drafter shares its weight.
        """
        if target_head is not None:
            self.lm_head = target_head
        prepack_linears(self)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        target: TargetWeights | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Return the drafter of this class stored in a folder; see `loading.load_folder`."""
        from treespark.drafter.loading import load_folder

        classes: dict[type[DrafterConfig], type[Self]] = {cls.config_class: cls}
        return load_folder(Path(folder), classes, target, dtype=dtype, device=device)

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write config.json and model.safetensors without embedding and head; see `export`."""
        from treespark.drafter.export import save_own

        save_own(self, Path(folder), dtype)

    def export_deepspec(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a DeepSpec folder with embedding and head in it; see `export`."""
        from treespark.drafter.export import save_deepspec

        save_deepspec(self, Path(folder), dtype)

    # ------------------------------------------------------------------ context

    def extend_context(
        self,
        cache: Any,
        slot: int,
        start: int,
        features: Tensor,
        token_ids: Tensor | None = None,
    ) -> None:
        """Append context rows start..start+n-1 of one slot, from features [n, m*H]."""
        self.extend_contexts(cache, [slot], [start], [features.shape[0]], features, token_ids)

    def extend_contexts(
        self,
        cache: Any,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        features: Tensor,
        token_ids: Tensor | None = None,
    ) -> None:
        """Append context rows of several slots in one pass; every drafter has its own way."""
        raise NotImplementedError

    # ------------------------------------------------------------------ rows and logits

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the backbone's weights, its hidden states and its cache."""
        return self.norm.weight.dtype

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the target's embeddings [..., H] of token_ids [...] in the backbone's dtype."""
        return self.embed_tokens(token_ids).to(self.compute_dtype)

    def _rope_rows(self, positions: list[int], like: Tensor) -> Rope:
        """Return cos and sin [n, 1, D] of the given positions."""
        cos, sin = self._rotary.rows(max(positions, default=0) + 1, like.device, like.dtype)
        index = torch.tensor(positions, device=like.device, dtype=torch.long)
        return cos[index].unsqueeze(1), sin[index].unsqueeze(1)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Return logits without the Markov bias, [..., V] float32, from hidden [..., H]."""
        return self.lm_head(hidden.to(self.embed_tokens.weight.dtype)).float()

    def confidence_logits(self, hidden: Tensor, parent_tokens: Tensor) -> Tensor:
        """Return the confidence head's logits [...]; raises UsageError: there is none here."""
        raise UsageError(f"a drafter of model_type {self.config.model_type!r} has no confidence")
