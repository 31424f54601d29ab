# SPDX-License-Identifier: Apache-2.0
"""Tree nodes in the vocabulary losses: gradients as by plain autograd, and no forward product.

Tolerances: float64 1e-10 (other summation order); bfloat16 weights 2e-2 of the gradient's norm, as
in test_fused.py.
"""

import pytest
import torch

import npu_ops
from tests.training.test_fused import H, Inputs, LargestFloat32, R, V
from treespark.training import row_blocks
from treespark.training.fused import Nodes, vocab_pass
from treespark.training.row_blocks import parts_of, plan_nodes, plan_rows

NUM_NODES, T = 17, 5


class WithNodes(Inputs):
    """Rows, some of which have several nodes and many none; tokens of a node may be equal."""

    def __init__(self, num_nodes=NUM_NODES, rows=None, **options):
        super().__init__(**options)
        few = torch.randint(0, 6, (num_nodes,)) * 4 % len(self.row)
        self.node_rows = few if rows is None else rows
        shape = (num_nodes, self.latent.shape[1])
        self.node_latent = torch.randn(shape, dtype=self.w2.dtype, requires_grad=True)
        self.tokens = torch.randint(0, V, (num_nodes, T))
        self.tokens[:, 1] = self.tokens[:, 0]
        self.node_upstream = torch.rand(num_nodes, T + 1, dtype=self.upstream.dtype) - 0.5
        self.leaves = (self.hidden, self.latent, self.w2, self.node_latent)

    def whole(self):
        """Logits of all nodes [R, V] under plain autograd."""
        out = self.upstream.dtype
        base = (self.hidden[self.node_rows] @ self.head.T).to(out)
        return base + (self.node_latent @ self.w2.T).to(out)

    def fused(self, shared=None, **options):
        args = (self.hidden, self.latent, self.head, self.w2, self.teacher, self.row, self.labels)
        found = vocab_pass(*args, shared=shared, **options)
        lse = self.whole().logsumexp(-1).detach()
        return found.losses(Nodes(self.node_rows, self.node_latent, self.tokens, lse))

    def plain(self):
        z = self.whole()
        return (*super().plain(), z.gather(-1, self.tokens), z.logsumexp(-1))

    def gradients(self, outputs):
        ce, l1, logits, lse = outputs
        upstream = self.upstream[0] * ce + self.upstream[1] * l1
        of_nodes = (self.node_upstream * torch.cat([logits, lse.unsqueeze(-1)], -1)).sum()
        return torch.autograd.grad(upstream.sum() + of_nodes, self.leaves)


def assert_same(inputs, **options):
    outputs, wanted = inputs.fused(**options), inputs.plain()
    for actual, expected in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    grads = zip(inputs.gradients(outputs), inputs.gradients(wanted), strict=True)
    for actual, expected in grads:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize(("block_rows", "chunk_rows"), [(512, 32), (7, 3), (5, 1)])
def test_values_and_gradients_equal_plain_autograd(
    monkeypatch, block_rows, chunk_rows, keep_logits
):
    monkeypatch.setattr(row_blocks, "BLOCK_ROWS", block_rows)
    assert_same(WithNodes(), chunk_rows=chunk_rows, keep_logits=keep_logits)


def test_all_nodes_may_stand_on_one_row():
    assert_same(WithNodes(rows=torch.full((NUM_NODES,), 4)), chunk_rows=2)


def test_no_nodes_change_nothing():
    assert_same(WithNodes(num_nodes=0))


def test_without_a_markov_head_nodes_have_the_logits_of_their_row():
    inputs = WithNodes()
    args = (inputs.hidden, None, inputs.head, None, inputs.teacher, inputs.row, inputs.labels)
    z = (inputs.hidden @ inputs.head.T)[inputs.node_rows]
    nodes = Nodes(inputs.node_rows, None, inputs.tokens, z.logsumexp(-1).detach())
    found = vocab_pass(*args, chunk_rows=4).losses(nodes)
    logits, wanted = found.node_logits, z.gather(-1, inputs.tokens)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)
    totals = [
        (inputs.node_upstream * torch.cat([values, lse.unsqueeze(-1)], -1)).sum()
        for values, lse in ((logits, found.node_lse), (wanted, z.logsumexp(-1)))
    ]
    grads = [torch.autograd.grad(total, inputs.hidden)[0] for total in totals]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


