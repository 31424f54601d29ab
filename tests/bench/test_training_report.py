# SPDX-License-Identifier: Apache-2.0
"""The page of a training run shows what its metrics say."""

import json
import xml.etree.ElementTree as ET

import pytest

from treespark.bench import training_report
from treespark.bench.training_report import write_training_report
from treespark.errors import UsageError


def metrics(folder, count=500):
    """Two phases; one step was skipped, and acceptance was measured twice."""
    lines = []
    for step in range(count):
        line = {"step": step, "loss": 9 - step / 100, "ce": 9 - step / 100, "lr": 1e-3,
                "grad_norm": 1.0, "skipped": step == 7, "step_s": 2.0}  # fmt: skip
        if step == 7:
            line["grad_norm"] = None
        if step >= count // 2:
            line |= {"l1": 1.0, "overlap": [0.5, 0.25]}
        lines.append(line)
        if (step + 1) % 250 == 0:
            lines.append({"step": step, "acceptance/chain": 1.5, "acceptance/tree8": 1.75})
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_page_holds_curves_tables_and_nothing_from_elsewhere(tmp_path):
    page = write_training_report(metrics(tmp_path / "a <run>"), tmp_path / "page.html")
    text = page.read_text()
    assert "a &lt;run&gt;" in text
    assert "500, last 499" in text
    assert "0.28 hours, 2.00 s each" in text
    assert "<td>skipped, gradient not finite</td><td>1</td>" in text
    assert "<tr><td>250</td><td>1.500</td><td>1.750</td></tr>" in text
    # Losses, overlap, acceptance, gradient norm, learning rate, seconds.
    figures = text.split("<svg")[1:]
    assert len(figures) == 6
    for figure in figures:
        ET.fromstring("<svg" + figure[: figure.index("</svg>")] + "</svg>")
    assert "src=" not in text
    assert "<script" not in text


def test_decoded_acceptance_has_a_table_of_its_own(tmp_path):
    run = metrics(tmp_path / "run", 20)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 19, "decode/acceptance": 2.25}\n')
    text = write_training_report(run, tmp_path / "page.html").read_text()
    assert "Acceptance length of decoding held-out prompts" in text
    assert "<tr><th>after step</th><th>acceptance</th></tr><tr><td>20</td><td>2.250</td>" in text


def test_long_runs_are_drawn_as_means_of_equal_parts(tmp_path):
    steps = [{"step": n, "loss": float(n % 2)} for n in range(1000)]
    x, y = training_report._curves(steps, ["loss", "ce"])["loss"]
    assert len(x) == 200
    assert x[:2] == [2.0, 7.0]
    assert set(y) == {0.4, 0.6}


def test_missing_runs_and_impossible_outputs_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"metrics\.jsonl: no step of a training run"):
        write_training_report(tmp_path, tmp_path / "page.html")
    run = metrics(tmp_path / "run", 20)
    with pytest.raises(UsageError, match=r"--out .*cannot be written"):
        write_training_report(run, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
