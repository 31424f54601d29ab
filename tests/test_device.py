# SPDX-License-Identifier: Apache-2.0
"""The device layer's promises, with stand-in torch_npu packages where the hardware is missing."""

import json
import os
import random
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from treespark import device as devices
from treespark.errors import UsageError

# A torch_npu that works as far as selection goes: two devices on the private-use backend of torch.
WORKING_TORCH_NPU = """
import types, torch
torch.utils.rename_privateuse1_backend("npu")
module = types.ModuleType("torch.npu")
module.is_available = lambda: {available}
module.device_count = lambda: {count}
module.manual_seed_all = module.manual_seed = lambda seed: None
module._is_in_bad_fork = lambda: False
torch._register_device_module("npu", module)
"""
PRINT_REPORT = "import json; from treespark.device import report; print(json.dumps(report()))"


@pytest.fixture(autouse=True)
def forget_answers(monkeypatch):
    """Each test asks the machine anew, without the user's own settings."""
    monkeypatch.delenv(devices.ENV, raising=False)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    devices.probe.cache_clear()
    yield
    devices.probe.cache_clear()


def report_with_package(tmp_path, repository, source, code=PRINT_REPORT, **env):
    """Report of a fresh process whose torch_npu package, entry point included, is `source`."""
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(source + "\ndef _autoload(): pass\n")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    settings = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{repository}", **env}
    inherited = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=inherited | settings, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["device"]


def candidate(device, name):
    return next(row for row in device["candidates"] if row["name"] == name)


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError", "AttributeError"])
def test_torch_npu_that_fails_to_import_leaves_the_next_device(tmp_path, repository, error):
    source = f"raise {error}('libhccl.so: cannot open shared object file')"
    device = report_with_package(tmp_path, repository, source)
    assert device["chosen"] in ("cuda", "cpu")
    reason = candidate(device, "npu")["reason"]
    assert reason == f"import torch_npu failed: {error}: libhccl.so: cannot open shared object file"


def test_torch_npu_that_imports_but_registers_nothing_is_rejected(tmp_path, repository):
    device = report_with_package(tmp_path, repository, "")
    assert device["chosen"] in ("cuda", "cpu")
    assert "did not register" in candidate(device, "npu")["reason"]


@pytest.mark.parametrize(
    ("available", "count", "reason"),
    [
        ("False", "2", "torch.npu.is_available() is False"),
        ("True", "0", "torch.npu.device_count() is 0"),
        ("1 / 0", "2", "asking torch.npu failed: ZeroDivisionError: division by zero"),
    ],
)
def test_torch_npu_without_a_usable_device_is_rejected_with_its_answer(
    tmp_path, repository, available, count, reason
):
    source = WORKING_TORCH_NPU.format(available=available, count=count)
    device = report_with_package(tmp_path, repository, source)
    assert device["chosen"] in ("cuda", "cpu")
    assert candidate(device, "npu")["reason"] == reason


def test_working_npu_is_preferred_with_its_own_defaults(tmp_path, repository):
    source = WORKING_TORCH_NPU.format(available="True", count="2")
    device = report_with_package(tmp_path, repository, source)
    assert device["chosen"] == "npu"
    assert (device["dtype"], device["dist_backend"]) == ("bfloat16", "hccl")
    assert candidate(device, "npu") == {"name": "npu", "usable": True, "count": 2, "reason": None}


def test_index_beyond_the_last_npu_is_an_error_that_names_the_range(tmp_path, repository):
    source = WORKING_TORCH_NPU.format(available="True", count="2")
    device = report_with_package(tmp_path, repository, source, TREESPARK_DEVICE="npu:2")
    assert device["chosen"] is None
    assert device["error"] == "TREESPARK_DEVICE=npu:2: index 2 is out of range, allowed: 0..1"


def test_double_precision_on_an_npu_is_refused(tmp_path, repository):
    code = (
        "import json\nfrom treespark import device as d\nd.resolve_device('npu')\n"
        "try: d.resolve_dtype('float64', 'npu')\n"
        "except ValueError as error: print(json.dumps({'device': str(error)}))"
    )
    source = WORKING_TORCH_NPU.format(available="True", count="1")
    assert "no double precision" in report_with_package(tmp_path, repository, source, code)


@pytest.mark.parametrize(
    ("given", "seen"), [("1,0", "0,1"), ("10,9", "9,10"), ("", None), (" ", None), ("0,1", "0,1")]
)
def test_visible_devices_are_sorted_and_never_empty(monkeypatch, given, seen):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", given)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object())
    devices.probe("npu")
    assert os.environ.get("ASCEND_RT_VISIBLE_DEVICES") == seen


def test_asking_for_a_cpu_does_not_import_torch_npu(monkeypatch):
    def forbidden():
        raise AssertionError("torch_npu was asked")

    monkeypatch.setattr(devices, "_import_torch_npu", forbidden)
    assert devices.resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setenv(devices.ENV, "cpu:0")
    assert devices.resolve_device() == torch.device("cpu")


def pretend_cuda(monkeypatch, available, count):
    module = types.SimpleNamespace(is_available=lambda: available, device_count=lambda: count)
    monkeypatch.setattr(torch, "cuda", module)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(devices, "_import_torch_npu", lambda: "torch_npu is not installed")


def test_cuda_is_preferred_to_a_cpu(monkeypatch):
    pretend_cuda(monkeypatch, available=True, count=2)
    assert devices.resolve_device() == torch.device("cuda")
    assert devices.resolve_device("cuda:1") == torch.device("cuda:1")
    assert devices.available_devices() == ["cuda", "cpu"]


