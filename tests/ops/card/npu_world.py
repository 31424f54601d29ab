# SPDX-License-Identifier: Apache-2.0
"""torch_npu without a card: an environment with it, CANN's stand-in, the library built there."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.ops.card import cann

ROOT = Path(__file__).parents[3]
TORCH = TORCH_NPU = "2.13.0"


def environment(folder):
    """Return the Python of a virtual environment with torch_npu, made in `folder` if need be.

    Not of this one: where torch_npu is installed, a plain `import torch` fails without CANN. If
    this Python's torch is of the right version, the environment uses it.
    """
    python = folder / "bin" / "python"
    site = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    if (site / "torch_npu").exists():
        return python
    run(sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    if importlib.metadata.version("torch").split("+")[0] == TORCH:
        (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install(*pip, "install", "--no-deps", f"torch_npu=={TORCH_NPU}")
    else:
        install(*pip, "install", f"torch=={TORCH}")
        install(*pip, "install", f"torch_npu=={TORCH_NPU}")
    return python


def install(*command):
    """Run pip; skip, with its last words, where it cannot install."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        pytest.skip(f"{command[-1]} cannot be installed: {lines[-1]}")


def run(*command, **environment):
    """Run a command that has to succeed; returns what it prints."""
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=clean() | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clean():
    """Return this process's environment without what would steer the one to start."""
    dropped = ("ASCEND_", "TREESPARK_", "SOC_VERSION", "STANDIN_", "PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


class World:
    """A folder with the environment, CANN's stand-in and the library; kept between test runs."""

    def __init__(self, folder, venv, version):
        self.python = environment(venv)
        self.home, self.library = cann.tool_folder(folder / "cann", version), folder / "lib"
        cann.libraries(self.home, self._package("torch_npu"))
        self.variables = {
            "ASCEND_HOME_PATH": str(self.home),
            "ASCEND_OPP_PATH": str(self.home / "opp"),
            "LD_LIBRARY_PATH": str(self.home / "lib64"),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "OMP_NUM_THREADS": "1",
        }
        self.build(folder / "build")

    def build(self, work):
        """Build the library by build.sh; what is up to date stays."""
        options = ("--soc", "Ascend910B2", "--python", str(self.python), "--out", str(self.library))
        script = str(ROOT / "npu_ops" / "build.sh")
        # Not optimised: compiling takes longer than all calls.
        quick = self.variables | {"CMAKE_BUILD_TYPE": "None"}
        run("bash", script, *options, "--build-dir", str(work), **quick)

    def start(self, code, **environment):
        """Run Python code with the library in place; returns the finished process."""
        place = (
            "import pathlib; from npu_ops import registry; "
            f"registry.LIBRARY = pathlib.Path({str(self.library)!r}) / 'libtreespark_ops.so'\n"
        )
        variables = self.variables | {"PYTHONPATH": str(ROOT)} | environment
        return subprocess.run(
            [self.python, "-c", place + code],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=clean() | variables,
        )

    def _package(self, name):
        code = f"import importlib.util as u; print(u.find_spec({name!r}).origin)"
        return Path(run(str(self.python), "-c", code).strip()).parent
