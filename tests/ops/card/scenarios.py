# SPDX-License-Identifier: Apache-2.0
"""What has to hold on npu:0; each function runs in a process that has torch_npu.

test_dispatch.py starts `main`, which prints for each name whether it held, as JSON.
"""

import ctypes
import json
import sys
import traceback

import torch

import npu_ops
from tests.ops import calls

HALF = torch.bfloat16
ACL = ctypes.CDLL("libascendcl.so")
ACL.standin_launches.restype = ctypes.c_char_p
ACL.standin_transfers.restype = ACL.standin_waits.restype = ctypes.c_uint64


def halved(arguments):
    """Return the arguments with bfloat16 where they are floats; the kernels take no more."""
    return [
        a.to(HALF) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in arguments
    ]


def markov_call():
    """Return arguments with many rows, several base rows and a vocabulary of several tiles."""
    torch.manual_seed(3)
    base, latent, w2 = torch.randn(3, 700), torch.randn(9, 32), torch.randn(700, 32)
    base_row = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2], dtype=torch.int32)
    return [base, base_row, latent.to(HALF), w2.to(HALF), 4]


def on_npu(arguments):
    """Return the arguments with their tensors on npu:0."""
    return [a.to("npu:0") if isinstance(a, torch.Tensor) else a for a in arguments]


def check(name, arguments, moved=None, near=None):
    """Compare a call on npu:0 with the reference on a CPU."""
    spec = next(spec for spec in calls.SPECS if spec.name == name)
    results = operator(name)(*(on_npu(arguments) if moved is None else moved))
    expected = spec.reference(*arguments)
    for found, wanted in zip(results, expected, strict=True):
        assert found.device == torch.device("npu:0")
        assert found.dtype == wanted.dtype
        if wanted.is_floating_point():
            # float32 sums in another order; results in bfloat16 are rounded once more, from
            # weights that were rounded to bfloat16 too: three units of its last place.
            bound = 3 * 2.0**-8 if wanted.dtype == HALF else 1e-5
            torch.testing.assert_close(found.cpu(), wanted, rtol=bound, atol=bound)
        else:
            assert torch.equal(found.cpu(), wanted)


def launches():
    """Return the launches so far as (kernel, stream, blocks)."""
    lines = ACL.standin_launches().decode().splitlines()
    return [(name, int(stream), int(blocks)) for name, stream, blocks in map(str.split, lines)]


def raised_by(call, *arguments):
    """Return what a call says that has to raise; there may be no pytest here."""
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    raise AssertionError("nothing was raised")


def operator(name):
    """Return an operator as torch has it."""
    return getattr(torch.ops.treespark, name).default


def pack_tree_is_the_reference():
    check("pack_tree", calls.pack_arguments())


def markov_topk_is_the_reference():
    check("markov_topk", halved(calls.markov_arguments()))


def markov_topk_reads_a_float32_base():
    check("markov_topk", markov_call())


def tree_attention_is_the_reference():
    check("tree_attention", halved(calls.attention_arguments()))


def tree_attention_over_a_paged_cache_is_the_reference():
    check("tree_attention", halved(calls.attention_arguments(paged=True)))


def tree_attention_combines_splits():
    torch.manual_seed(4)
    query = torch.randn(1, 2, 2, 64, dtype=HALF)
    key, value = torch.randn(2, 1, 1100, 1, 64, dtype=HALF)
    mask = npu_ops.words_from_mask(torch.ones(1, 2, 2, dtype=torch.bool).tril())
    before = len(launches())
    check("tree_attention", [query, key, value, torch.tensor([1090], dtype=torch.int32), mask])
    assert [name for name, *_ in launches()[before:]] == [
        "tree_attention",
        "tree_attention_combine",
    ]


def inputs_may_be_of_any_strides():
    scores, parents, depths, counts, bias, n = calls.pack_arguments()
    moved = on_npu([scores.t().contiguous(), parents, depths, counts, bias, n])
    moved[0] = moved[0].t()
    assert not moved[0].is_contiguous()
    check("pack_tree", [scores, parents, depths, counts, bias, n], moved)
    query, key, value, *rest = halved(calls.attention_arguments())
    moved = on_npu([query.transpose(1, 2).contiguous(), key, value, *rest])
    moved[0] = moved[0].transpose(1, 2)
    check("tree_attention", [query, key, value, *rest], moved)


def inputs_may_start_anywhere():
    arguments = calls.pack_arguments()
    moved = on_npu(arguments)
    longer = torch.cat([torch.zeros(1), arguments[0].flatten()]).to("npu:0")
    moved[0] = longer[1:].view(arguments[0].shape)
    assert moved[0].data_ptr() % 32
    check("pack_tree", arguments, moved)


def empty_calls_launch_nothing():
    before = len(launches())
    results = torch.ops.treespark.pack_tree(
        *(torch.empty(0, 5, dtype=dtype, device="npu:0") for dtype in (torch.float32,)),
        *(torch.empty(0, 5, dtype=torch.int32, device="npu:0") for _ in range(2)),
        torch.empty(0, dtype=torch.int32, device="npu:0"),
        torch.empty(3, device="npu:0"),
        4,
    )
    assert [tuple(r.shape) for r in results] == [(0, 4), (0, 5), (0, 5), (0, 5), (0, 5, 2), (0,)]
    assert len(launches()) == before


