# SPDX-License-Identifier: Apache-2.0
"""Markov and confidence heads: formulas, chains, tree expansion, number formats."""

import pytest
import torch
from torch import Tensor

from tests.drafter.helpers import HIDDEN, VOCAB, features, tiny_drafter
from treespark.drafter.modeling import TreeSparkDrafter
from treespark.errors import UsageError
from treespark.prepack import can_prepack

HEADS = ["vanilla", "gated", "rnn", "none"]


def make(head: str, **changes) -> TreeSparkDrafter:
    if head == "none":
        return tiny_drafter(markov_rank=0, enable_confidence_head=False, **changes)
    return tiny_drafter(markov_head_type=head, **changes)


def random_hidden(seed: int, *shape: int) -> Tensor:
    return features(seed, *shape, taps=1)


@pytest.mark.parametrize("head", HEADS)
def test_chain_equals_teacher_forcing_on_its_own_tokens(head):
    """Step by step, with the rnn's state carried along, and all depths at once agree."""
    drafter = make(head)
    hidden, anchors = random_hidden(1, 3, drafter.config.block_size), torch.tensor([1, 2, 3])
    tokens, logits = drafter.chain(hidden, anchors)
    parents = torch.cat((anchors[:, None], tokens[:, :-1]), 1)
    forced = drafter.teacher_forced_logits(hidden, parents)
    torch.testing.assert_close(logits, forced, rtol=1e-5, atol=1e-5)
    assert torch.equal(tokens, forced.argmax(-1))


@pytest.mark.parametrize("head", ["vanilla", "gated", "none"])
def test_node_logits_equal_teacher_forcing_for_every_parent(head):
    drafter = make(head)
    B = drafter.config.block_size
    hidden = random_hidden(2, 2, B)
    node_logits = drafter.node_logits(hidden)
    parents = torch.randint(0, VOCAB, (2, 4), generator=torch.Generator().manual_seed(0))
    for depth in range(1, B + 1):
        logits = node_logits(depth, parents)
        assert logits.shape == (2, 4, VOCAB)
        assert logits.dtype == torch.float32
        for column in range(4):
            forced = drafter.teacher_forced_logits(
                hidden, parents[:, column : column + 1].expand(2, B)
            )
            torch.testing.assert_close(logits[:, column], forced[:, depth - 1], rtol=0, atol=1e-5)


def test_node_logits_do_not_change_between_calls():
    """The base logits are shared by all calls, so no call may write into them."""
    drafter = make("vanilla")
    node_logits = drafter.node_logits(random_hidden(2, 1, drafter.config.block_size))
    parents = torch.tensor([[3, 4]])
    with torch.no_grad():
        first = node_logits(2, parents).clone()
        node_logits(1, parents)
        node_logits(2, parents)
        assert torch.equal(first, node_logits(2, parents))


def test_rnn_head_is_refused_for_trees():
    drafter = make("rnn")
    with pytest.raises(UsageError, match="markov_head_type 'rnn'"):
        drafter.node_logits(random_hidden(1, 1, drafter.config.block_size))


def test_rnn_state_carries_the_path():
    """The bias at depth 3 depends on the parent at depth 1; for the other heads it does not."""
    for head, depends in (("rnn", True), ("gated", False), ("vanilla", False)):
        drafter = make(head)
        hidden = random_hidden(1, 1, drafter.config.block_size)
        parents = torch.tensor([[1, 2, 3, 4, 5]])
        other = torch.tensor([[9, 2, 3, 4, 5]])
        bias, changed = (drafter.markov_bias(p, hidden)[:, 2] for p in (parents, other))
        assert torch.allclose(bias, changed) is not depends, head


def test_rnn_head_needs_a_whole_path():
    drafter = make("rnn")
    with pytest.raises(AssertionError, match=r"depths 1\.\.B"):
        drafter.markov_bias(torch.tensor([[1, 2]]), random_hidden(1, 1, 2))


