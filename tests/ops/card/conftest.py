# SPDX-License-Identifier: Apache-2.0
"""The world of torch_npu without a card, made once and kept in pytest's cache."""

import shutil
from pathlib import Path

import pytest

from tests.ops.card.npu_world import World


@pytest.fixture(scope="session")
def world(request):
    """See `npu_world.World`; `--npu-venv DIR` names an environment to use instead of its own."""
    for tool in ("g++", "cmake", "make", "nm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on PATH: the library cannot be built")
    folder = Path(request.config.cache.mkdir("fake_npu"))
    venv = request.config.getoption("--npu-venv")
    return World(folder, Path(venv) if venv else folder / "venv")
