# SPDX-License-Identifier: Apache-2.0
"""Replay: gradient formulas, locality, bounds, validity and call counts of the tree losses.

Tolerances: float64, 1e-12 for another order of summation; 1e-10 after a shift of all logits.
"""

import pytest
import torch

from tests.training.whole_replay import Replay, replay
from treespark.errors import UsageError
from treespark.training.replay import CoverageSettings, teacher_from_hidden
from treespark.tree.policy import TreePolicy

F64 = torch.float64

A, B, V, R, H = 3, 4, 11, 3, 6
POLICY = TreePolicy(depth=B, branching=3, budget=6)


class World:
    """Random head, teacher and validity; `deltas[d]` [A, W, V] perturb the logits of depth d."""

    def __init__(self, policy=POLICY, seed=6):
        torch.manual_seed(seed)
        self.policy = policy
        self.hidden = torch.randn(A, B, H, dtype=F64, requires_grad=True)
        self.head = torch.randn(V, H, dtype=F64)
        self.w1 = torch.randn(V, R, dtype=F64, requires_grad=True)
        self.w2 = torch.randn(V, R, dtype=F64, requires_grad=True)
        self.leaves = (self.hidden, self.w1, self.w2)
        self.anchors = torch.randint(0, V, (A,))
        self.teacher = torch.randn(A, B, V, dtype=F64).mul(2).softmax(-1)
        self.valid = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]]).bool()
        widths = [1] + [policy.frontier_width] * (B - 1)
        self.deltas = [torch.zeros(A, w, V, dtype=F64, requires_grad=True) for w in widths]

    def node_logits(self, depth, parents):
        return self.plain_logits(depth, parents) + self.deltas[depth - 1]

    def plain_logits(self, depth, parents):
        base = self.hidden[:, depth - 1 : depth] @ self.head.T
        return base + self.w1[parents] @ self.w2.T

    def replay(self, **options) -> Replay:
        options = {"teacher_probs": self.teacher, "valid": self.valid, **options}
        return replay(
            self.node_logits,
            self.anchors,
            self.policy,
            options.pop("teacher_probs"),
            options.pop("valid"),
            **options,
        )


def packed_children(result: Replay, depth: int) -> torch.Tensor:
    """[A, W, k] bool: children of the depth's frontier that packing kept."""
    shape = (*result.pool.frontiers[depth - 1].shape, -1)
    return result.packed_nodes[:, result.pool.children_of(depth)].view(shape)


def test_survival_gradient_per_parent_is_mass_times_q_minus_the_child_masses():
    world = World()
    result = world.replay()
    grads = torch.autograd.grad(result.survival.value, world.deltas)
    total = result.survival.denominator + 1e-6
    for d in range(1, B + 1):
        columns = result.pool.children_of(d)
        kept = packed_children(result, d) & world.valid[:, d - 1].view(A, 1, 1)
        mass = result.mass[:, columns].view_as(kept) * kept
        tokens = result.pool.tokens[:, columns].view_as(kept)
        parents = result.pool.frontiers[d - 1]
        parent_tokens = result.pool.tokens.gather(1, parents.clamp(min=0))
        if d == 1:
            parent_tokens = world.anchors[:, None]
        q = world.plain_logits(d, parent_tokens).softmax(-1).detach()
        wanted = mass.sum(-1, keepdim=True) * q
        wanted = wanted.scatter_add(-1, tokens, -mass) / total
        torch.testing.assert_close(grads[d - 1], wanted, rtol=0, atol=1e-12)
        zero = torch.zeros_like(wanted[..., 0])
        torch.testing.assert_close(grads[d - 1].sum(-1), zero, rtol=0, atol=1e-12)
        omitted = torch.ones_like(wanted, dtype=torch.bool).scatter(-1, tokens, ~kept)
        assert bool((grads[d - 1][omitted] >= 0).all())


