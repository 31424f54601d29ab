# SPDX-License-Identifier: Apache-2.0
"""A folder that looks like CANN's: for builds without a card, and for torch_npu to start on."""

import platform
import re
import subprocess
import sys
from pathlib import Path

STANDIN = Path(__file__).parent / "standin"
EMULATOR = STANDIN.parents[3] / "npu_ops" / "emulator"
# What torch_npu's libraries are linked with; one of ours has all of it.
LIBRARIES = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "atb", "opapi")
_OF_CANN = re.compile(r"acl|rt[A-Z]|Msprof|_ZN3atb")


def tool_folder(home, version="8.1.RC1"):
    """Make the parts that a build looks at: version, compiler and build files."""
    machine = home / f"{platform.machine()}-linux"
    compiler = machine / "ccec_compiler" / "bin" / "bisheng"
    compiler.parent.mkdir(parents=True, exist_ok=True)
    (machine / "ascend_toolkit_install.info").write_text(
        f"package_name=Ascend-cann-toolkit\nversion={version}\ninnerversion=V100\n"
    )
    files = home / "tools" / "tikcpp" / "ascendc_kernel_cmake"
    files.mkdir(parents=True, exist_ok=True)
    settings = {"STANDIN": STANDIN, "EMULATOR": EMULATOR, "STANDIN_PYTHON": sys.executable}
    lines = [f'set({name} "{value}")\n' for name, value in settings.items()]
    name = "ascendc.cmake" if int(version.split(".")[0]) < 9 else "asc-config.cmake"
    write(files / name, "".join(lines) + f"include(${{STANDIN}}/{name})\n")
    write(compiler, f'#!/bin/sh\nexec {sys.executable} {STANDIN}/bisheng.py "$@"\n')
    compiler.chmod(0o755)
    return home


def libraries(home, torch_npu):
    """Build the stand-in libraries for the torch_npu in a folder, unless they are up to date."""
    lib = home / "lib64"
    for folder in (lib, home / "runtime", home / "compiler", home / "opp"):
        folder.mkdir(parents=True, exist_ok=True)
    main = lib / "libascendcl.so"
    sources = [STANDIN / "acl.cpp", STANDIN / "copy.cpp", STANDIN / "standin.h", Path(__file__)]
    if main.exists() and main.stat().st_mtime > max(file.stat().st_mtime for file in sources):
        return
    # Weak: what acl.cpp and copy.cpp have is theirs. 207000: ACL_ERROR_FEATURE_UNSUPPORTED.
    missing = lib / "missing.c"
    missing.write_text(
        "".join(
            f"__attribute__((weak)) int {name}(void) {{ return 207000; }}\n"
            for name in sorted(_needed(torch_npu))
        )
    )
    shared = ["g++", "-O1", "-shared", "-fPIC"]
    subprocess.run([*shared, "-c", "-x", "c", missing, "-o", lib / "missing.o"], check=True)
    include = ["-std=c++17", "-I", torch_npu / "include", *sources[:2]]
    subprocess.run([*shared, *include, lib / "missing.o", "-o", main], check=True)
    for name in LIBRARIES:
        needs = ["-Wl,--no-as-needed", "-L", lib, "-lascendcl"]
        target = lib / f"lib{name}.so"
        subprocess.run([*shared, "-x", "c++", "/dev/null", *needs, "-o", target], check=True)


def _needed(torch_npu):
    """Return the names of CANN that torch_npu's libraries ask for when they are loaded."""
    names = set()
    for library in [*torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so")]:
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        )
        names |= {line.split()[-1] for line in listed.stdout.splitlines()}
    return {name for name in names if _OF_CANN.match(name)}


def write(path, text):
    """Write a file that changed: CMake starts again when one is newer."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
