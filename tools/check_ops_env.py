# SPDX-License-Identifier: Apache-2.0
"""Says what a build of the NPU's kernels finds on this machine, and what is missing.

    python tools/check_ops_env.py                     # a table
    python tools/check_ops_env.py --json
    python tools/check_ops_env.py --soc Ascend910B2   # for another card than the one here

Exit code: 0 if `bash npu_ops/build.sh` has all it needs, else 1; 2 for a mistake in the call.
Needs nothing but Python: torch may be what is missing. `--cmake` is for build.sh.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
# Architecture 2201: the one the kernels are written for.
SOCS = (
    *("Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B3", "Ascend910B4"),
    "Ascend910B4-1",
)
FIRST_GENERATION = ("Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB")
MACHINES = ("x86_64", "aarch64")
OLDEST_CANN = 8
# Folders that hold CANN's build files for Ascend C, by version.
KERNEL_CMAKE = (
    *("tools/tikcpp/ascendc_kernel_cmake", "compiler/tikcpp/ascendc_kernel_cmake"),
    *("ascendc_devkit/tikcpp/samples/cmake", "{machine}-linux/tikcpp/ascendc_kernel_cmake"),
    "{machine}-linux/lib64/cmake",
)
COMPILER = (
    *("{machine}-linux/ccec_compiler/bin/bisheng", "tools/ccec_compiler/bin/bisheng"),
    *("compiler/ccec_compiler/bin/bisheng", "{machine}-linux/bin/bisheng"),
)


class MissingError(Exception):
    """What is not there, and what to do about it."""


class Row(NamedTuple):
    """One thing: its name, what was found, and what is wrong with it, or None."""

    name: str
    found: str | None
    problem: str | None
    for_build: bool = True


def soc_of(name: str) -> str:
    """Return the SOC as CANN spells it; raises MissingError for one the kernels are not for."""
    bare = name.strip().lower().removeprefix("ascend").strip()
    known = {soc.removeprefix("Ascend").lower(): soc for soc in (*SOCS, *FIRST_GENERATION)}
    soc = known.get(bare, name.strip())
    if soc in SOCS:
        return soc
    if soc in FIRST_GENERATION:
        reason = "first generation, another architecture; a 910B of today has a digit behind the B"
    else:
        reason = "the kernels are for Ascend 910B alone"
    raise MissingError(f"{name}: {reason}; supported: {', '.join(SOCS)}")


def soc_here(asked: str | None) -> str:
    """Return the SOC asked for, of SOC_VERSION, or of the first card here."""
    if asked or os.environ.get("SOC_VERSION"):
        return soc_of(asked or os.environ["SOC_VERSION"])
    command = shutil.which("npu-smi")
    if command is None:
        raise MissingError("no npu-smi to ask for the card here; name one with --soc Ascend910B2")
    try:
        done = subprocess.run(
            [command, "info", "-m"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingError(f"npu-smi info -m failed: {error}; name the card with --soc") from error
    # NPU ID, chip ID, logic ID and then the chip's name, as `Ascend 910B3` or `Ascend910B3`.
    found = re.search(r"\b(?:Ascend ?)(\d\w*(?:-\d)?)\b", done.stdout)
    if found is None:
        raise MissingError("npu-smi info -m lists no Ascend card; name one with --soc Ascend910B2")
    return soc_of(f"Ascend{found[1]}")


def cann_home() -> Path:
    """Return CANN's folder."""
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    hint = "source the set_env.sh of CANN's folder, such as /usr/local/Ascend/cann/set_env.sh"
    if not home:
        raise MissingError(f"ASCEND_HOME_PATH is not set: {hint}")
    if not Path(home).is_dir():
        raise MissingError(f"ASCEND_HOME_PATH={home}: no such folder; {hint}")
    return Path(home)