def test_bfloat16_weights_are_summed_in_float32():
    inputs = WithNodes(dtype=torch.bfloat16)
    outputs, wanted = inputs.fused(chunk_rows=4), inputs.plain()
    assert outputs[2].dtype == outputs[3].dtype == torch.float32
    pairs = zip(inputs.gradients(outputs), inputs.gradients(wanted), strict=True)
    for actual, expected in pairs:
        assert actual.dtype == expected.dtype
        scale = expected.float().norm()
        assert ((actual - expected).float().norm() / scale).item() < 2e-2


def test_gradients_are_those_of_the_operator():
    """What serving calls, markov_topk, has a gradient of its own: the same one."""
    torch.manual_seed(3)
    inputs = WithNodes()
    latent = torch.randn(NUM_NODES, 16, dtype=torch.float64, requires_grad=True)
    w2 = torch.randn(V, 16, dtype=torch.float64, requires_grad=True)
    base = inputs.hidden @ inputs.head.T
    best = npu_ops.markov_topk(base, inputs.node_rows.int(), latent, w2, T)
    nodes = Nodes(inputs.node_rows, latent, best.indices.long(), best.lse.detach())
    args = (inputs.hidden, torch.zeros(len(base), 16), inputs.head, w2, None, None, inputs.labels)
    found = vocab_pass(*args).losses(nodes)
    torch.testing.assert_close(found.node_logits, best.values, rtol=0, atol=1e-10)
    leaves, weights = (inputs.hidden, latent, w2), inputs.node_upstream[:, :T]
    totals = [
        (weights * (values - lse.unsqueeze(-1))).sum()
        for values, lse in ((found.node_logits, found.node_lse), (best.values, best.lse))
    ]
    for actual, expected in zip(*(torch.autograd.grad(t, leaves) for t in totals), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("keep_logits", [False, True])
def test_shared_rows_give_their_logits_out(monkeypatch, keep_logits):
    monkeypatch.setattr(row_blocks, "BLOCK_ROWS", 3)
    inputs = Inputs()
    args = (inputs.hidden, inputs.latent, inputs.head, inputs.w2, inputs.teacher, inputs.row)
    shared = torch.tensor([20, 0, 7, 8, 22, 3])
    found = vocab_pass(*args, inputs.labels, keep_logits=keep_logits, shared=shared)
    base = inputs.hidden[shared] @ inputs.head.T
    torch.testing.assert_close(found.base, base.detach(), rtol=0, atol=1e-12)
    assert not found.base.requires_grad
    if keep_logits:
        logits = (inputs.teacher @ inputs.head.T)[inputs.row[shared]]
        torch.testing.assert_close(found.teacher, logits, rtol=0, atol=1e-12)
    else:
        assert found.teacher is None
    without = vocab_pass(*args[:4], None, None, inputs.labels, keep_logits=True, shared=shared)
    assert without.teacher is None


def test_nodes_have_no_tensor_over_the_vocabulary_before_the_backward_pass():
    inputs = WithNodes(dtype=torch.float32)
    args = (inputs.hidden, inputs.latent, inputs.head, inputs.w2, inputs.teacher, inputs.row)
    found = vocab_pass(*args, inputs.labels)
    nodes = Nodes(inputs.node_rows, inputs.node_latent, inputs.tokens, torch.zeros(NUM_NODES))
    saved = []
    with (
        LargestFloat32() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        found.losses(nodes)
    assert largest.rows == 0
    # the weights and nothing else
    assert {tuple(t.shape) for t in saved if V in t.shape} == {(V, H), (V, R)}


@pytest.mark.parametrize("chunk_rows", [1, 3, 8, 64])
def test_parts_cover_rows_and_nodes_once_and_stay_small(chunk_rows):
    torch.manual_seed(1)
    hidden, rows = torch.zeros(29, 1), torch.randint(0, 29, (90,))
    plan = plan_rows(hidden, None, torch.randint(0, 9, (29,)), None, keep_logits=True)
    nodes = plan_nodes(plan, rows)
    (block,) = plan.blocks
    parts = parts_of(block, chunk_rows, nodes)
    assert sum(part.num_rows for part in parts) == 29
    seen = torch.cat([nodes.order[part.nodes] for part in parts])
    assert seen.tolist() == nodes.order.tolist()
    assert sorted(seen.tolist()) == list(range(90))
    for part in parts:
        assert 1 <= part.num_rows <= chunk_rows
        assert part.num_nodes <= 2 * chunk_rows or part.num_rows == 1
        own = plan.order[part.rows]
        assert set(rows[nodes.order[part.nodes]].tolist()) <= set(own.tolist())
