# SPDX-License-Identifier: Apache-2.0
"""Lint of kernel sources: what g++ accepts and the compiler of the device does not.

Kernels may use the AscendC names listed in `ascendc_names.txt`, their own names and plain C++.
`python -m npu_ops.emulator.lint [FILE ...]` checks these files, or all of `npu_ops/*/op_kernel`.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMES_FILE = Path(__file__).parent / "ascendc_names.txt"
WORDS_FILE = Path(__file__).parent / "cpp_words.txt"
INCLUDE = Path(__file__).parent / "include"
COMPAT = ROOT / "csrc" / "compat.h"

_FORBIDDEN = {
    "std": "std:: does not exist on the device",
    **dict.fromkeys(("new", "delete", "malloc", "free", "calloc"), "no heap on the device"),
    "double": "no double on the device; use float",
    **dict.fromkeys(("throw", "try", "catch"), "no exceptions on the device"),
    **dict.fromkeys(("printf", "fprintf", "puts"), "no output from kernels"),
    **dict.fromkeys(("virtual", "dynamic_cast", "typeid"), "no run-time types on the device"),
    **dict.fromkeys(("asm", "goto", "thread_local"), "not in kernels"),
    "emu": "a name of the emulator, not of AscendC",
}
_INCLUDES = re.compile(r'#\s*include\s*(["<][^">]*[">])')
_SILENT = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\#\s*include[^\n]*""", re.DOTALL
)
_TOKEN = re.compile(
    r"[A-Za-z_]\w*|(?:\d+\.\d*|\.\d+|\d+(?=e))(?:e[+-]?\d+)?\w*|\d\w*|::|->|[^\s\w]"
)
_DOUBLE = re.compile(r"(\d+\.\d*|\.\d+|\d+(?=e))(e[+-]?\d+)?")
_DECLARED = re.compile(
    r"\b(?:class|struct|enum|namespace|using|typename|define)\s+(?:class\s+)?([A-Za-z_]\w*)"
)
# A name after a type, before what can follow a declared name.
_VARIABLE = re.compile(
    r"\b(?!return\b|else\b|case\b)\w+(?:<[^;(){}]*>)?[&*]*\s+[&*]*([A-Za-z_]\w*)\s*(?=[;={\[(,):]|$)",
    re.MULTILINE,
)
_FUNCTION = re.compile(
    r"\b(?!if\b|for\b|while\b|switch\b|return\b)([A-Za-z_]\w*)\s*\(([^;{}]*)\)\s*(?:const\s*)?(?::[^;{}]*)?\{"
)
_CALL = re.compile(r"\b([A-Za-z_]\w*)\s*(?:<[^;()]*>)?\s*\(")


def words_of(file: Path) -> frozenset[str]:
    """Return the words of a list; `#` starts a comment."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return frozenset(word for line in lines for word in line.split("#")[0].split())


def problems_of(sources: dict[str, str]) -> list[str]:
    """Return what is wrong with sources that belong together, as `file:line: what`.

    sources: file name -> text. A name that one of them or compat.h declares may be used in all.
    """
    texts = {name: _without_comments(text) for name, text in sources.items()}
    own = {name for text in texts.values() for name in _declared(text)}
    macros = _declared(_without_comments(COMPAT.read_text(encoding="utf-8")))
    known = own | macros | words_of(NAMES_FILE) | words_of(WORDS_FILE)
    problems = [problem for name, text in texts.items() for problem in _names(name, text, known)]
    problems += [p for name, text in sources.items() for p in _included(name, text, set(sources))]
    return problems + [f"recursion: {' -> '.join(cycle)}" for cycle in _cycles(texts.values())]


def _without_comments(text: str) -> str:
    """Blank out comments, literals and include lines; lines keep their numbers."""
    return _SILENT.sub(lambda found: "\n" * found.group().count("\n") or " ", text)


def _declared(text: str) -> set[str]:
    """Return names that a source declares: types, functions, parameters and variables."""
    return set(_DECLARED.findall(text)) | set(_VARIABLE.findall(text)) - _FORBIDDEN.keys()


def _names(file: str, text: str, known: set[str] | frozenset[str]) -> Iterable[str]:
    """Yield forbidden words, and unknown names that are called or start with a capital."""
    for number, line in enumerate(text.splitlines(), 1):
        tokens = _TOKEN.findall(line)
        for at, token in enumerate(tokens):
            if token in _FORBIDDEN:
                yield f"{file}:{number}: {token}: {_FORBIDDEN[token]}"
            elif token[0].isalpha() and token not in known:
                follows = tokens[at + 1] if at + 1 < len(tokens) else ""
                if token[0].isupper() or follows in {"(", "::"}:
                    yield f"{file}:{number}: {token}: not in {NAMES_FILE.name}, nor declared"
            elif _DOUBLE.fullmatch(token):
                yield f"{file}:{number}: {token}: no double on the device; write {token}f"


def _included(file: str, text: str, files: set[str]) -> Iterable[str]:
    """Yield includes of anything but AscendC's header and our own kernel headers."""
    allowed = {'"kernel_operator.h"', '"compat.h"', "<cstdint>", *(f'"{file}"' for file in files)}
    for number, line in enumerate(text.splitlines(), 1):
        found = _INCLUDES.match(line.strip())
        if found and re.sub(r'"\.\./op_host/', '"', found[1]) not in allowed:
            yield f"{file}:{number}: #include {found[1]}: only kernel_operator.h and own headers"


def _cycles(texts: Iterable[str]) -> Iterable[list[str]]:
    """Yield chains of functions that call themselves; functions of one name count as one."""
    calls: dict[str, set[str]] = {}
    for text in texts:
        for found in _FUNCTION.finditer(text):
            body = _body(text, found.end())
            calls.setdefault(found[1], set()).update(_CALL.findall(body))
    for start in sorted(calls):
        chain, seen = [(start, [start])], set()
        while chain:
            name, path = chain.pop()
            for called in sorted(calls.get(name, ())):
                if called == start:
                    yield [*path, start]
                    chain = []
                    break
                if called in calls and called not in seen:
                    seen.add(called)
                    chain.append((called, [*path, called]))


def _body(text: str, start: int) -> str:
    """Return the text from behind an opening brace to its closing one."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
    return text[start:]


def main(arguments: Sequence[str]) -> int:
    """Print the problems of files, or of all kernels; return 1 if there are any."""
    files = [Path(argument) for argument in arguments] or [
        file for file in sorted(ROOT.glob("*/op_kernel/*")) if file.suffix in {".h", ".cpp"}
    ]
    folders = sorted({file.parent for file in files})
    problems = []
    for folder in folders:
        own = [file for file in files if file.parent == folder]
        group = [*own, *folder.parent.glob("op_host/*_tiling.h")]
        texts = {file.name: file.read_text(encoding="utf-8") for file in group}
        problems += [f"{folder}/{problem}" for problem in problems_of(texts)]
    print("\n".join(problems) or f"{len(files)} kernel files: no problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
