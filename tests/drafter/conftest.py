# SPDX-License-Identifier: Apache-2.0
"""Drafter folders that tests may damage."""

from pathlib import Path

import pytest

from tests.drafter.helpers import tiny_drafter


@pytest.fixture
def own(tmp_path: Path) -> Path:
    tiny_drafter().save_pretrained(tmp_path / "own")
    return tmp_path / "own"


@pytest.fixture
def deepspec(tmp_path: Path) -> Path:
    tiny_drafter().export_deepspec(tmp_path / "deepspec")
    return tmp_path / "deepspec"
