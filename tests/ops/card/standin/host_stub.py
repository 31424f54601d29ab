# SPDX-License-Identifier: Apache-2.0
"""Writes launch functions of kernels for the emulator, with the signatures that CANN gives them.

host_stub.py FOLDER SOURCE...: for a kernel NAME, FOLDER/aclrtlaunch_NAME.h declares
`uint32_t aclrtlaunch_NAME(uint32_t blocks, void* stream, void* TENSOR..., Tiling* tiling)`. As with
CANN a source has one kernel, because its kind is looked up once per source, and the tiling, which
the kernel gets by value, is copied.
"""

import re
import sys
from pathlib import Path

ENTRY = re.compile(r'extern "C" __global__ __aicore__ (?:\w+ )?void (\w+)\(([^)]*)\) \{')
KIND = re.compile(r"KERNEL_TASK_TYPE_DEFAULT\((\w+)\)")


def main(folder, *sources):
    """Write the files of all kernels."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        text = Path(source).read_text(encoding="utf-8")
        entries = ENTRY.findall(text)
        if len(entries) != 1:
            raise SystemExit(f"{source}: {len(entries)} kernels, CANN takes one per source")
        ((name, parameters),) = entries
        *tensors, tiling = (parameter.split() for parameter in parameters.split(","))
        assert all(kind == "GM_ADDR" for kind, _ in tensors)
        arguments = ", ".join(f"void* {tensor}" for _, tensor in tensors)
        signature = (
            f'extern "C" uint32_t aclrtlaunch_{name}(uint32_t blocks, void* stream, '
            f"{arguments}, {tiling[0]}* tiling)"
        )
        write(
            folder / f"aclrtlaunch_{name}.h",
            "#pragma once\n#define ACLRT_LAUNCH_KERNEL(kernel) aclrtlaunch_##kernel\n"
            f"{signature};\n",
        )
        named = ", ".join(f'{{"{tensor}", {tensor}}}' for _, tensor in tensors)
        write(
            folder / f"{name}.cpp",
            f'#include "{source}"\n#include "launcher.h"\n{signature} {{\n'
            f'  return standin::Launch("{name}", &{name}, {KIND.search(text)[1]}, blocks, stream, '
            f"{{{named}}}, *tiling);\n}}\n",
        )


def write(path, text):
    """Write a file that changed: the others need not be compiled again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