def test_only_packed_nodes_shape_the_survival_loss():
    world = World(TreePolicy(depth=B, branching=3, budget=4))
    result = world.replay()
    grads = torch.autograd.grad(result.survival.value, world.deltas)
    num_silent = 0
    for d in range(1, B + 1):
        silent = ~packed_children(result, d).any(-1)
        assert not grads[d - 1][silent].any()
        num_silent += int(silent.sum())
        with torch.no_grad():
            # too little to change what is packed
            world.deltas[d - 1][silent] += 1e-3 * torch.rand(V, dtype=F64)
    assert num_silent > 0
    again = world.replay()
    assert torch.equal(again.packed.tokens, result.packed.tokens)
    assert torch.equal(again.survival.numerator, result.survival.numerator)
    assert not torch.equal(again.coverage.numerator, result.coverage.numerator)


def test_coverage_counts_expanded_parents_that_are_not_packed():
    world = World(TreePolicy(depth=B, branching=3, budget=1))
    result = world.replay()
    grads = torch.autograd.grad(result.coverage.value, world.deltas)
    assert result.packed_nodes.sum(1).tolist() == [1, 1, 1]
    # depth 4 parents are at depth 3, where this tree has no node
    assert bool(grads[B - 1][0].any())
    weights = torch.exp(-torch.arange(B, dtype=F64) / 4) * world.valid
    top = world.teacher.topk(4).values.sum(-1)
    width = torch.tensor([1, 3, 3, 3])
    wanted = (weights * top * width).sum()
    torch.testing.assert_close(result.coverage.denominator, wanted, rtol=0, atol=1e-12)


def test_coverage_gradients_of_each_parent_sum_to_zero_and_shifts_change_nothing():
    world = World()
    result = world.replay()
    for grad in torch.autograd.grad(result.coverage.value, world.deltas):
        zero = torch.zeros_like(grad[..., 0])
        torch.testing.assert_close(grad.sum(-1), zero, rtol=0, atol=1e-12)
    with torch.no_grad():
        for delta in world.deltas:
            delta += torch.randn_like(delta[..., :1])
    shifted = world.replay()
    assert torch.equal(shifted.pool.tokens, result.pool.tokens)
    for one, two in ((result.survival, shifted.survival), (result.coverage, shifted.coverage)):
        torch.testing.assert_close(one.value, two.value, rtol=0, atol=1e-10)


def test_coverage_lies_between_zero_and_the_cap():
    for seed in range(5):
        world = World(seed=seed)
        with torch.no_grad():
            world.head.mul_(9)
        assert 0 <= world.replay().coverage.value.item() <= 4


def test_tied_teacher_tokens_are_supervised_in_id_order():
    world = World()
    world.teacher = torch.full_like(world.teacher, 1 / V)
    with torch.no_grad():
        # flat heads with distinct logits, all inside the linear region
        world.hidden.zero_()
        world.w1.zero_()
        world.deltas[0] += torch.arange(V, dtype=F64) / V
    result = world.replay(coverage=CoverageSettings(top_j=2))
    grad = torch.autograd.grad(result.coverage.value, world.deltas)[0][0, 0]
    assert grad.nonzero().squeeze(1).tolist() == [0, 1, V - 3]


def test_a_vocabulary_smaller_than_the_branching_uses_its_last_logit_as_boundary():
    z = torch.tensor([2.0, 0.5, 1.0], dtype=F64)
    teacher = torch.tensor([[[0.5, 0.3, 0.2]]], dtype=F64)
    result = replay(
        lambda d, parents: z.expand(1, 1, 3),
        torch.tensor([0]),
        TreePolicy(depth=1, branching=4, budget=4),
        teacher,
        torch.ones(1, 1, dtype=torch.bool),
    )
    # boundary .5: gaps -.5, 1, .5
    assert result.coverage.numerator.item() == pytest.approx(0.3 * 1.0 + 0.2 * 0.5, abs=1e-12)
    assert result.coverage.denominator.item() == pytest.approx(1.0, abs=1e-12)


def test_teacher_gets_no_gradient():
    world = World()
    teacher = world.teacher.clone().requires_grad_()
    for result in (world.replay(teacher_probs=teacher),
                   world.replay(teacher_probs=lambda d: teacher[:, d - 1])):  # fmt: skip
        total = result.survival.value + result.coverage.value
        assert torch.autograd.grad(total, teacher, allow_unused=True) == (None,)
        assert not result.mass.requires_grad
        assert not result.survival.denominator.requires_grad
        assert not result.coverage.denominator.requires_grad


