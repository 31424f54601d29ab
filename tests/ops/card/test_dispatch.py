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


def test_without_the_task_queue_the_same_holds(world):
    assert set(outcome_of(world, TASK_QUEUE_ENABLE="0").values()) == {None}


def test_on_another_card_the_reference_serves_and_the_reason_is_there(world):
    code = (
        "import json, torch_npu, npu_ops\n"
        "assert npu_ops.load_library() == npu_ops.status()['reason']\n"
        "print(json.dumps(npu_ops.status()))"
    )
    done = world.start(code, STANDIN_SOC="Ascend310P3")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["reason"] == "built for Ascend910B2, the device is Ascend310P3"
    assert {row["devices"]["npu"]["active"] for row in facts["operators"]} == {"reference"}


@pytest.mark.parametrize(("soc", "code"), [("Ascend910B3", 0), ("Ascend310P3", 2)])
def test_kernel_mode_takes_an_npu_with_kernels_and_no_other(world, soc, code):
    choose = (
        "import sys; from treespark.device import resolve_device; "
        "from treespark.errors import UsageError\n"
        "try: resolve_device('npu')\n"
        "except UsageError as error: print(error); sys.exit(2)"
    )
    done = world.start(choose, TREESPARK_OPS="kernel", STANDIN_SOC=soc)
    assert done.returncode == code, done.stdout + done.stderr
