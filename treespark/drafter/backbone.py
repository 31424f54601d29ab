# SPDX-License-Identifier: Apache-2.0
"""Block backbone: pre-norm decoder layers whose keys and values include injected target context.

Shapes: H hidden size, I width of the rows that attention projects (H here), Hq/Hkv query and
key/value heads, D head size; leading dimensions are free.
Context rows enter every layer as keys and values only and do not pass the layer's input norm.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from treespark.drafter.config import DrafterConfig

Rope = tuple[Tensor, Tensor]
# (query [..., Hq, D], (key, value) [..., Hkv, D]) -> attention output [..., Hq, D]
Attend = Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]


class RotaryTable:
    """Cosines and sines of rotary positions, computed once and grown on demand."""

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim = head_dim
        self.theta = theta
        self._tables: dict[tuple[torch.device, torch.dtype], Rope] = {}

    def rows(self, num_positions: int, device: torch.device, dtype: torch.dtype) -> Rope:
        """Return (cos, signed sin), each [>= num_positions, D] of `dtype`; angles are in float32.

        The sine's first half is negated, so that a half rotation needs no sign change of x.
        """
        table = self._tables.get((device, dtype))
        if table is None or table[0].shape[0] < num_positions:
            exponents = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
            size = 1 << max(9, (num_positions - 1).bit_length())
            positions = torch.arange(size, device=device).float()
            angles = positions[:, None] * (1.0 / self.theta**exponents)
            sin = angles.sin()
            table = (
                torch.cat((angles.cos(),) * 2, -1).to(dtype),
                torch.cat((-sin, sin), -1).to(dtype),
            )
            self._tables[(device, dtype)] = table
        return table


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Return x [..., heads, D] rotated by rope, two tensors [..., 1, D]."""
    return torch.addcmul(x * rope[0], x.roll(x.shape[-1] // 2, -1), rope[1])


class BlockAttention(nn.Module):
    """Projections of one layer; the same k_proj, v_proj and k_norm serve context and block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rows, self.head_dim = config.attention_input_size, config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(rows, q_size, bias=False)
        self.k_proj = nn.Linear(rows, kv_size, bias=False)
        self.v_proj = nn.Linear(rows, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = _head_norm(config)
        self.k_norm = _head_norm(config)

    def project_kv(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values, each [..., Hkv, D], of rows x [..., I]."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return rotate(key, rope), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def project_query(self, x: Tensor, rope: Rope) -> Tensor:
        """Return rotated queries [..., Hq, D] of rows x [..., I]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rope)


def _head_norm(config: DrafterConfig) -> nn.Module:
    if not config.norms_heads:
        return nn.Identity()
    return nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)


class BlockLayer(nn.Module):
    """One decoder layer over block rows."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """Return hidden [..., H] after attention (done by `attend`) and MLP."""
        attention = self.self_attn
        normed = self.input_layernorm(hidden)
        out = attend(attention.project_query(normed, rope), attention.project_kv(normed, rope))
        hidden = hidden + attention.o_proj(out.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
