# SPDX-License-Identifier: Apache-2.0
"""The world of torch_npu without a card, made once and kept in pytest's cache."""

import shutil
from pathlib import Path

import pytest

from tests.ops.card.npu_world import World


@pytest.fixture(scope="session")
def world(request):
    """See `npu_world.World`; `--npu-venv DIR` names an environment to use instead of its own."""
    return make_world(request.config, ".", "8.1.RC1")


@pytest.fixture(scope="session")
def newer_world(request):
    """The same with the library built as newer versions of CANN build it."""
    return make_world(request.config, "newer", "9.0.0")


def make_world(config, name, version):
    for tool in ("g++", "cmake", "make", "nm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on PATH: the library cannot be built")
    folder = Path(config.cache.mkdir("fake_npu"))
    venv = config.getoption("--npu-venv")
    return World(folder / name, Path(venv) if venv else folder / "venv", version)
