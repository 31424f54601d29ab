# SPDX-License-Identifier: Apache-2.0
"""What we measure ourselves against: transformers' own model and its own `generate`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treespark.target.model import TargetModel

logger = logging.getLogger(__name__)
# Tokens that prompt lookup copies at a time: the value in transformers' documentation.
LOOKUP_TOKENS = 10


class HFGenerate:
    """transformers' model of the same folder, in the same dtype and on the same device.

    The weights are loaded a second time, so that nothing of our runtime is in the way.
    """

    def __init__(self, target: TargetModel) -> None:
        """Load the folder that `target` came from."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            target.path, dtype=target.dtype, local_files_only=True, use_safetensors=True
        )
        self.model = model.to(target.device).eval()
        self.device = target.device
        self.eos_token_ids = sorted(target.eos_token_ids)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, lookup: bool = False
    ) -> list[list[int]]:
        """Return the greedy answer to each prompt, its end-of-sequence id included.

        lookup: prompt lookup decoding, which transformers offers for one prompt at a time.
        """
        from transformers import GenerationConfig

        # On the model itself: fields left open would be filled from the folder's own settings,
        # sampling and penalties included.
        self.model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=self.eos_token_ids or None,
            pad_token_id=0,
            prompt_lookup_num_tokens=LOOKUP_TOKENS if lookup else None,
        )
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = self.model.generate(ids.to(self.device), attention_mask=mask.to(self.device))
        return [self._cut(row) for row in out[:, longest:].tolist()]

    def _cut(self, row: list[int]) -> list[int]:
        """Drop the padding behind the first end-of-sequence id."""
        ends = [i for i, token in enumerate(row) if token in self.eos_token_ids]
        return row[: ends[0] + 1] if ends else row
