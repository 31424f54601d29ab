# SPDX-License-Identifier: Apache-2.0
"""Tiny random targets, each as ours and as transformers' own model with its own attention."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from treespark.target.model import TargetModel

TAPS = [0, 2]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def _tiny_models() -> Any:
    """tools/ is no package: load the file."""
    path = Path(__file__).parents[2] / "tools" / "make_tiny_models.py"
    spec = importlib.util.spec_from_file_location("make_tiny_models", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Pair:
    """The same weights twice."""

    ours: TargetModel
    reference: torch.nn.Module
    folder: Path

    @torch.no_grad()
    def full(self, ids: list[int]) -> Any:
        """transformers' forward over one sequence, without a cache."""
        return self.reference(torch.tensor([ids]), output_hidden_states=True)

    def features(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), taps * H] from hidden_states, which count the embedding as number 0."""
        hidden = self.full(ids).hidden_states
        return torch.cat([hidden[i + 1][0] for i in TAPS], -1)

    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.full(ids).logits[0]


@pytest.fixture(scope="session")
def tiny_models():
    return _tiny_models()


@pytest.fixture(scope="session", params=FAMILIES)
def pair(request, tiny_models, tmp_path_factory) -> Pair:
    return make_pair(tiny_models, request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def qwen3(tiny_models, tmp_path_factory) -> Pair:
    return make_pair(tiny_models, "qwen3", tmp_path_factory.mktemp("one"))


def make_pair(tiny_models, family: str, folder: Path) -> Pair:
    tiny_models.make_tiny_model(family, folder, seed=3)
    ours = TargetModel.from_pretrained(folder, device="cpu", dtype="fp32", target_layer_ids=TAPS)
    return Pair(ours, tiny_models.tiny_model(family, seed=3), folder)


@pytest.fixture
def poisoned():
    """A cache whose rows are NaN until they are written: one that is read too early shows."""

    def new_cache(target: TargetModel, num_slots: int, max_len: int):
        cache = target.new_cache(num_slots, max_len)
        for rows in (*cache.keys, *cache.values):
            rows.fill_(float("nan"))
        return cache

    return new_cache


@pytest.fixture
def random_ids():
    def draw(count: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (count,), generator=generator).tolist()

    return draw


@pytest.fixture
def close():
    """Compare float32 results: equal to 1e-5 of the largest value.

    Both sides take the same products in another order; sums of values of that size round so.
    """

    def check(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
        assert actual.shape == expected.shape
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=tolerance * expected.abs().max().item()
        )

    return check
