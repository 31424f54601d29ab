# SPDX-License-Identifier: Apache-2.0
"""torch.ops.treespark.* on npu:0: the real binding, with kernels that the emulator runs.

torch_npu's libraries are its own, below them is a stand-in for CANN (standin/). The library is
built by build.sh and CMakeLists.txt as for a card, only `ascendc_library` is the stand-in's.
"""

import ast
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.fake_npu
SCENARIOS = Path(__file__).with_name("scenarios.py")
# Helpers take arguments, promises none.
PROMISES = [
    node.name
    for node in ast.parse(SCENARIOS.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
    and not node.args.args
    and node.name not in ("launches", "markov_call")
]
MAIN = f"from tests.ops.card.scenarios import main; main({PROMISES})"


def outcome_of(world, **environment):
    done = world.start(MAIN, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def outcome(world):
    return outcome_of(world)


@pytest.mark.parametrize("promise", PROMISES)
def test_on_npu(outcome, promise):
    assert outcome[promise] is None, outcome[promise]


def test_the_same_holds_in_kernel_mode_and_without_the_task_queue(world):
    variables = {"TREESPARK_OPS": "kernel", "TASK_QUEUE_ENABLE": "0", "STANDIN_SOC": "Ascend910B4"}
    outcome = outcome_of(world, **variables)
    assert outcome == dict.fromkeys(PROMISES)


@pytest.mark.slow
def test_the_same_holds_for_the_build_of_newer_cann(newer_world):
    assert outcome_of(newer_world) == dict.fromkeys(PROMISES)


def test_another_card_gets_no_kernel_and_the_reason(world):
    code = (
        "import json, npu_ops\n"
        "from treespark.device import resolve_device\n"
        "from treespark.errors import UsageError\n"
        "try: resolve_device('npu')\n"
        "except UsageError as error: print(json.dumps([npu_ops.status(), str(error)]))"
    )
    done = world.start(code, STANDIN_SOC="Ascend310P3", TREESPARK_OPS="kernel")
    assert done.returncode == 0, done.stderr
    facts, error = json.loads(done.stdout.splitlines()[-1])
    assert facts["reason"] == "built for Ascend910B2, the device is Ascend310P3"
    assert {row["devices"]["npu"]["active"] for row in facts["operators"]} == {"refused"}
    assert facts["reason"] in error


@pytest.mark.parametrize("queue", ["0", "1"])
def test_built_in_operator_raises(world, queue):
    code = "import torch, torch_npu\nprint((torch.ones(4).to('npu:0') + 1).cpu())"
    done = world.start(code, TASK_QUEUE_ENABLE=queue)
    assert done.returncode == 1
    assert "RuntimeError: " in done.stderr
    assert "Add" in done.stderr
