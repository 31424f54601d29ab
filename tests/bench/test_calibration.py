# SPDX-License-Identifier: Apache-2.0
"""`bench calibrate`: which edges it counts, and the constants it finds."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.bench.bench_world import text_target, write_drafter, write_prompts
from tests.serving_world import eagle3_drafter
from treespark import cli
from treespark.bench.calibration import (
    calibration_error,
    drafted_edges,
    edges_of,
    fit,
    fitted,
    probability,
    run_calibration,
)
from treespark.bench.workload import Prompt
from treespark.errors import UsageError
from treespark.serving.llm import load_drafter_for
from treespark.tree.packed import PackedTree
from treespark.tree.policy import TreePolicy


def tree_of(tokens, parents, scores):
    """One tree of these nodes, the anchor first, and a slot of padding."""
    size = len(tokens)
    return PackedTree(
        tokens=torch.tensor([[*tokens, 0]]),
        parents=torch.tensor([[*parents, -1]], dtype=torch.int32),
        depths=torch.zeros(1, size + 1, dtype=torch.int32),
        scores=torch.tensor([[*scores, -math.inf]]),
        valid=torch.tensor([[True] * size + [False]]),
        pool_index=torch.zeros(1, size + 1, dtype=torch.int64),
    )


#            anchor, 7 and 8 below it, 5 and 6 below 7, 9 below 8, 4 below 5
TREE = tree_of([3, 7, 8, 5, 6, 9, 4], [-1, 0, 0, 1, 1, 2, 3], [0, -1, -2, -1.5, -3, -2.5, -1.75])


@pytest.mark.parametrize(
    ("nodes", "tokens", "stops", "expected"),
    [
        ([0, 1], [7, 2], (), [(-1, True), (-2, False), (-0.5, False), (-2, False)]),
        ([0], [2], (), [(-1, False), (-2, False)]),
        # What the target wants behind a stop is nobody's.
        ([0, 1], [7, 2], (7,), [(-1, True), (-2, False)]),
        ([0, 1, 3], [7, 5, 2], (2,),
         [(-1, True), (-2, False), (-0.5, True), (-2, False), (-0.25, False)]),
    ],
)  # fmt: skip
def test_edges_below_accepted_nodes_are_counted_and_no_others(nodes, tokens, stops, expected):
    path = SimpleNamespace(nodes=nodes, tokens=tokens)
    assert edges_of(TREE, 0, path, stops) == expected


def test_every_accepted_token_is_one_accepted_edge(tmp_path):
    target, prompt = text_target(), [72, 101, 108]
    drafter = load_drafter_for(write_drafter(tmp_path / "one"), target)
    prompts = [Prompt("a", str(n), [*prompt, 40 + n]) for n in range(3)]
    logits, accepted, places = drafted_edges(target, drafter, TreePolicy(5, 3, 12), prompts, 2, 24)
    assert set(places) == {0, 1, 2}
    assert len(logits) == len(accepted) == len(places)
    assert np.isfinite(logits).all()
    again = drafted_edges(target, drafter, TreePolicy(5, 3, 12), prompts[1:], 1, 24)
    # Neither the batch nor the others change what was drafted for a prompt.
    assert accepted[places == 1].sum() == again[1][again[2] == 0].sum()
    assert np.allclose(np.sort(logits[places == 1]), np.sort(again[0][again[2] == 0]), atol=1e-4)


def test_the_constants_that_made_the_labels_are_found():
    rng = np.random.default_rng(5)
    logits = rng.normal(-1, 2, 60_000)
    accepted = rng.random(60_000) < probability(logits, (0.6, -0.4))
    alpha, beta = fit(logits, accepted)
    # Three standard errors of this many edges.
    assert alpha == pytest.approx(0.6, abs=0.03)
    assert beta == pytest.approx(-0.4, abs=0.05)
    result = fitted(logits, accepted, np.arange(60_000) // 100)
    assert result["errors"]["fitted"] < 0.01 < 0.05 < result["errors"]["plain"]
    assert result["alpha"] == alpha
    assert result["accepted_rate"] == accepted.mean()


def test_the_calibration_error_is_a_mean_over_equal_bins():
    chances = np.repeat([0.1, 0.5], 50)
    accepted = np.concatenate([np.arange(50) < 10, np.arange(50) < 25])
    # Bins of ten: gaps of .9 and four of .1, then .5, .5, 0, .5, .5.
    assert calibration_error(chances, accepted) == pytest.approx(0.33)
    # Fewer edges than bins: one a bin.
    assert calibration_error(np.full(4, 0.25), np.array([True] + [False] * 3)) == 0.375
    assert calibration_error(np.repeat([0.0, 1.0], 5), np.repeat([False, True], 5)) == 0
    assert calibration_error(np.repeat([1.0, 0.0], 5), np.repeat([False, True], 5)) == 1


def test_edges_that_do_not_tell_are_refused():
    logits = np.array([-1.0, 0.0, 1.0, 2.0])
    with pytest.raises(UsageError, match=r"^--prompts: no draft of 4 was accepted; give more"):
        fit(logits, np.zeros(4, dtype=bool))
    with pytest.raises(UsageError, match=r"^--prompts: every draft of 4 was accepted; give more"):
        fit(logits, np.ones(4, dtype=bool))
    with pytest.raises(UsageError, match=r"^--prompts: no draft of 0 was accepted"):
        fit(logits[:0], np.ones(0, dtype=bool))
    rng = np.random.default_rng(1)
    many = rng.normal(size=1000)
    with pytest.raises(UsageError, match=r"^--drafter: alpha -.*: drafts that it calls likelier"):
        fit(many, rng.random(1000) < probability(many, (-1.0, 0.0)))


def test_the_verb_prints_what_a_recipe_takes(tmp_path, capsys, monkeypatch):
    # A random drafter is never right: labels are given to it.
    monkeypatch.setattr(
        "treespark.bench.calibration.edges_of",
        lambda tree, row, path, stops: [(-0.5, True), (-2.0, False), (-0.5, False), (-2.0, True),
                                        (-0.1, True)],
    )  # fmt: skip
    one, prompts = write_drafter(tmp_path / "one"), write_prompts(tmp_path / "some.jsonl")
    out = tmp_path / "constants.json"
    arguments = ["bench", "calibrate", text_target().path, "--drafter", one, "--prompts", prompts]
    arguments += ["--max-tokens", 4, "--budget", 12, "--branching", 3, "--out", out]
    monkeypatch.setattr("sys.argv", ["treespark", *map(str, arguments)])
    monkeypatch.setattr("logging.basicConfig", lambda **options: None)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    found, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert f"alpha: {found['alpha']:.4f}\nbeta: {found['beta']:.4f}" in shown
    assert found["tree"] == {"depth": 5, "branching": 3, "budget": 12}
    assert found["num_edges"] > 0


def test_what_cannot_be_calibrated_is_refused(tmp_path):
    target, one = text_target(), write_drafter(tmp_path / "one")
    prompts = [write_prompts(tmp_path / "some.jsonl")]
    with pytest.raises(UsageError, match=r"^--prompts: one prompt; need two or more"):
        run_calibration(target.path, one, prompts, num_prompts=1)
    eagle = tmp_path / "eagle"
    eagle3_drafter(target).save_pretrained(eagle)
    with pytest.raises(UsageError, match="--branching 8: allowed: 1, a drafter with"):
        run_calibration(target.path, eagle, prompts)
    with pytest.raises(UsageError, match="--budget 2000: need an integer of at least 0"):
        run_calibration(target.path, one, prompts, budget=2000)
