# SPDX-License-Identifier: Apache-2.0
"""Everything is declared in pyproject.toml; TREESPARK_BUILD_OPS=1 adds the kernels of an NPU."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent


class BuildOps(build_ext):
    """Runs npu_ops/build.sh instead of a compiler."""

    def run(self) -> None:
        """Build the library where it is packaged from, or in place for an editable install."""
        base = ROOT if self.inplace or self.editable_mode else Path(self.build_lib).absolute()
        # pip builds in an environment of its own, entered by these; torch is in the outer one.
        hidden = ("PYTHONPATH", "PYTHONNOUSERSITE")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        script = ["bash", str(ROOT / "npu_ops" / "build.sh"), "--python", sys.executable]
        work = [
            "--out",
            str(base / "npu_ops" / "lib"),
            "--build-dir",
            str(ROOT / "build" / "npu_ops"),
        ]
        subprocess.run([*script, *work], env=env, check=True)

    def get_outputs(self) -> list[str]:
        """Nothing: what is built is package data."""
        return []


if os.environ.get("TREESPARK_BUILD_OPS") == "1":
    # Without a source; it makes the wheel one of this platform.
    kernels = Extension("npu_ops.lib.libtreespark_ops", sources=[])
    setup(ext_modules=[kernels], cmdclass={"build_ext": BuildOps})
else:
    setup()
