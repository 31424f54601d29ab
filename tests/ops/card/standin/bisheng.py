# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the compiler bisheng: kernels and their <<<>>> launches, for the emulator.

`-c` compiles one source, where each kernel is declared with the cores it runs on; anything else is
handed to g++, with the emulator's runtime.
"""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
OPS = HERE.parents[3] / "npu_ops"
EMULATOR = OPS / "emulator"
# As npu_ops/emulator/build.py has them.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden")
ARITHMETIC = ("-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off")
KINDS = {"__vector__": "KERNEL_TYPE_AIV_ONLY", "__mix__(1, 2)": "KERNEL_TYPE_MIX_AIC_1_2"}
ENTRY = re.compile(r'(extern "C"\s+)(__vector__|__mix__\(1, 2\))(\s+void (\w+)\()')
LAUNCH = re.compile(r"(\w+)<<<(\w+), nullptr, (\w+)>>>\(([^;]*), \((\w+)\)\)(?=, 0u)", re.DOTALL)


def for_emulator(text):
    """Return preprocessed source with launches as calls of launcher.h."""
    kinds = {name: KINDS[cores] for _, cores, _, name in ENTRY.findall(text)}

    def call(found):
        kernel, blocks, stream, tensors, tiling = found.groups()
        named = ", ".join(f'{{"{t.strip()}", {t.strip()}}}' for t in tensors.split(","))
        how = f'"{kernel}", &{kernel}, {kinds[kernel]}, {blocks}, {stream}'
        return f"standin::Launch({how}, {{{named}}}, {tiling})"

    return LAUNCH.sub(call, ENTRY.sub(r"\1\3", text))


def main(*arguments):
    """Compile or link."""
    if "-c" not in arguments:
        runtime = EMULATOR / "runtime" / "runtime.cpp"
        return subprocess.run(["g++", *FLAGS, *ARITHMETIC, *arguments, runtime]).returncode
    arguments = [a for a in arguments if not a.startswith("--npu-arch")]
    source = arguments.pop(arguments.index("-c") + 1)
    arguments.remove("-c")
    target = Path(arguments.pop(arguments.index("-o") + 1))
    arguments.remove("-o")
    include = [f"-I{folder}" for folder in (HERE, EMULATOR / "include", OPS)]
    shown = ["g++", "-E", *FLAGS, *arguments, *include, "-include", "launcher.h", source]
    text = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    unit = target.with_suffix(".emulated.cpp")
    unit.write_text(for_emulator(text), encoding="utf-8")
    command = ["g++", *FLAGS, *ARITHMETIC, "-c", str(unit), "-o", str(target)]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
