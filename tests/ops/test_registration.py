# SPDX-License-Identifier: Apache-2.0
"""The operators as torch sees them: schemas, dispatch, fake forms, tracing, gradients."""

import pytest
import torch

import npu_ops
from npu_ops import registry
from tests.ops.calls import CALLS, SPECS, overload

SCHEMAS = {
    "markov_topk": "markov_topk(Tensor base_logits, Tensor base_row, Tensor latent, Tensor w2, "
    "int k, float inv_temperature=1., int vocab_size=-1) -> "
    "(Tensor values, Tensor indices, Tensor lse)",
    "tree_attention": "tree_attention(Tensor query, Tensor key, Tensor value, Tensor seq_lens, "
    "Tensor tree_mask, Tensor? block_table=None, float scale=0., int block_size=0) -> "
    "(Tensor out, Tensor lse)",
    "pack_tree": "pack_tree(Tensor scores, Tensor parents, Tensor depths, Tensor counts, "
    "Tensor depth_bias, int n) -> (Tensor index, Tensor parent, Tensor depth, Tensor position, "
    "Tensor mask, Tensor count)",
}


@pytest.fixture(params=CALLS)
def operator_and_arguments(request):
    spec, arguments = CALLS[request.param]
    return overload(spec), arguments()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_schema_is_the_agreed_one(spec):
    assert str(overload(spec)._schema) == "treespark::" + SCHEMAS[spec.name]


def test_parent_overload_has_its_schema():
    schema = str(torch.ops.treespark.markov_topk.parent._schema)
    assert schema.startswith(
        "treespark::markov_topk.parent(Tensor base_logits, Tensor base_row, Tensor w1, "
        "Tensor parent_ids, Tensor w2, int k,"
    )


def test_opcheck_passes(operator_and_arguments):
    operator, arguments = operator_and_arguments
    torch.library.opcheck(operator, arguments)


def test_compiled_without_graph_breaks_gives_the_same(operator_and_arguments):
    operator, arguments = operator_and_arguments
    compiled = torch.compile(lambda *a: operator(*a), backend="aot_eager", fullgraph=True)
    for found, wanted in zip(compiled(*arguments), operator(*arguments), strict=True):
        assert torch.equal(found, wanted)


def test_plain_functions_compile_too():
    def run(markov, attention, pack):
        rows = npu_ops.pack_tree(*pack)
        results = (*npu_ops.markov_topk(*markov), *npu_ops.tree_attention(*attention))
        return *results, rows.index, rows.parent, rows.mask

    names = ("markov_topk", "tree_attention", "pack_tree")
    arguments = [CALLS[name][1]() for name in names]
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for found, wanted in zip(compiled(*arguments), run(*arguments), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.slow
def test_inductor_compiles_every_operator(operator_and_arguments):
    operator, arguments = operator_and_arguments
    compiled = torch.compile(lambda *a: operator(*a), fullgraph=True)
    for found, wanted in zip(compiled(*arguments), operator(*arguments), strict=True):
        assert torch.equal(found, wanted)


def test_dispatched_call_gives_what_the_reference_gives(operator_and_arguments):
    operator, arguments = operator_and_arguments
    spec = next(spec for spec, _ in CALLS.values() if overload(spec) == operator)
    found, expected = operator(*arguments), spec.reference(*arguments)
    for found_one, wanted in zip(found, expected, strict=True):
        # 1e-5: float32 sums in another order; integers have to be equal.
        tolerance = 1e-5 if wanted.is_floating_point() else 0
        torch.testing.assert_close(found_one, wanted, rtol=tolerance, atol=tolerance)


def test_an_autocast_region_changes_nothing(operator_and_arguments):
    operator, arguments = operator_and_arguments
    expected = operator(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = operator(*arguments)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_fast_forms_are_registered_for_their_keys_and_a_kernel_is_not(spec):
    name = spec.qualified_name
    for key in spec.fast:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    assert not npu_ops.has_kernel(spec.name, "cpu")
    assert not npu_ops.has_kernel(spec.name, "cuda")


def test_backward_through_an_operator_without_a_gradient_fails():
    spec, arguments = CALLS["tree_attention"]
    query, *rest = arguments()
    out, _ = overload(spec)(query.requires_grad_(), *rest)
    with pytest.raises(RuntimeError, match="tree_attention has no gradient"):
        out.sum().backward()


def test_packing_is_a_discrete_choice_without_a_graph():
    spec, arguments = CALLS["pack_tree"]
    scores, *rest = arguments()
    assert not any(part.requires_grad for part in overload(spec)(scores.requires_grad_(), *rest))


def test_results_do_not_share_memory_with_arguments(operator_and_arguments):
    operator, arguments = operator_and_arguments
    places = {a.untyped_storage().data_ptr() for a in arguments if isinstance(a, torch.Tensor)}
    results = operator(*arguments)
    own = {result.untyped_storage().data_ptr() for result in results}
    assert len(own) == len(results)
    assert not own & places


def test_status_names_every_operator_and_device():
    facts = npu_ops.status()
    assert facts["mode"] == registry.MODE
    assert sorted(row["operator"] for row in facts["operators"]) == sorted(SCHEMAS)
    for row in facts["operators"]:
        assert list(row["devices"]) == ["cpu", "cuda", "npu"]
        for answer in row["devices"].values():
            assert answer["active"] in ("kernel", "fast", "reference", "refused")
            assert (answer["reason"] is None) == (answer["active"] in ("kernel", "fast"))