def test_heads_equal_their_formulas():
    hidden, parent = random_hidden(1, 4), torch.tensor([5, 6, 7, 8])
    for head in ("vanilla", "gated"):
        drafter = make(head)
        weights = dict(drafter.named_parameters())
        e = weights["markov_head.markov_w1.weight"][parent]
        latent = e
        if head == "gated":
            joined = torch.cat((hidden, e), -1)
            gate = joined @ weights["markov_head.gate_proj.weight"].T
            latent = torch.sigmoid(gate + weights["markov_head.gate_proj.bias"]) * e
        expected = latent @ weights["markov_head.markov_w2.weight"].T
        torch.testing.assert_close(drafter.markov_bias(parent, hidden), expected)
        kappa = torch.cat((hidden, e), -1) @ weights["confidence_head.proj.weight"][0]
        expected = kappa + weights["confidence_head.proj.bias"]
        torch.testing.assert_close(drafter.confidence_logits(hidden, parent), expected)


def test_confidence_without_markov_ignores_the_parent():
    drafter = make("vanilla", confidence_head_with_markov=False)
    assert drafter.confidence_head.proj.weight.shape == (1, HIDDEN)
    hidden = random_hidden(1, 2)
    first = drafter.confidence_logits(hidden, torch.tensor([1, 2]))
    assert torch.equal(first, drafter.confidence_logits(hidden, torch.tensor([3, 4])))


def test_rank_zero_has_no_bias_and_no_confidence():
    drafter = make("none")
    hidden, parent = random_hidden(1, 2), torch.tensor([1, 2])
    assert drafter.markov_bias(parent, hidden) is None
    with pytest.raises(UsageError, match="enable_confidence_head"):
        drafter.confidence_logits(hidden, parent)


def test_chain_takes_the_lowest_id_on_ties():
    drafter = make("none")
    hidden = torch.zeros(1, drafter.config.block_size, HIDDEN)
    tokens, _ = drafter.chain(hidden, torch.tensor([5]))
    assert tokens.tolist() == [[0] * drafter.config.block_size]


def test_bias_of_a_bfloat16_drafter_is_added_in_float32():
    drafter = make("vanilla").to(torch.bfloat16)
    hidden = random_hidden(1, 1, drafter.config.block_size).bfloat16()
    parents = torch.tensor([[4]])
    logits = drafter.node_logits(hidden)(1, parents)
    expected = drafter.base_logits(hidden[:, :1]) + drafter.markov_bias(parents, hidden[:, :1])
    assert logits.dtype == torch.float32
    # bf16 products of one row and of five rows may round differently: one unit in the last place.
    torch.testing.assert_close(logits, expected, rtol=2**-7, atol=2**-7)
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("head", HEADS)
def test_a_prepacked_drafter_drafts_what_the_plain_one_does(head):
    drafter = make(head).eval()
    anchors, context = torch.tensor([3, 7]), features(5, 9)
    outputs = []
    for prepack in (False, True):
        if prepack:
            drafter.prepack()
        cache = drafter.new_cache(2, 16)
        drafter.extend_contexts(cache, [0, 1], [0, 0], [4, 5], context)
        hidden = drafter.draft_block(cache, [0, 1], [4, 5], anchors)
        outputs.append((hidden, *drafter.chain(hidden, anchors)))
    if can_prepack(torch.zeros(8, 8)) is None:
        assert not any(type(module) is torch.nn.Linear for module in drafter.modules())
    (plain_hidden, plain_tokens, plain_logits), (hidden, tokens, logits) = outputs
    torch.testing.assert_close(hidden, plain_hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, plain_logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(tokens, plain_tokens)


def test_a_prepacked_drafter_uses_the_targets_own_head_module():
    drafter, head = make("vanilla"), torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    drafter.prepack(head)
    rows = random_hidden(2, 3)
    torch.testing.assert_close(drafter.base_logits(rows), rows @ head.weight.T)
