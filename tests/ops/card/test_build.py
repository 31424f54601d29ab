# SPDX-License-Identifier: Apache-2.0
"""What a build for a card needs is found or named: check_ops_env.py, build.sh, setup.py.

CANN, npu-smi and torch_npu are folders and scripts that look like them as far as a build looks.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests.ops.card import cann
from tests.ops.card.npu_world import ROOT, clean

MINOR = ".".join(torch.__version__.split(".")[:2])
CHECK = [sys.executable, str(ROOT / "tools" / "check_ops_env.py")]
BUILD = ["bash", str(ROOT / "npu_ops" / "build.sh"), "--python", sys.executable]
needs_tools = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("cmake", "make", "g++")),
    reason="cmake, make and g++ are not all on PATH",
)


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def npu_package(folder, version):
    """Make a package that looks like torch_npu to who does not import it."""
    (folder / "torch_npu").mkdir(parents=True, exist_ok=True)
    (folder / "torch_npu" / "__init__.py").write_text("raise ImportError('no CANN here')\n")
    info = folder / f"torch_npu-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")


@pytest.fixture
def machine(tmp_path):
    """A computer with everything, by its environment; tests take something away."""
    npu_package(tmp_path / "site", f"{MINOR}.0")
    home = cann.tool_folder(tmp_path / "cann")
    listed = "NPU ID  Chip ID  Chip Logic ID  Chip Name\\n0  0  0  Ascend 910B3\\n0  1  -  Mcu\\n"
    script(tmp_path / "bin" / "npu-smi", f"printf '{listed}'")
    return {
        "ASCEND_HOME_PATH": str(home),
        "PYTHONPATH": str(tmp_path / "site"),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }


def run(command, environment):
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=clean() | environment
    )


def facts_of(environment, *options):
    done = run([*CHECK, "--json", *options], environment)
    facts = json.loads(done.stdout)
    assert done.returncode == (0 if facts["can_build"] else 1)
    return facts, {row["name"]: row for row in facts["rows"]}


@needs_tools
def test_complete_machine_can_build_and_its_card_is_found(machine):
    facts, rows = facts_of(machine)
    assert facts["can_build"]
    assert rows["SOC"]["found"] == "Ascend910B3"
    assert rows["CANN version"]["found"] == "8.1.RC1"
    assert rows["CANN build files"]["found"].endswith("ascendc.cmake")
    text = run(CHECK, machine).stdout
    assert "SOC               ok       Ascend910B3\n" in text
    assert text.endswith("a build has all it needs\n")


def take_away(machine, what):
    home = machine["ASCEND_HOME_PATH"]
    if what == "CANN":
        del machine["ASCEND_HOME_PATH"]
    elif what == "CANN folder":
        machine["ASCEND_HOME_PATH"] += "-moved"
    elif what == "old CANN":
        cann.tool_folder(Path(home), "7.0.0")
    elif what == "bisheng":
        for path in Path(home).glob("*/ccec_compiler/bin/bisheng"):
            path.unlink()
    elif what == "ascendc.cmake":
        shutil.rmtree(f"{home}/tools")
    elif what == "torch_npu":
        del machine["PYTHONPATH"]
    elif what == "torch_npu's release":
        npu_package(Path(machine["PYTHONPATH"]), "2.1.0")
        shutil.rmtree(f"{machine['PYTHONPATH']}/torch_npu-{MINOR}.0.dist-info")
    else:
        script(Path(home).parent / "bin" / "npu-smi", "exit 3")


LACKS = {
    "CANN": ("CANN", "ASCEND_HOME_PATH is not set: source the set_env.sh"),
    "CANN folder": ("CANN", "no such folder"),
    "old CANN": ("CANN version", "CANN 7.0.0: need 8 or newer"),
    "bisheng": ("CANN compiler", "bisheng is in none of"),
    "ascendc.cmake": ("CANN build files", "ascendc.cmake is in none of"),
    "torch_npu": ("torch_npu", "torch_npu is not installed for"),
    "torch_npu's release": ("torch_npu", "torch_npu 2.1.0 is not for torch"),
    "npu-smi": ("SOC", "name the card with --soc"),
}


@pytest.mark.parametrize("what", LACKS)
def test_what_is_missing_is_named_and_stops_the_build(machine, tmp_path, what):
    name, problem = LACKS[what]
    take_away(machine, what)
    _, rows = facts_of(machine)
    assert problem in rows[name]["problem"]
    done = run([*BUILD, "--out", str(tmp_path / "out")], machine)
    assert done.returncode == 1
    assert f"error: {name}: " in done.stderr
    assert "error: nothing was built" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "soc"),
    [
        ("Ascend910B2", "Ascend910B2"),
        ("ascend910b2c", "Ascend910B2C"),
        ("910B4-1", "Ascend910B4-1"),
    ],
)
def test_card_may_be_named_as_npu_smi_or_cann_do(machine, name, soc):
    assert facts_of(machine, "--soc", name)[1]["SOC"]["found"] == soc
    assert facts_of(machine | {"SOC_VERSION": name})[1]["SOC"]["found"] == soc


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Ascend910B", "first generation, another architecture"),
        ("910A", "first generation, another architecture"),
        ("Ascend310P3", "the kernels are for Ascend 910B alone"),
        ("Ascend910_9392", "the kernels are for Ascend 910B alone"),
        ("Ascend910B9", "the kernels are for Ascend 910B alone"),
    ],
)
def test_other_cards_are_refused_with_the_reason(machine, name, reason):
    problem = facts_of(machine, "--soc", name)[1]["SOC"]["problem"]
    assert problem.startswith(f"{name}: {reason}")
    assert problem.endswith("Ascend910B4, Ascend910B4-1")


@needs_tools
def test_newer_cann_is_built_with_its_cmake_package(machine):
    cann.tool_folder(Path(machine["ASCEND_HOME_PATH"]), "9.0.0")
    facts, rows = facts_of(machine)
    assert facts["can_build"]
    assert rows["CANN build files"]["found"].endswith("asc-config.cmake")


@needs_tools
def test_dry_run_prints_the_commands_and_writes_nothing(machine, tmp_path):
    out = tmp_path / "out"
    done = run([*BUILD, "--dry-run", "--soc", "910B2", "--out", str(out)], machine)
    assert done.returncode == 0, done.stderr
    configure, build, _, copy = done.stdout.splitlines()
    assert configure.startswith("+ cmake -G Unix\\ Makefiles -S ")
    for definition in ("TREESPARK_CANN=8", "SOC_VERSION=Ascend910B2", "TORCH_CXX11_ABI="):
        assert f" -D{definition}" in configure
    assert build.startswith("+ cmake --build ")
    assert copy.endswith(f"libtreespark_ops.json {out}/")
    assert not out.exists()


def test_unknown_option_is_a_usage_error():
    done = run([*BUILD, "--sco", "x"], {})
    assert (done.returncode, done.stderr) == (2, "error: --sco: unknown option; see --help\n")
    assert run([*BUILD, "--soc"], {}).stderr == "error: --soc: needs a value\n"


# Writes what the last step of a build leaves, in place of minutes with a compiler.
CMAKE = """[ "$1" = --version ] && echo cmake version 3.25.1 && exit
if [ "$1" = --build ]; then echo library > "$2/libtreespark_ops.so"; exit; fi
while [ "$1" != -B ]; do shift; done
mkdir -p "$2" && echo '{"soc": "Ascend910B3"}' > "$2/libtreespark_ops.json" """


@needs_tools
def test_wheel_is_of_this_platform_and_has_the_library(machine, tmp_path):
    copy = tmp_path / "repository"
    for name in ("treespark", "npu_ops", "launch", "tools"):
        ignored = shutil.ignore_patterns("__pycache__", "lib")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    script(tmp_path / "bin" / "cmake", CMAKE)
    # setup.py leaves PYTHONPATH, which is pip's, out: the package comes by a Python of its own.
    python = tmp_path / "bin" / "python"
    script(python, f'PYTHONPATH={machine.pop("PYTHONPATH")} exec {sys.executable} "$@"')
    wrapper = f"import sys; sys.executable = {str(python)!r}; import runpy; "
    command = ["setup.py", "-q", "bdist_wheel", "--dist-dir", str(tmp_path / "dist")]
    code = f"{wrapper}sys.argv = {command}; runpy.run_path('setup.py', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=copy,
        env=clean() | machine | {"TREESPARK_BUILD_OPS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith(f"-linux_{os.uname().machine}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "npu_ops/lib/libtreespark_ops.so" in names
    assert "npu_ops/lib/libtreespark_ops.json" in names