def cann_version(home: Path) -> str:
    """Return the version of the toolkit, such as 8.1.RC1."""
    info = home / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    if not info.exists():
        raise MissingError(f"{info} is missing: is this the toolkit for {platform.machine()}?")
    found = re.search(r"^version=(\S+)", info.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None or not found[1].split(".")[0].isdigit():
        raise MissingError(f"{info} has no line version=NUMBER")
    if int(found[1].split(".")[0]) < OLDEST_CANN:
        raise MissingError(f"CANN {found[1]}: need {OLDEST_CANN} or newer")
    return found[1]


def _in(home: Path, places: tuple[str, ...], names: tuple[str, ...], what: str) -> Path:
    """Return the first of `names` in one of CANN's places."""
    folders = [home / place.format(machine=platform.machine()) for place in places]
    for path in (folder / name for name in names for folder in folders):
        if path.exists():
            return path
    raise MissingError(f"{what} is in none of {', '.join(str(folder) for folder in folders)}")


def build_files(home: Path, version: str) -> Path:
    """Return the file by which CMake builds kernels: a CMake package since version 9."""
    is_new = int(version.split(".")[0]) >= 9
    names = ("asc-config.cmake", "ASCConfig.cmake") if is_new else ("ascendc.cmake",)
    return _in(home, KERNEL_CMAKE, names, names[0])


def tool(name: str, oldest: tuple[int, int], package: str) -> str:
    """Return the version of a program on PATH."""
    path = shutil.which(name)
    if path is None:
        raise MissingError(f"{name} is not on PATH (Debian, Ubuntu: apt-get install -y {package})")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    # g++ names its builder in parentheses, with a version of that.
    found = re.search(r"(\d+)\.(\d+)(\.\d+)*", re.sub(r"\([^)]*\)", "", done.stdout))
    if found is None:
        raise MissingError(f"{path} --version prints no version")
    if (int(found[1]), int(found[2])) < oldest:
        raise MissingError(f"{name} {found[0]}: need {oldest[0]}.{oldest[1]} or newer")
    return found[0]


def package(name: str) -> tuple[str, Path]:
    """Return version and folder of a Python package, without importing it."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise MissingError(f"{name} is not installed for {sys.executable}") from None
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise MissingError(f"{name} {version} cannot be found on sys.path of {sys.executable}")
    return version, Path(spec.origin).parent


def torch_npu() -> tuple[str, Path]:
    """Return version and folder of torch_npu, if it is torch's own release."""
    (torch, _), (version, folder) = package("torch"), package("torch_npu")
    minor = ".".join(torch.split(".")[:2])
    if version.split(".")[:2] != torch.split(".")[:2]:
        hint = f"pip install 'torch_npu=={minor}.*'"
        raise MissingError(f"torch_npu {version} is not for torch {torch}: {hint}")
    return version, folder


def machine() -> str:
    """Return the architecture of this computer."""
    if platform.machine() not in MACHINES:
        raise MissingError(f"{platform.machine()}: CANN is for {' and '.join(MACHINES)}")
    return platform.machine()


def rows(soc: str | None) -> list[Row]:
    """Return everything that a build, and later a run, needs."""
    table = []

    def add(name, found, for_build=True):
        try:
            value = found()
        except MissingError as missing:
            table.append(Row(name, None, str(missing), for_build))
            return None
        text = str(value[0] if isinstance(value, tuple) else value)
        table.append(Row(name, text, None, for_build))
        return value

    add("machine", machine)
    add("SOC", lambda: soc_here(soc))
    home = add("CANN", cann_home)
    version = add("CANN version", lambda: cann_version(home)) if home else None
    if home:
        add("CANN compiler", lambda: _in(home, COMPILER, ("",), "bisheng"))
    if home and version:
        add("CANN build files", lambda: build_files(home, version))
    add("cmake", lambda: tool("cmake", (3, 16), "cmake"))
    add("make", lambda: tool("make", (3, 80), "make"))
    # The oldest with C++20, which torch's headers are written in.
    add("g++", lambda: tool("g++", (10, 0), "g++"))
    add("torch", lambda: package("torch"))
    add("torch_npu", torch_npu)
    add("library", library, for_build=False)
    return table


def library() -> str:
    """Return what the built library was built with."""
    record = ROOT / "npu_ops" / "lib" / "libtreespark_ops.json"
    if not record.exists():
        raise MissingError("not built yet: bash npu_ops/build.sh")
    facts = json.loads(record.read_text(encoding="utf-8"))
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def cmake_definitions(soc: str | None) -> list[str]:
    """Return what npu_ops/csrc/CMakeLists.txt has to know, as arguments of cmake."""
    import torch

    home = cann_home()
    version = cann_version(home)
    values = {
        "TREESPARK_CANN": version.split(".")[0],
        "TREESPARK_CANN_VERSION": version,
        "ASCEND_HOME_PATH": home,
        "SOC_VERSION": soc_here(soc),
        "TORCH_DIR": package("torch")[1],
        "TORCH_NPU_DIR": torch_npu()[1],
        "TORCH_VERSION": package("torch")[0],
        "TORCH_NPU_VERSION": torch_npu()[0],
        "TORCH_CXX11_ABI": int(torch._C._GLIBCXX_USE_CXX11_ABI),
    }
    return [f"-D{name}={value}" for name, value in values.items()]


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--soc", help=f"card to build for: {', '.join(SOCS)}")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--cmake", action="store_true", help="print arguments of cmake, one a line")
    options = parser.parse_args(arguments)
    table = rows(options.soc)
    problems = [row for row in table if row.problem and row.for_build]
    if options.cmake:
        for row in problems:
            print(f"error: {row.name}: {row.problem}", file=sys.stderr)
        if not problems:
            print("\n".join(cmake_definitions(options.soc)))
    elif options.json:
        facts = {"can_build": not problems, "rows": [row._asdict() for row in table]}
        print(json.dumps(facts, indent=2))
    else:
        for row in table:
            mark = "ok" if row.problem is None else "missing" if row.for_build else "-"
            print(f"{row.name:17} {mark:8} {row.problem or row.found}")
        print("\n" + ("missing for a build: see above" if problems else "a build has all it needs"))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