def a_pool_without_candidates_is_the_reference():
    empty = torch.zeros(2, 0, dtype=torch.int32)
    counts = torch.zeros(2, dtype=torch.int32)
    check("pack_tree", [torch.zeros(2, 0), empty, empty, counts, torch.zeros(2), 3])


def a_call_goes_to_the_current_stream():
    stream = torch.npu.Stream()
    before = len(launches())
    with torch.npu.stream(stream):
        check("markov_topk", halved(calls.markov_arguments()))
    assert {where for _, where, _ in launches()[before:]} == {stream.npu_stream}
    assert stream.npu_stream != torch.npu.current_stream().npu_stream


def a_call_uses_all_cores_it_can():
    before = len(launches())
    check("pack_tree", calls.pack_arguments())
    check("markov_topk", halved(calls.markov_arguments()))
    blocks = [(name, cores) for name, _, cores in launches()[before:]]
    # Of 3 cube and 6 vector cores; there are two requests to pack.
    assert blocks == [("pack_tree", 2), ("markov_topk", 3), ("markov_topk_merge", 6)]


def a_call_neither_waits_nor_copies_from_the_host():
    arguments = [on_npu(halved(calls.markov_arguments())), on_npu(calls.pack_arguments())]
    torch.npu.synchronize()
    before = ACL.standin_transfers(), ACL.standin_waits()
    torch.ops.treespark.markov_topk(*arguments[0])
    torch.ops.treespark.pack_tree(*arguments[1])
    assert (ACL.standin_transfers(), ACL.standin_waits()) == before


def errors_have_the_words_of_the_contract():
    """Of the binding as of the references, which say the same for the same arguments."""
    scores, parents, depths, counts, bias, n = calls.pack_arguments()
    base, row, latent, w2, k = halved(calls.markov_arguments())
    query, key, value, lens, mask = halved(calls.attention_arguments())
    pack, markov, attention = "pack_tree", "markov_topk", "tree_attention"
    wrong = [
        (pack, [scores[0], parents, depths, counts, bias, n]),
        (pack, [scores, parents[:, :2], depths, counts, bias, n]),
        (pack, [scores, parents.float(), depths, counts, bias, n]),
        (pack, [scores, parents, depths, counts, bias, 0]),
        (pack, [scores, parents, depths, counts, bias[:1], n]),
        (markov, [base, row, latent[:2], w2, k]),
        (markov, [base, row.long(), latent, w2, k]),
        (markov, [base, row, latent, w2, 33]),
        (markov, [base, row, latent, w2, k, 0.0]),
        (markov, [base, row, latent, w2, k, 1.0, 51]),
        (markov, [base, row, latent[:, :8], w2[:, :8].contiguous(), k]),
        (attention, [query[0], key, value, lens, mask]),
        (attention, [query, key, value[:, :4], lens, mask]),
        (attention, [query, key, value, lens, mask[..., :1]]),
        (attention, [query, key, value, lens, mask, None, 0.0, 16]),
        (attention, [query, key, value, lens, mask, None, -1.0]),
        (attention, [query[:, :, :3], key, value, lens, mask]),
        (attention, [query, key.half(), value, lens, mask]),
    ]
    wrong = [(name, on_npu(arguments)) for name, arguments in wrong]
    elsewhere, strided = on_npu([scores, parents, depths, counts, bias, n]), on_npu([base, row])
    strided += [latent.to("npu:0"), w2.t().contiguous().to("npu:0").t(), k]
    elsewhere[3] = counts
    wrong += [(pack, elsewhere), (markov, strided)]
    for name, arguments in wrong:
        spec = next(spec for spec in calls.SPECS if spec.name == name)
        text = raised_by(spec.fake, *arguments)
        assert raised_by(operator(name), *arguments) == text


def dtypes_without_a_kernel_are_refused():
    base, row, latent, w2, k = on_npu(calls.markov_arguments())
    text = raised_by(operator("markov_topk"), base, row, latent, w2, k)
    assert text == "markov_topk: latent must be bfloat16 or float16, got float32"


def status_names_kernels_and_what_they_are_built_for():
    facts = npu_ops.status()
    assert facts["reason"] is None
    assert facts["library"].endswith("libtreespark_ops.so")
    assert facts["build"]["soc"] == "Ascend910B2"
    assert {row["devices"]["npu"]["active"] for row in facts["operators"]} == {"kernel"}
    elsewhere = "refused" if facts["mode"] == "kernel" else "fast"
    assert {row["devices"]["cpu"]["active"] for row in facts["operators"]} == {elsewhere}


def autocast_and_compile_change_nothing():
    arguments = on_npu(halved(calls.markov_arguments()))
    plain = torch.ops.treespark.markov_topk(*arguments)
    with torch.autocast("npu", dtype=torch.float16):
        again = torch.ops.treespark.markov_topk(*arguments)
    traced = torch.compile(torch.ops.treespark.markov_topk, backend="eager", fullgraph=True)
    for one, other, third in zip(plain, again, traced(*arguments), strict=True):
        assert torch.equal(one.cpu(), other.cpu())
        assert torch.equal(one.cpu(), third.cpu())


def main(names):
    """Run the named functions; print {name: None, or the traceback}."""
    import torch_npu  # noqa: F401, registers the device

    assert npu_ops.load_library() is None, npu_ops.status()["reason"]
    outcome = {}
    for name in names:
        try:
            globals()[name]()
            outcome[name] = None
        except Exception:  # reported by the test of this name
            outcome[name] = traceback.format_exc()
    json.dump(outcome, sys.stdout)
