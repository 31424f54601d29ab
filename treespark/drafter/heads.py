# SPDX-License-Identifier: Apache-2.0
"""Sequential heads on top of the block backbone: Markov bias and confidence.

Shapes: H hidden size, r Markov rank, V vocabulary, B draft depths; leading dimensions are free.
"""

import torch
from torch import Tensor, nn

from treespark.drafter.config import TreeSparkConfig
from treespark.prepack import PrepackedLinear


class MarkovHead(nn.Module):
    """Low-rank bias on the base logits of a node, given the token of its parent.

    vanilla: W2 e.  gated: W2 (sigmoid(Wg [h; e] + b) * e).  rnn: a state runs along the path, see
    `rnn_step`.  e = W1[parent token], h = hidden of the node's depth.  Source: DSpark.
    """

    def __init__(self, config: TreeSparkConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.head_type = config.markov_head_type
        self.block_size = config.block_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocab_size, bias=False)
        if self.head_type == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def latent(self, parent_tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the r-vectors that W2 maps to bias rows, [..., r] in the weights' dtype.

        parent_tokens [...] int64; hidden [..., H], broadcast against them.
        For the rnn head the last dimension of parent_tokens is the whole path: depths 1..B.
        """
        embedded = self.markov_w1(parent_tokens)
        if self.head_type == "vanilla":
            return embedded
        hidden = hidden.to(embedded.dtype).expand(*embedded.shape[:-1], hidden.shape[-1])
        if self.head_type == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), -1)))
            return gate * embedded
        assert embedded.shape[-2] == self.block_size, "rnn head: last dimension = depths 1..B"
        state = torch.zeros_like(embedded[..., 0, :])
        outputs = []
        for step_embedded, step_hidden in zip(embedded.unbind(-2), hidden.unbind(-2), strict=True):
            output, state = self.rnn_step(step_embedded, step_hidden, state)
            outputs.append(output)
        return torch.stack(outputs, -2)

    def rnn_step(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return (latent [..., r], next state [..., r]) of one depth on a path."""
        joint = self.joint_proj(torch.cat((state, embedded, hidden), -1))
        gate, candidate, output = joint.chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def forward(self, parent_tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return bias rows [..., V] float32; arguments as in `latent`."""
        return self.bias_rows(self.latent(parent_tokens, hidden))

    @property
    def projection(self) -> Tensor:
        """Weight [V, r] of W2 as npu_ops.markov_topk takes it, plain or prepacked."""
        w2: nn.Module = self.markov_w2
        return w2.packed if isinstance(w2, PrepackedLinear) else self.markov_w2.weight

    def bias_rows(self, latent: Tensor) -> Tensor:
        """Return W2 applied to r-vectors [..., r]: [..., V] float32, product in W2's dtype."""
        return self.markov_w2(latent).float()


class ConfidenceHead(nn.Module):
    """Logit of the probability that a draft survives, given that its predecessors did."""

    def __init__(self, config: TreeSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, parent_embedded: Tensor | None) -> Tensor:
        """Return logits [...] float32 from hidden [..., H] and e(parent) [..., r]."""
        if self.with_markov:
            assert parent_embedded is not None
            hidden = torch.cat((hidden, parent_embedded), -1)
        return self.proj(hidden).squeeze(-1).float()
