# SPDX-License-Identifier: Apache-2.0
"""The tiny target of the data tests."""

from pathlib import Path

import pytest

from tests.data.tiny import make_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    """Folder of a tiny random target with a tokenizer."""
    return make_target(tmp_path_factory.mktemp("target"))
