# SPDX-License-Identifier: Apache-2.0
"""pack_tree: every implementation gives the trees of the contract, compared exactly."""

import math

import pytest
import torch

from npu_ops import mask_from_words
from npu_ops.pack_tree import SPEC, fast, fits
from tests.tree.tree_oracle import pack_slowly, path_to, pool_rows, random_tables, table_logits
from treespark.tree import TreePolicy, expand, pack

IMPLEMENTATIONS = {"reference": SPEC.reference, "cpu": fast.on_cpu, "cuda": fast.on_cuda}
NAMES = ("index", "parent", "depth", "position", "mask", "count")


@pytest.fixture(params=IMPLEMENTATIONS)
def run(request):
    """One implementation; that for CUDA computes on a CPU as well."""
    return IMPLEMENTATIONS[request.param]


def random_pool(seed, num_requests, num_candidates, num_values=5):
    """Random candidates: any earlier one may be the parent, scores tie and need not fall."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_requests):
        parents, depths = [], []
        for column in range(num_candidates):
            parent = int(torch.randint(-1, column, (), generator=generator)) if column else -1
            parents.append(parent)
            depths.append(1 if parent < 0 else depths[parent] + 1)
        # Depth must not fall along the columns.
        order = sorted(range(num_candidates), key=lambda column: depths[column])
        place = {-1: -1} | {column: number for number, column in enumerate(order)}
        rows.append(([place[parents[c]] for c in order], [depths[c] for c in order]))
    parents, depths = (torch.tensor(part, dtype=torch.int32) for part in zip(*rows, strict=True))
    shape = (num_requests, num_candidates)
    scores = torch.randint(-num_values, 1, shape, generator=generator).float() / 2
    counts = torch.randint(num_candidates + 1, (num_requests,), generator=generator).int()
    counts[0] = num_candidates
    bias = torch.randint(-2, 3, (int(depths.max()) + 1,), generator=generator).float() / 2
    return scores, parents, depths, counts, bias


def slowly(scores, parents, depths, counts, bias, request, n):
    """Kept columns of one request by the written order, from the smallest value on each path."""
    values = []
    for column in range(int(counts[request])):
        value = float(scores[request, column] + bias[depths[request, column]])
        value = -math.inf if math.isnan(value) else value
        parent = int(parents[request, column])
        values.append(value if parent < 0 else min(value, values[parent]))
    best = sorted(range(len(values)), key=lambda column: (-values[column], column))
    return sorted(best[:n])


def check(arguments, n, results):
    """Compare with the definition, and the rows with one another."""
    scores, parents, depths, _, _ = arguments
    num_requests = scores.shape[0]
    tree = dict(zip(NAMES, results, strict=True))
    assert all(part.dtype == torch.int32 for part in results)
    assert tree["mask"].shape == (num_requests, n + 1, 2 * -(-(n + 1) // 64))
    assert torch.equal(tree["position"], tree["depth"])
    seen = mask_from_words(tree["mask"], n + 1)
    for request in range(num_requests):
        kept = slowly(*arguments, request, n)
        assert int(tree["count"][request]) == len(kept)
        assert tree["index"][request].tolist() == kept + [-1] * (n - len(kept))
        row_of = {-1: 0} | {column: row for row, column in enumerate(kept, start=1)}
        up = [-1] + [row_of[int(parents[request, column])] for column in kept]
        padding = n - len(kept)
        assert tree["parent"][request].tolist() == up + [-1] * padding
        deep = [0] + [int(depths[request, column]) for column in kept] + [0] * padding
        assert tree["depth"][request].tolist() == deep
        for row in range(n + 1):
            path = path_to(up, row) if row < len(up) else []
            assert seen[request, row].nonzero()[:, 0].tolist() == path
        # No bit beyond the rows.
        assert not mask_from_words(tree["mask"], 32 * tree["mask"].shape[-1])[..., n + 1 :].any()


@pytest.mark.parametrize(
    ("num_candidates", "n"), [(1, 1), (2, 127), (20, 8), (63, 63), (64, 64), (100, 32), (200, 127)]
)
@pytest.mark.parametrize("num_requests", [1, 5])
def test_kept_nodes_are_the_best_by_path_minimum_then_column(run, num_candidates, n, num_requests):
    for seed in range(3):
        arguments = random_pool(seed, num_requests, num_candidates)
        check(arguments, n, run(*arguments, n))


def test_all_implementations_agree_at_the_largest_size():
    arguments = random_pool(9, 2, 1024)
    expected = SPEC.reference(*arguments, 127)
    for run in (fast.on_cpu, fast.on_cuda):
        for found, wanted in zip(run(*arguments, 127), expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("special", [math.nan, -math.inf, math.inf])
def test_nan_is_minus_infinity_and_infinities_are_values(run, special):
    arguments = random_pool(3, 4, 40)
    arguments[0][:, ::3] = special
    arguments[4][1] = -math.inf if special == math.inf else 0.5
    for n in (5, 40):
        check(arguments, n, run(*arguments, n))


def test_child_above_its_parent_does_not_overtake_it(run):
    scores = torch.tensor([[-3.0, -1.0, -0.5, -2.0]])
    parents, depths = torch.tensor([[-1, -1, 0, 1]]).int(), torch.tensor([[1, 1, 2, 2]]).int()
    counts, bias = torch.tensor([4]).int(), torch.zeros(3)
    assert run(scores, parents, depths, counts, bias, 2)[0].tolist() == [[1, 3]]
    assert run(scores, parents, depths, counts, bias, 3)[0].tolist() == [[0, 1, 3]]


def test_depth_bias_is_added_by_depth(run):
    scores = torch.tensor([[-1.0, -2.0, -3.0]])
    parents, depths = torch.tensor([[-1, -1, 0]]).int(), torch.tensor([[1, 1, 2]]).int()
    counts = torch.tensor([3]).int()
    assert run(scores, parents, depths, counts, torch.zeros(3), 2)[0].tolist() == [[0, 1]]
    bias = torch.tensor([9.0, 0.0, 1.5])
    assert run(scores, parents, depths, counts, bias, 2)[0].tolist() == [[0, 2]]


def test_absent_candidates_may_hold_anything(run):
    arguments = random_pool(5, 3, 30)
    arguments[3][:] = torch.tensor([30, 7, 0])
    expected = run(*arguments, 12)
    for request, count in enumerate(arguments[3].tolist()):
        arguments[0][request, count:] = math.nan
        arguments[1][request, count:] = 2**31 - 1
        arguments[2][request, count:] = -(2**31)
    for found, wanted in zip(run(*arguments, 12), expected, strict=True):
        assert torch.equal(found, wanted)


def test_no_requests_and_no_candidates_are_allowed(run):
    arguments = random_pool(1, 2, 6)
    empty = run(*(part[:0] for part in arguments[:4]), arguments[4], 3)
    assert [tuple(part.shape) for part in empty] == [
        (0, 3),
        (0, 4),
        (0, 4),
        (0, 4),
        (0, 4, 2),
        (0,),
    ]
    none = (*(part[:, :0] for part in arguments[:3]), torch.zeros(2).int(), arguments[4])
    check(none, 3, run(*none, 3))


def test_strides_do_not_matter(run):
    arguments = random_pool(7, 3, 40)
    expected = run(*arguments, 16)
    strided = [part.T.contiguous().T for part in arguments[:3]]
    wide = arguments[3].repeat_interleave(2)[::2]
    for found, wanted in zip(run(*strided, wide, arguments[4], 16), expected, strict=True):
        assert torch.equal(found, wanted)


def test_inputs_are_left_alone(run):
    arguments = random_pool(8, 3, 40)
    before = [part.clone() for part in arguments]
    results = run(*arguments, 16)
    for part in results:
        part.fill_(0)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


@pytest.mark.parametrize("num_values", [0, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_bias_it_is_the_packing_of_the_tree_policy(run, num_values, dtype):
    base, bias, anchors = random_tables(num_values, 4, 5, 19, num_values=num_values, dtype=dtype)
    policy = TreePolicy(depth=5, branching=4, frontier=3)
    pool = expand(table_logits(base, bias), anchors, policy)
    for budget in (1, 7, 32, 127):
        counts = torch.full((4,), pool.scores.shape[1], dtype=torch.int32)
        zeros = torch.zeros(6, dtype=dtype)
        found = run(pool.scores, pool.parents.int(), pool.depths, counts, zeros, budget)
        tree = pack(pool, budget)
        assert torch.equal(found[0].long(), tree.pool_index[:, 1:])
        assert torch.equal(found[1], tree.parents)
        assert torch.equal(found[2], tree.depths)
        assert torch.equal(found[5].long(), tree.num_nodes)
        valid = tree.valid[:, :, None]
        assert torch.equal(mask_from_words(found[4], budget + 1), tree.ancestor_mask() & valid)
        for kept, nodes in zip(found[0].tolist(), pool_rows(pool), strict=True):
            assert [column for column in kept if column >= 0] == pack_slowly(nodes, budget)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": torch.zeros(4)}, "scores must be [B, C], got [4]"),
        ({"parents": torch.zeros(1, 4).int()}, "parents must be [B=2, C=4], got [1, 4]"),
        ({"depths": torch.ones(2, 4).long()}, "depths must be int32, got int64"),
        ({"counts": torch.zeros(3).int()}, "counts must be [B=2], got [3]"),
        ({"scores": torch.zeros(2, 4).half()}, "scores must be float32 or float64, got float16"),
        ({"depth_bias": torch.zeros(3).double()}, "depth_bias must be float32, got float64"),
        ({"n": 0}, "n must be in 1..127, got 0"),
        ({"n": 128}, "n must be in 1..127, got 128"),
        (
            {
                "scores": torch.zeros(2, 1025),
                "parents": torch.full((2, 1025), -1).int(),
                "depths": torch.ones(2, 1025).int(),
            },
            "C must be in 0..1024, got 1025",
        ),
        ({"depth_bias": torch.zeros(1)}, "the deepest depth must be in 1..64, got 0"),
        ({"depth_bias": torch.zeros(66)}, "the deepest depth must be in 1..64, got 65"),
    ],
)
def test_wrong_argument_is_named(run, changes, message):
    arguments = {
        "scores": torch.zeros(2, 4),
        "parents": torch.full((2, 4), -1).int(),
        "depths": torch.ones(2, 4).int(),
        "counts": torch.full((2,), 4).int(),
        "depth_bias": torch.zeros(3),
        "n": 3,
    }
    with pytest.raises(RuntimeError) as caught:
        run(**(arguments | changes))
    assert str(caught.value) == f"pack_tree: {message}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": [5, 0]}, r"counts must hold values in 0\.\.4, got 5"),
        ({"parents": [[-1, 1, 0, 0]] * 2}, "parents must hold -1 or an earlier column, got 1"),
        ({"depths": [[1, 1, 3, 2]] * 2}, r"depths must hold values in 1\.\.2, got 3"),
        ({"depths": [[1, 2, 1, 2]] * 2}, "depths must not decrease along the columns, got 1"),
    ],
)
def test_reference_names_wrong_values(changes, message):
    arguments = {"parents": [[-1, -1, 0, 0]] * 2, "depths": [[1, 1, 2, 2]] * 2, "counts": [4, 4]}
    integers = {name: torch.tensor(value).int() for name, value in (arguments | changes).items()}
    with pytest.raises(RuntimeError, match=message):
        SPEC.reference(scores=torch.zeros(2, 4), depth_bias=torch.zeros(3), n=2, **integers)


def test_limits_are_those_of_fits():
    assert fits(1024, 127)
    assert fits(0, 1)
    assert not any([fits(1025, 1), fits(100, 0), fits(100, 128)])