@pytest.mark.parametrize(
    ("available", "count", "reason"),
    [(False, 0, "torch.cuda.is_available() is False"), (True, 0, "torch.cuda.device_count() is 0")],
)
def test_cuda_that_is_not_usable_is_rejected_with_its_answer(monkeypatch, available, count, reason):
    pretend_cuda(monkeypatch, available, count)
    assert devices.resolve_device() == torch.device("cpu")
    assert devices.probe("cuda").reason == reason


def test_argument_wins_over_environment(monkeypatch):
    monkeypatch.setenv(devices.ENV, "nonsense")
    assert devices.resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match=r"^TREESPARK_DEVICE=nonsense: no such device, allowed: "):
        devices.resolve_device()


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:-1", "cuda:x", "npu:0:1", "", "cpu:²"])
def test_unknown_device_name_is_refused_with_the_allowed_ones(name):
    with pytest.raises(UsageError, match="allowed: npu, cuda, cpu"):
        devices.resolve_device(name)


def test_named_device_is_never_replaced_by_another(monkeypatch):
    pretend_cuda(monkeypatch, available=False, count=0)
    with pytest.raises(UsageError, match=r"--device cuda: not usable here: torch\.cuda\.is_avail"):
        devices.resolve_device("cuda")


def test_report_survives_a_device_that_cannot_be_used(monkeypatch):
    monkeypatch.setenv(devices.ENV, "tpu")
    device = devices.report()["device"]
    assert device["chosen"] is None
    assert device["error"].startswith("TREESPARK_DEVICE=tpu")


def test_report_names_the_processor(monkeypatch, tmp_path):
    facts = devices.report()
    assert facts["processor"]
    assert facts["cores"] == os.cpu_count()
    # Where there is no such file, as on other systems.
    monkeypatch.setattr(devices, "Path", lambda name: tmp_path / "absent")
    monkeypatch.setattr(devices.platform, "processor", lambda: "arm")
    assert devices.report()["processor"] == "arm"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (None, torch.float32),
        ("auto", torch.float32),
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("half", torch.float16),
        ("FP32", torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_dtype_names_resolve_on_a_cpu(name, dtype):
    assert devices.resolve_dtype(name, "cpu") is dtype


@pytest.mark.parametrize("name", ["int8", "", torch.int64])
def test_unknown_dtype_is_refused_with_the_allowed_ones(name):
    with pytest.raises(UsageError, match="allowed: auto, bfloat16"):
        devices.resolve_dtype(name, "cpu")


@pytest.mark.parametrize("native", [True, False])
def test_bfloat16_without_instructions_for_it_is_said_once(native, monkeypatch, caplog):
    monkeypatch.setattr(devices, "has_bfloat16_products", lambda: native)
    devices._warn_of_emulation.cache_clear()
    for name in ("bf16", "float32", "bfloat16"):
        devices.resolve_dtype(name, "cpu")
    devices.resolve_dtype("bfloat16", "cuda")
    assert [record.levelname for record in caplog.records] == ([] if native else ["WARNING"])
    assert native or "target.dtype" in caplog.text


def test_default_dtype_of_an_accelerator_is_bfloat16():
    assert devices.resolve_dtype("auto", "cuda") is torch.bfloat16


def test_autocast_runs_products_in_the_dtype_and_leaves_float32_alone(device):
    x = torch.ones(2, 2, device=device)
    with devices.autocast(device, "bfloat16"):
        assert (x @ x).dtype is torch.bfloat16
    with devices.autocast(device, "float32"):
        assert (x @ x).dtype is torch.float32


def test_values_come_to_the_host_exactly_and_in_one_transfer(device, monkeypatch):
    given = [
        torch.tensor([[1, -1], [2**31 - 1, 0]], device=device),
        torch.tensor([[0.1, -torch.inf]], device=device),
        torch.zeros(0, 3, device=device),
        torch.tensor([[1.5, 2.5], [3.5, 4.5]], device=device).t(),
        torch.tensor([7], dtype=torch.int32, device=device),
    ]
    transfers, to_cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: transfers.append(t.shape) or to_cpu(t))
    got = devices.to_host(given)
    assert len(transfers) == 1
    assert got == [given[0].tolist(), given[1].tolist(), [], [[1.5, 3.5], [2.5, 4.5]], [7]]


def test_seed_fixes_all_three_generators():
    def draw():
        devices.seed_everything(5)
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert draw() == draw()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(UsageError, match=f"--seed {seed}: allowed: 0..4294967295"):
        devices.seed_everything(seed)


@pytest.mark.parametrize(("kind", "backend"), [("cuda:1", "nccl"), ("cpu", "gloo")])
def test_each_kind_has_its_dist_backend(kind, backend):
    assert devices.dist_backend(kind) == backend


def test_synchronize_and_peak_memory_work_on_every_usable_device(device):
    x = torch.ones(1024, device=device)
    devices.synchronize(device)
    assert devices.peak_memory_bytes(device) >= x.nbytes


def test_deepspeed_is_told_the_device_in_use(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    devices.export_deepspeed_accelerator("cpu")
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    with pytest.raises(UsageError, match="DS_ACCELERATOR=cpu: the device in use is cuda"):
        devices.export_deepspeed_accelerator("cuda")
    monkeypatch.delenv("DS_ACCELERATOR")
