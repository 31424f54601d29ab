# SPDX-License-Identifier: Apache-2.0
"""Compiles kernel sources with g++ against the emulator's headers, once per content."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from npu_ops.emulator.launch import EmulatorError, Library

ROOT = Path(__file__).parent
INCLUDE = ROOT / "include"
RUNTIME = ROOT / "runtime"

# No exceptions and no RTTI, as on the device. Integers wrap and memory has no types, as there, and
# no multiplication is fused with an addition unless the instruction says so.
_FLAGS = (
    *("-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"),
    *("-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-Wall", "-Wextra"),
)


def build(
    source: Path,
    entries: Sequence[str],
    *,
    more: Sequence[Path] = (),
    host: Sequence[Path] = (),
    include: Sequence[Path] = (),
    defines: Mapping[str, str | int] | None = None,
) -> Library:
    """Return the kernels `entries` of a C++ source, compiled or taken from the cache.

    source, and more in the same folder: files that define each entry as
    `extern "C" __global__ __aicore__ void entry(...)`.
    host: sources of the host's part, such as the tiling; their `extern "C"` functions are reached
    by `Library.function`.  include: folders for `#include "..."`; the source's own is always one.
    defines: macros.
    Raises EmulatorError with the compiler's messages, or if there is no g++.
    """
    folders = [source.parent, *include, *(file.parent for file in host)]
    macros = [f"-D{name}={value}" for name, value in sorted((defines or {}).items())]
    runtime = _runtime()
    unit = "".join(
        f"{line}\n"
        for line in [
            *(f'#include "{file.resolve()}"' for file in (source, *more)),
            '#include "emulator/entry.h"',
            *(f"EMULATOR_ENTRY({entry})" for entry in entries),
            "#pragma GCC visibility push(default)",
            *(f'#include "{file.resolve()}"' for file in host),
        ]
    )
    files = (file for folder in [INCLUDE, *folders] for file in _sources(folder))
    key = _digest([unit, runtime.name, *macros], files)
    library = _cache_folder() / f"{source.stem}-{key}.so"
    if not library.exists():
        paths = [f"-I{folder}" for folder in [INCLUDE, *folders]]
        with tempfile.TemporaryDirectory() as scratch:
            main = Path(scratch) / "main.cpp"
            main.write_text(unit, encoding="utf-8")
            _compile(["-O1", "-shared", *macros, *paths, str(main), str(runtime)], library)
    return Library(library, library.with_suffix(".log").read_text(encoding="utf-8"))


def _runtime() -> Path:
    """Return the compiled runtime."""
    key = _digest([], [*_sources(INCLUDE), *_sources(RUNTIME)])
    target = _cache_folder() / f"runtime-{key}.o"
    if not target.exists():
        _compile(["-O2", "-c", str(RUNTIME / "runtime.cpp")], target)
    return target


def _compile(arguments: Sequence[str], target: Path) -> None:
    """Write `target` and its warnings in one step each, so that parallel runs do not collide."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        command = [_compiler()[0], *_FLAGS, *arguments, "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EmulatorError(f"g++ does not compile {target.stem}:\n{done.stderr}")
        log = Path(scratch) / "log"
        log.write_text(done.stderr, encoding="utf-8")
        os.replace(log, target.with_suffix(".log"))
        os.replace(output, target)


@cache
def _compiler() -> tuple[str, str]:
    """Return the path of g++ and what it says of its version."""
    path = shutil.which("g++")
    if path is None:
        raise EmulatorError("the emulator needs g++ 9 or newer on PATH; none was found")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return path, done.stdout


def _digest(texts: Iterable[str], files: Iterable[Path]) -> str:
    """Return a name for compiler, flags, texts and the contents of files."""
    digest = hashlib.sha256("\0".join([_compiler()[1], *_FLAGS, *texts]).encode())
    for file in sorted(set(files)):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _sources(folder: Path) -> list[Path]:
    """Return the C++ files of a folder."""
    return [file for file in folder.rglob("*") if file.suffix in {".h", ".cpp"}]


def _cache_folder() -> Path:
    """Return the folder of compiled kernels."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "treespark" / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
