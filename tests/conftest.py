# SPDX-License-Identifier: Apache-2.0
"""Options, fixtures and skip rules shared by all tests."""

import importlib.metadata
from pathlib import Path

import pytest
import torch

from treespark import device as devices

REPOSITORY = Path(__file__).parent.parent


def pytest_addoption(parser):
    """Let the golden-fixture tests run on further folders of the same layout."""
    # pytest itself lists fixtures by --fixtures; that stays available as --funcargs.
    parser.optparser.conflict_handler = "resolve"
    group = parser.getgroup("treespark")
    parser.optparser.conflict_handler = "error"
    group.addoption(
        "--fixtures",
        dest="fixtures_dir",
        default=str(Path(__file__).parent / "fixtures"),
        metavar="DIR",
        help="folder of golden fixtures; name the tests to run before it, as in `pytest tests "
        "--fixtures DIR`",
    )
    group.addoption(
        "--npu-venv",
        metavar="DIR",
        help="virtual environment with torch and torch_npu for tests marked fake_npu (default: one "
        "made in pytest's cache)",
    )


def pytest_collection_modifyitems(items):
    """Skip what this machine cannot run, with the reason the device layer gives."""
    reasons = {kind: devices.probe(kind).reason for kind in ("npu", "cuda")}
    reasons["multi"] = None if torch.distributed.is_available() else "torch has no distributed"
    for item in items:
        for marker, reason in reasons.items():
            if reason is not None and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_generate_tests(metafunc):
    """Run tests that ask for `device` once on each usable kind of device."""
    if "device" in metafunc.fixturenames:
        kinds = [torch.device(kind) for kind in devices.available_devices()]
        metafunc.parametrize("device", kinds, ids=str)


@pytest.fixture(scope="session")
def fixtures_dir(request) -> Path:
    """Folder of golden fixtures."""
    return Path(request.config.getoption("--fixtures"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def smollm2_dir(request) -> Path:
    """Hugging Face folder of SmolLM2-135M-Instruct, built once and kept in pytest's cache."""
    from treespark.target import fetch

    row = fetch.EMBEDDED_TARGETS["smollm2-135m"]
    try:
        importlib.metadata.distribution(row.distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{row.distribution}=={row.version} is not installed (bash tools/test.sh does)")
    return fetch.fetch("smollm2-135m", request.config.cache.mkdir("targets") / "smollm2-135m")
