# SPDX-License-Identifier: Apache-2.0
"""The lint of kernel sources: our kernels pass, and what the device's compiler refuses is found."""

import re
from pathlib import Path

import pytest

from npu_ops.emulator.lint import INCLUDE, NAMES_FILE, main, problems_of, words_of

KERNEL = """
// std:: and new are fine in a comment
#include "kernel_operator.h"
using namespace AscendC;
struct Tiling { int32_t rows; float scale; };
class Kernel {
 public:
  __aicore__ inline void Process(const Tiling& tiling) {
    LocalTensor<float> x = buffer.Get<float>();
    Muls(x, x, 2.0f * tiling.scale, tiling.rows);
    Finish(x);
  }
 private:
  __aicore__ inline void Finish(const LocalTensor<float>& x) { Adds(x, x, 1e-3f, 8); }
  TBuf<TPosition::VECCALC> buffer;
};
"""


def test_our_kernels_pass(capsys):
    assert main([]) == 0, capsys.readouterr().out


def test_plain_kernel_passes():
    assert problems_of({"kernel.h": KERNEL}) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("float a = std::exp(1.0f);", "std:: does not exist"),
        ("float* a = new float[3];", "no heap"),
        ("double a = 1;", "no double on the device; use float"),
        ("float a = 1.5;", "write 1.5f"),
        ("float a = 1e-3;", "write 1e-3f"),
        ('printf("x");', "no output"),
        ("try { }", "no exceptions"),
        ("SoftmaxFlashV2(x, y);", "SoftmaxFlashV2: not in ascendc_names.txt"),
        ("AscendC::Nonsense z;", "Nonsense: not in"),
        ("expf(2.0f);", "expf: not in"),
        ("emu::fail();", "a name of the emulator"),
    ],
)
def test_what_the_device_refuses_is_found(line, problem):
    text = KERNEL.replace("    Finish(x);", f"    {line}")
    found = problems_of({"kernel.h": text})
    assert any(problem in one and one.startswith("kernel.h:11: ") for one in found), found


def test_recursion_is_found_also_through_others():
    text = KERNEL.replace("Adds(x, x, 1e-3f, 8);", "Process(Tiling());")
    assert "recursion: Finish -> Process -> Finish" in problems_of({"kernel.h": text})


@pytest.mark.parametrize("include", ["<vector>", '"emulator/machine.h"', '"../other.h"'])
def test_foreign_includes_are_found(include):
    found = problems_of({"kernel.h": f"#include {include}\n{KERNEL}"})
    assert found == [f"kernel.h:1: #include {include}: only kernel_operator.h and own headers"]


def test_kernel_files_see_each_others_names():
    files = {"kernel.h": KERNEL, "kernel.cpp": '#include "kernel.h"\nvoid entry() { Kernel k; }\n'}
    assert problems_of(files) == []


def test_every_name_of_the_list_is_in_the_headers():
    text = "".join(file.read_text(encoding="utf-8") for file in INCLUDE.rglob("*.h"))
    names = set(re.findall(r"\w+", text))
    assert words_of(NAMES_FILE) - names == set()
    assert Path(NAMES_FILE).read_text(encoding="utf-8").isascii()
