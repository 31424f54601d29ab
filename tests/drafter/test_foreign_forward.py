# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 layer of other projects, written down once more in plain torch, drafts the same.

float32 with other orders of additions agrees to 1e-4 on logits of a few units.
"""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from tests.drafter.foreign import MAKER, foreign_target, load, make

LENGTH = 9


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, (x.shape[-1],), weight, 1e-6)


def rotated(x: Tensor) -> Tensor:
    """Rows [L, heads, D] at positions 0..L-1, the halves rotated against each other."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / 1e6 ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def first_step(tensors: dict[str, Tensor], prefix: str, normed_residual: bool, inputs) -> Tensor:
    """Logits over the head's own rows of the first drafted token. Source: vLLM llama_eagle3."""

    def weight(name: str) -> Tensor:
        return tensors[f"{prefix}.{name}.weight"]

    embedded, features = inputs
    fused = features @ tensors["fc.weight"].T
    normed = norm(fused, weight("hidden_norm"))
    rows = torch.cat((norm(embedded, weight("input_layernorm")), normed), -1)
    query, key, value = (
        (rows @ weight(f"self_attn.{name}_proj").T).unflatten(-1, (-1, MAKER.HEAD_DIM))
        for name in "qkv"
    )
    group = MAKER.HEADS // MAKER.KV_HEADS
    query, key = rotated(query)[-1], rotated(key).repeat_interleave(group, 1)
    scores = torch.einsum("hd,lhd->hl", query, key) / MAKER.HEAD_DIM**0.5
    value = value.repeat_interleave(group, 1)
    attended = torch.einsum("hl,lhd->hd", scores.softmax(-1), value).flatten()
    residual = normed if normed_residual else fused
    hidden = residual[-1] + attended @ weight("self_attn.o_proj").T
    inner = norm(hidden, weight("post_attention_layernorm"))
    gate, up = (inner @ weight(f"mlp.{name}_proj").T for name in ("gate", "up"))
    hidden = hidden + (silu(gate) * up) @ weight("mlp.down_proj").T
    return norm(hidden, tensors["norm.weight"]) @ tensors["lm_head.weight"].T


@pytest.mark.parametrize(
    ("layout", "prefix", "normed_residual"),
    [("specforge-eagle3", "midlayer", False), ("speculators-eagle3", "layers.0", True)],
)
def test_a_foreign_eagle3_layer_drafts_what_its_makers_would(
    tmp_path, layout, prefix, normed_residual
):
    folder = make(layout, tmp_path / "d")
    drafter, target = load(folder), foreign_target()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, MAKER.VOCAB_SIZE, (LENGTH + 1,), generator=generator)
    features = torch.randn(LENGTH, len(MAKER.TAPS) * MAKER.HIDDEN, generator=generator)
    cache = drafter.new_cache(1, LENGTH + 1)
    drafter.extend_context(cache, 0, 0, features, tokens[:-1])
    hidden = drafter.draft_block(cache, [0], [LENGTH], tokens[-1:])
    # A pair joins the features of a position with the token behind it.
    inputs = target.embed_weight[tokens[1:]], features
    stored = load_file(folder / "model.safetensors")
    expected = first_step(stored, prefix, normed_residual, inputs)
    found = drafter.base_logits(hidden)[0, 0, torch.arange(MAKER.REDUCED) * 2]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
