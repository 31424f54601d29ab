# SPDX-License-Identifier: Apache-2.0
"""Seeded mistakes in the kernels: the emulator refuses each, or the results are wrong."""

import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from npu_ops.emulator import EmulatorError, operators
from tests.ops.emulator import tree_attention_world as attention
from tests.ops.emulator.markov_topk_world import expected, operands
from tests.ops.emulator.pack_tree_world import as_lists, random_trees, written_out

FOLDER = Path(__file__).parent / "mutants"


def mutants():
    """Yield (operator, file, name, old text, new text)."""
    for path in sorted(FOLDER.glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                yield path.stem, *(part.strip() for part in line.split(" |"))


MUTANTS = list(mutants())


def pack_tree_is_right(library):
    """Calls that reach every level of sorting, with ties, NaN and absent columns."""
    sizes = [(6, 100, 32, 7), (2, 60, 127, 3), (2, 300, 64, 5), (2, 1000, 127, 4)]
    for seed, (requests, candidates, n, depth) in enumerate(sizes):
        scores, parents, depths = random_trees(seed, requests, candidates, depth, ties=True)
        counts = torch.full((requests,), candidates, dtype=torch.int32)
        counts[-1] = candidates // 2 + 1
        scores[-1, candidates // 2 + 1 :] = math.inf
        scores[0, 3] = math.nan
        # Children above their parents, so that the smallest value on the path decides.
        bias = torch.linspace(0, 3, depth + 1)
        arguments = (scores, parents, depths, counts, bias, n)
        results = operators.pack_tree(*arguments, blocks=3, library=library).results
        if as_lists(results) != written_out(*arguments):
            return False
    return True


def markov_topk_is_right(library):
    """Calls with one row and many, whole and part tiles, several slices of a tile, only ties, and
    an infinite logit."""
    sizes = [(6, 2, 1300, 32, 8, 2), (1, 1, 40, 16, 4, 1), (9, 3, 1100, 256, 32, 5)]
    sizes.append((4, 1, 900, 16, 32, 2))
    for seed, (rows, base_rows, vocab, rank, k, blocks) in enumerate(sizes):
        arguments = operands(seed, rows, base_rows, vocab, rank)
        if seed == len(sizes) - 1:
            arguments[0].zero_()
            arguments[2].zero_()
            arguments[0][0, 3] = math.inf
        results = operators.markov_topk(*arguments, k, blocks=blocks, library=library).results
        values, indices, lse = expected(*arguments, k)
        same = torch.equal(results[0], values) and torch.equal(results[1], indices)
        if not same or not torch.allclose(results[2], lse, rtol=1e-5, atol=1e-5):
            return False
    return True


def tree_attention_is_right(library):
    """Calls with one row and many, part tiles, splits, blocks of the cache, padded rows."""
    calls = [
        (attention.operands(0, [200, 130], 9, 4, 2, 64), 0, 3),
        (attention.operands(1, [60], 1, 1, 1, 64), 0, 1),
        (attention.operands(2, [1100], 40, 4, 1, 64), 48, 2),
        (attention.operands(3, [50, 20], 16, 4, 2, 64, valid=[7, 0]), 0, 2),
    ]
    for arguments, block_size, blocks in calls:
        query, key, value, seq_lens, mask = arguments
        expected_out, expected_lse = attention.expected(*arguments)
        table = None
        if block_size:
            (key, table), (value, _) = (attention.paged(c, block_size) for c in (key, value))
        out, lse = operators.tree_attention(
            *(query, key, value, seq_lens, attention.words_of(mask), table, 0.0, block_size),
            blocks=blocks,
            library=library,
        ).results
        near = {"rtol": 3e-2, "atol": 3e-2}
        if not torch.allclose(out.float(), expected_out, **near):
            return False
        if not torch.allclose(lse, expected_lse, rtol=1e-4, atol=1e-4):
            return False
    return True


BUILD = {
    "pack_tree": operators.pack_tree_library,
    "markov_topk": operators.markov_topk_library,
    "tree_attention": operators.tree_attention_library,
}
IS_RIGHT = {
    "pack_tree": pack_tree_is_right,
    "markov_topk": markov_topk_is_right,
    "tree_attention": tree_attention_is_right,
}


def outcome(kernel, library):
    try:
        return "right" if IS_RIGHT[kernel](library) else "wrong"
    except EmulatorError as refused:
        return str(refused)


@pytest.mark.parametrize("kernel", BUILD)
def test_kernel_itself_is_right(kernel):
    assert outcome(kernel, BUILD[kernel]()) == "right"


def test_there_are_enough_mutants():
    assert len({mutant[:3] for mutant in MUTANTS}) == len(MUTANTS) >= 30


@pytest.fixture(scope="module")
def passing_cache(tmp_path_factory):
    """A cache of compiled kernels that goes away with the mutants in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("passing_cache")
@pytest.mark.parametrize(
    ("kernel", "file", "name", "old", "new"), MUTANTS, ids=[f"{m[0]}: {m[2]}" for m in MUTANTS]
)
def test_mutant_is_caught(tmp_path, kernel, file, name, old, new):
    folder = tmp_path / kernel
    shutil.copytree(operators.ROOT / kernel, folder)
    path = folder / "op_kernel" / file
    place = re.compile(r"\s+".join(map(re.escape, old.split())))
    mutant, found = place.subn(lambda _: new, path.read_text(encoding="utf-8"), count=1)
    assert found == 1
    path.write_text(mutant, encoding="utf-8")
    # The emulator's message names the kernel.
    assert outcome(kernel, BUILD[kernel](folder)).startswith(("wrong", kernel))
