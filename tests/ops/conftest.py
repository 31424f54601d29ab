# SPDX-License-Identifier: Apache-2.0
"""Operator tests run with poisoned memory: what nobody wrote is NaN, or a huge integer."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Fill torch.empty and its relatives, so that a result left unwritten shows."""
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(was_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = was_filling
