# SPDX-License-Identifier: Apache-2.0
"""TREESPARK_OPS in processes of their own: what is active, and how a lack is reported."""

import json
import os
import subprocess
import sys

import pytest

from tests.ops.decoded import answers

CALL = """
import torch, npu_ops
from tests.ops.calls import CALLS, overload
for spec, arguments in CALLS.values():
    overload(spec)(*arguments())
"""
DECODE = "import json; from tests.ops.decoded import answers; print(json.dumps(answers()))"
STATUS = "import json, npu_ops; print(json.dumps(npu_ops.status()))"


def python(repository, code, **environment):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TREESPARK_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=repository,
        env=inherited | {"PYTHONPATH": str(repository)} | environment,
        capture_output=True,
        text=True,
    )


def active(repository, **environment):
    result = python(repository, STATUS, **environment)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    return facts, {
        kind: {row["devices"][kind]["active"] for row in facts["operators"]}
        for kind in ("cpu", "cuda", "npu")
    }


def test_without_a_library_the_reference_serves_an_npu_and_the_reason_is_there(repository):
    facts, answers = active(repository)
    assert facts["mode"] == "auto"
    assert facts["library"] is None
    assert answers == {"cpu": {"fast"}, "cuda": {"fast"}, "npu": {"reference"}}
    assert facts["reason"].startswith("no kernels built: npu_ops/lib/")
    assert facts["operators"][0]["devices"]["npu"]["reason"] == facts["reason"]


def test_reference_mode_leaves_everything_else_out(repository):
    facts, answers = active(repository, TREESPARK_OPS="reference")
    assert set.union(*answers.values()) == {"reference"}
    assert facts["reason"] == "TREESPARK_OPS=reference"
    assert python(repository, CALL, TREESPARK_OPS="reference").returncode == 0


def test_references_alone_decode_the_same_tokens(repository):
    result = python(repository, DECODE, TREESPARK_OPS="reference")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == answers()


def test_kernel_mode_fails_loudly_with_the_reason(repository):
    _, answers = active(repository, TREESPARK_OPS="kernel")
    assert set.union(*answers.values()) == {"refused"}
    result = python(repository, CALL, TREESPARK_OPS="kernel")
    assert result.returncode == 1
    assert (
        "RuntimeError: TREESPARK_OPS=kernel: markov_topk has no kernel for cpu: kernels are for "
        "an NPU" in result.stderr
    )


@pytest.mark.parametrize("verb", ["env", "ops"])
def test_unknown_mode_is_a_usage_error_of_the_command(repository, verb):
    code = f"import sys; sys.argv = ['treespark', '{verb}']; from treespark.cli import main; main()"
    result = python(repository, code, TREESPARK_OPS="fastest")
    assert result.returncode == 2
    assert result.stderr == ("error: TREESPARK_OPS=fastest: allowed: auto, reference, kernel\n")


def test_kernel_mode_is_a_usage_error_where_a_device_is_chosen(repository):
    code = "from treespark.device import resolve_device; resolve_device('cpu')"
    result = python(repository, code, TREESPARK_OPS="kernel")
    assert "UsageError: TREESPARK_OPS=kernel: no kernel of markov_topk, pack_tree, tree_attention "
    assert "for cpu (kernels are for an NPU); allowed here: auto, reference" in result.stderr


def test_damaged_library_is_reported_and_the_reference_serves(repository, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    (tmp_path / "torch_npu.py").write_text("")
    code = f"""
import json, pathlib, sys
sys.path.insert(0, {str(tmp_path)!r})
from npu_ops import registry
registry.LIBRARY = pathlib.Path({str(broken)!r})
import npu_ops
assert npu_ops.load_library() == npu_ops.status()["reason"]
print(json.dumps(npu_ops.status()))
"""
    result = python(repository, code)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["reason"].startswith("loading broken.so failed: OSError: ")
    assert facts["operators"][0]["devices"]["npu"]["active"] == "reference"


def test_library_for_another_torch_is_not_loaded(repository, tmp_path):
    library = tmp_path / "libtreespark_ops.so"
    library.write_bytes(b"never read")
    record = {"soc": "Ascend910B2", "cann": "8.1.RC1", "torch": "1.0.0", "torch_npu": "1.0.0"}
    library.with_suffix(".json").write_text(json.dumps(record))
    code = f"""
import json, pathlib
from npu_ops import registry
registry.LIBRARY = pathlib.Path({str(library)!r})
import npu_ops
npu_ops.load_library()
print(json.dumps(npu_ops.status()))
"""
    result = python(repository, code)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["reason"].startswith("libtreespark_ops.so is for torch 1.0.0, this is ")
    assert facts["reason"].endswith(": run bash npu_ops/build.sh again")
    assert facts["library"] is None
    assert facts["build"] == record


def test_stand_in_on_another_device_is_announced_once(repository):
    # A device of a third kind: the meta device's own key is taken by the fake forms.
    code = """
import logging, types
logging.basicConfig()
from npu_ops import registry
class Foreign:
    device = types.SimpleNamespace(type="npu")
spec = registry.OpSpec("planted", "(Tensor a) -> Tensor", lambda a: a)
run = registry._announced(spec)
run(Foreign()); run(Foreign())
"""
    result = python(repository, code)
    assert result.returncode == 0, result.stderr
    message = "operators run as their references on npu: no kernels built"
    assert result.stderr.count(message) == 1


def test_debug_mode_checks_values_of_fast_forms(repository):
    code = """
import torch
from npu_ops.pack_tree import fast
from tests.ops.calls import pack_arguments
scores, parents, depths, counts, bias, n = pack_arguments()
fast.on_cpu(scores, parents, depths, counts + 9, bias, n)
"""
    assert python(repository, code).returncode == 0
    result = python(repository, code, TREESPARK_CHECK="1")
    assert "pack_tree: counts must hold values in 0..5, got 14" in result.stderr
