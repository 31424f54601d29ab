# SPDX-License-Identifier: Apache-2.0
"""Children by the operator markov_topk are those that the logits of the nodes have."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import npu_ops
from tests.drafter.helpers import VOCAB, features, tiny_drafter
from treespark.drafter import children
from treespark.errors import UsageError
from treespark.prepack import can_prepack
from treespark.tree.policy import TreePolicy, children_of_logits, expand, expand_children

PARENTS = torch.tensor([[1, 5, 5], [96, 0, 7]])


class Operators(TorchDispatchMode):
    """Names of the project's operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "treespark":
            self.names.add(func.name().removeprefix("treespark::"))
        return func(*args, **(kwargs or {}))


def make(head, rank=16, **changes):
    if head == "none":
        return tiny_drafter(markov_rank=0, enable_confidence_head=False, **changes)
    return tiny_drafter(markov_head_type=head, markov_rank=rank, **changes)


def random_hidden(drafter, seed=3):
    return features(seed, 2, drafter.config.block_size, taps=1)


@torch.no_grad()
def assert_same_children(drafter, hidden, k=4):
    found, wanted = drafter.node_children(hidden), children_of_logits(drafter.node_logits(hidden))
    for depth in range(1, drafter.config.block_size + 1):
        best, expected = found(depth, PARENTS, k), wanted(depth, PARENTS, k)
        assert torch.equal(best.tokens, expected.tokens)
        # 1e-5: a difference of float32 logits around 10 against log_softmax.
        torch.testing.assert_close(best.log_probs, expected.log_probs, rtol=0, atol=1e-5)
        assert (best.log_probs <= 0).all()
        logits = drafter.node_logits(hidden)(depth, PARENTS)
        for lse in (best.lse, expected.lse):
            torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("head", ["vanilla", "gated"])
def test_children_by_the_operator_are_those_of_the_logits(head):
    drafter = make(head)
    with Operators() as operators:
        assert_same_children(drafter, random_hidden(drafter))
    assert operators.names == {"markov_topk"}


@pytest.mark.parametrize(("head", "rank"), [("vanilla", 8), ("gated", 8), ("none", 0)])
def test_beyond_the_operators_limits_the_logits_are_used(head, rank):
    drafter = make(head, rank)
    with Operators() as operators:
        assert_same_children(drafter, random_hidden(drafter))
    assert operators.names == set()


def test_plain_weights_of_half_precision_leave_the_operator_to_a_kernel(monkeypatch):
    drafter = make("vanilla").to(torch.bfloat16)
    hidden = random_hidden(drafter).bfloat16()
    with Operators() as operators:
        drafter.node_children(hidden)(1, PARENTS, 4)
    assert operators.names == set()
    monkeypatch.setattr(npu_ops, "has_kernel", lambda *_: True)
    with Operators() as operators:
        drafter.node_children(hidden)(1, PARENTS, 4)
    assert operators.names == {"markov_topk"}


def test_more_children_than_the_operator_gives_come_from_the_logits():
    drafter = make("vanilla")
    with Operators() as operators:
        assert_same_children(drafter, random_hidden(drafter), k=33)
    assert operators.names == set()


@pytest.mark.parametrize("rows", [5, 10, 14])
def test_more_requests_than_a_call_takes_are_several_calls(monkeypatch, rows):
    drafter = make("vanilla")
    hidden = random_hidden(drafter).repeat(2, 1, 1)[:3] * torch.tensor([1.0, 2.0, 3.0]).view(
        3, 1, 1
    )
    parents = torch.tensor([[1, 5], [96, 0], [7, 7]])
    wanted = drafter.node_children(hidden)(2, parents, 4)
    # a request has 5 rows of base logits
    monkeypatch.setattr(children, "MAX_ROWS", rows)
    found = drafter.node_children(hidden)(2, parents, 4)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("most", [10_000, 5])
def test_parents_that_are_not_needed_cost_no_row(monkeypatch, most):
    drafter = make("vanilla")
    hidden, needed = (
        random_hidden(drafter),
        torch.tensor([[True, True, False], [True, False, True]]),
    )
    wanted = drafter.node_children(hidden)(2, PARENTS, 4)
    rows, real = [], npu_ops.markov_topk

    def counted(base_logits, base_row, latent, w2, k):
        rows.append(len(base_row))
        return real(base_logits, base_row, latent, w2, k)

    monkeypatch.setattr(npu_ops, "markov_topk", counted)
    # With too many requests for one call, everybody is asked.
    monkeypatch.setattr(children, "MAX_ROWS", most)
    found = drafter.node_children(hidden)(2, PARENTS, 4, needed)
    assert rows == ([4] if most > 5 else [3, 3])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one[needed], other[needed], rtol=0, atol=1e-6)
    if most > 5:
        assert (found.log_probs[~needed] == -torch.inf).all()
    nobody = drafter.node_children(hidden)(2, PARENTS, 4, torch.zeros_like(needed))
    assert most == 5 or (nobody.log_probs == -torch.inf).all()


def test_no_requests_have_no_children():
    drafter = make("vanilla")
    found = drafter.node_children(random_hidden(drafter)[:0])(1, PARENTS[:0], 4)
    assert [tuple(t.shape) for t in found] == [(0, 3, 4), (0, 3, 4), (0, 3)]


def test_more_children_than_tokens_are_all_tokens():
    drafter = tiny_drafter(markov_rank=16)
    best = drafter.node_children(random_hidden(drafter))(1, PARENTS, 32)
    assert best.tokens.shape == (2, 3, 32)
    assert best.tokens.max() < VOCAB


def test_prepacked_weights_go_to_the_operator_as_they_are():
    drafter = make("vanilla")
    reason = can_prepack(drafter.markov_head.markov_w2.weight)
    if reason is not None:
        pytest.skip(reason)
    hidden = random_hidden(drafter)
    before = drafter.node_children(hidden)(2, PARENTS, 4)
    drafter.prepack()
    with Operators() as operators, torch.inference_mode():
        after = drafter.node_children(hidden)(2, PARENTS, 4)
    assert operators.names == {"markov_topk"}
    assert torch.equal(before.tokens, after.tokens)
    # 1e-5: another order of summation in the product.
    torch.testing.assert_close(before.log_probs, after.log_probs, rtol=0, atol=1e-5)


def test_whole_pools_by_the_operator_are_those_of_the_logits():
    drafter = make("vanilla")
    hidden, anchors = random_hidden(drafter), torch.tensor([3, 90])
    policy = TreePolicy(depth=5, branching=4, budget=16)
    found = expand_children(drafter.node_children(hidden), anchors, policy)
    wanted = expand(drafter.node_logits(hidden), anchors, policy)
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.parents, wanted.parents)


def test_rnn_head_is_refused_for_trees():
    drafter = make("rnn")
    with pytest.raises(UsageError, match="markov_head_type 'rnn'"):
        drafter.node_children(random_hidden(drafter))