def test_invalid_depths_change_neither_the_trees_nor_other_losses():
    world = World()
    everything = world.replay(valid=torch.ones(A, B, dtype=torch.bool))
    result = world.replay()
    assert torch.equal(everything.pool.tokens, result.pool.tokens)
    assert torch.equal(everything.packed_nodes, result.packed_nodes)
    depth_of = result.pool.depths.long()
    counted = result.packed_nodes & world.valid.gather(1, depth_of - 1)
    assert result.survival.denominator.item() == pytest.approx(
        (result.mass * counted).sum().item(), abs=1e-12
    )
    assert everything.survival.denominator > result.survival.denominator


def test_no_valid_depth_gives_exact_zero_losses_with_finite_gradients():
    world = World()
    result = world.replay(valid=torch.zeros(A, B, dtype=torch.bool))
    total = result.survival.value + result.coverage.value
    assert total.item() == 0.0
    assert not any(g.any() for g in torch.autograd.grad(total, world.leaves))


def test_a_budget_of_zero_has_no_survival_loss_but_still_covers():
    result = World(TreePolicy(depth=B, branching=3, budget=0)).replay()
    assert not result.packed_nodes.any()
    assert (result.survival.value.item(), result.survival.denominator.item()) == (0.0, 0.0)
    assert result.coverage.value.item() > 0


def test_zero_reference_mass_on_all_packed_nodes_gives_zero_survival():
    world = World()
    packed = world.replay()
    with torch.no_grad():
        rows = packed.pool.tokens[:, packed.pool.children_of(1)]
        world.teacher[:, 0].scatter_(1, rows, 0.0)
    result = world.replay()
    assert result.survival.denominator.item() == 0.0
    assert result.survival.value.item() == 0.0


def test_saturated_logits_keep_losses_and_gradients_finite():
    world = World()
    with torch.no_grad():
        for delta in world.deltas:
            delta[..., 0] += 1e4
    result = world.replay()
    grads = torch.autograd.grad(result.survival.value + result.coverage.value, world.leaves)
    assert all(bool(g.isfinite().all()) for g in grads)


# --- the teacher, and parts of a batch ---------------------------------------------------------


def test_teacher_rows_are_the_target_distribution_of_each_depth():
    world = World()
    states, rows = torch.randn(5, H, dtype=F64), torch.randint(0, 5, (A, B))
    teacher = teacher_from_hidden(states, rows, world.head)
    for d in range(1, B + 1):
        wanted = (states @ world.head.T).softmax(-1)[rows[:, d - 1]]
        torch.testing.assert_close(teacher(d), wanted, rtol=0, atol=1e-12)


def test_the_teacher_is_asked_once_per_depth():
    world, asked = World(), []

    def teacher(depth):
        asked.append(depth)
        return world.teacher[:, depth - 1]

    world.replay(teacher_probs=teacher)
    assert asked == [1, 2, 3, 4]


def test_replay_results_add_up_over_anchors():
    world = World()
    whole = world.replay()
    parts = []
    for row in range(A):
        one = slice(row, row + 1)
        parts.append(
            replay(
                lambda d, p, one=one: (
                    world.hidden[one, d - 1 : d] @ world.head.T + world.w1[p] @ world.w2.T
                ),
                world.anchors[one],
                POLICY,
                world.teacher[one],
                world.valid[one],
            )
        )
    for name in ("survival", "coverage"):
        total = sum((getattr(p, name) for p in parts[1:]), getattr(parts[0], name))
        torch.testing.assert_close(total.value, getattr(whole, name).value, rtol=0, atol=1e-12)


def test_wrong_options_are_refused():
    world = World()
    with pytest.raises(UsageError, match=r"policy\.depth 4"):
        world.replay(valid=world.valid[:, :3])
    for name in ("top_j", "cap", "gamma"):
        with pytest.raises(UsageError, match=name):
            CoverageSettings(**{name: 0})
