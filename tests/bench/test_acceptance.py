# SPDX-License-Identifier: Apache-2.0
"""`bench acceptance`: its numbers are those of decoding, its errors those of so few prompts."""

import json
import random
import shutil

import pytest

from tests.bench.bench_world import text_target, write_drafter, write_prompts
from tests.serving_world import eagle3_drafter
from treespark import cli
from treespark.bench.acceptance import (
    acceptance_with_deviations,
    run_acceptance,
    standard_error,
)
from treespark.bench.acceptance_counts import Counts
from treespark.bench.metrics import acceptance_length
from treespark.bench.workload import load_prompts
from treespark.errors import UsageError
from treespark.serving.llm import LLM, SamplingParams
from treespark.tree.policy import TreePolicy


@pytest.fixture
def prompts(tmp_path):
    """A file without categories, and one with two."""
    plain, sorted_ = (write_prompts(tmp_path / f"{name}.jsonl") for name in ("plain", "sorted"))
    rows = [json.loads(line) for line in sorted_.read_text().splitlines()]
    categories = ("code", "math", "code")
    sorted_.write_text(
        "".join(
            json.dumps({**row, "category": category}) + "\n"
            for row, category in zip(rows, categories, strict=True)
        )
    )
    return [plain, sorted_]


@pytest.mark.parametrize("replay", [False, True])
def test_lengths_are_those_of_decoding_by_domain_and_in_all(tmp_path, capsys, prompts, replay):
    target = text_target()
    one = write_drafter(tmp_path / "one")
    copy = shutil.copytree(one, tmp_path / "copy")
    eagle = tmp_path / "eagle"
    eagle3_drafter(target).save_pretrained(eagle)
    options = {"max_tokens": 16, "batch_size": 2, "replay": replay, "as_json": True}
    run_acceptance(target.path, [one, copy, eagle], prompts, **options)
    found = json.loads(capsys.readouterr().out)
    assert found["replay"] is replay
    assert found["prompts"] == {"plain": 3, "code": 2, "math": 1, "all": 6}
    some = load_prompts(prompts, target)
    policies = {"chain": TreePolicy(5, 1, 5), "tree": TreePolicy(5, 3, 12)}
    for method, policy in policies.items():
        answers = LLM(target, one, policy).generate(
            [prompt.token_ids for prompt in some], SamplingParams(16)
        )
        records = [answer.metrics for answer in answers]
        of_one = found[method][str(one)]
        for domain, places in (("all", range(6)), ("code", (3, 5)), ("math", (4,))):
            real = acceptance_length([records[i] for i in places])
            assert of_one[domain]["acceptance"] == real
        assert of_one["math"]["error"] is None
        assert found[method][str(copy)] == of_one
        same = found[method][str(copy)]["all"]
        assert (same["difference"], same["difference_error"]) == (0.0, 0.0)
        assert found["drafters"][str(one)][method]["budget"] == policy.budget
    of_eagle = LLM(target, eagle, TreePolicy(5, 1, 5)).generate(
        [prompt.token_ids for prompt in some], SamplingParams(16)
    )
    real = acceptance_length([answer.metrics for answer in of_eagle])
    assert found["chain"][str(eagle)]["all"]["acceptance"] == real
    assert str(eagle) not in found["tree"]


def test_the_table_and_the_file_say_the_same(tmp_path, capsys, monkeypatch, prompts):
    one, out = write_drafter(tmp_path / "one"), tmp_path / "acceptance.json"
    arguments = ["bench", "acceptance", text_target().path, "--drafter", one, "--out", out]
    arguments += ["--prompts", prompts[1], "--max-tokens", 8, "--num-prompts", 2, "--budget", 6]
    monkeypatch.setattr("sys.argv", ["treespark", *map(str, arguments)])
    monkeypatch.setattr("logging.basicConfig", lambda **options: None)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    text, found = capsys.readouterr().out, json.loads(out.read_text())
    assert "tree of 6 nodes" in text
    assert found["prompts"] == {"code": 1, "math": 1, "all": 2}
    for method in ("chain", "tree"):
        assert f"{found[method][str(one)]['all']['acceptance']:.3f}" in text


def test_categories_and_folders_are_shown_as_they_are(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"category": "[/x] :100:", "prompt": "a"}\n')
    run_acceptance(text_target().path, [write_drafter(tmp_path / "[b]")], [path], max_tokens=4)
    shown = capsys.readouterr().out
    assert "[/x] :100:" in shown
    assert "/[b]" in shown.replace("\n", "").replace(" ", "")


def test_errors_are_as_large_as_other_draws_of_prompts_differ():
    draw = random.Random(0)

    def drawn():
        rounds = [draw.randint(5, 60) for _ in range(40)]
        return [Counts(sum(draw.randint(1, 5) for _ in range(n)), n) for n in rounds]

    lengths, errors = [], []
    for _ in range(400):
        length, deviations = acceptance_with_deviations(drawn())
        lengths.append(length)
        errors.append(standard_error(deviations))
    mean = sum(lengths) / len(lengths)
    spread = (sum((length - mean) ** 2 for length in lengths) / len(lengths)) ** 0.5
    assert mean == pytest.approx(3, abs=0.01)
    # 400 draws give a spread to within a tenth.
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.1)
    assert acceptance_with_deviations([Counts(0, 0)] * 2) == (0.0, [0.0, 0.0])


def test_what_cannot_be_decoded_is_refused_before_anything_is(tmp_path, monkeypatch, prompts):
    target, one = text_target().path, write_drafter(tmp_path / "one")
    monkeypatch.setattr(LLM, "generate", lambda *_: pytest.fail("decoded"))
    with pytest.raises(UsageError, match="--drafter: a folder is given twice"):
        run_acceptance(target, [one, one], prompts)
    with pytest.raises(UsageError, match="--drafter: a folder is given twice"):
        run_acceptance(target, [one, one / ".." / "one"], prompts)
    with pytest.raises(UsageError, match="a category or file is called all, as the sum is"):
        run_acceptance(target, [one], [write_prompts(tmp_path / "all.jsonl")])
    with pytest.raises(UsageError, match="exceed the target's context"):
        run_acceptance(target, [one], prompts, max_tokens=10_000)
    with pytest.raises(UsageError, match="--budget 5000"):
        run_acceptance(target, [one], prompts, budget=5000)
    with pytest.raises(UsageError, match="cannot be written: it is a folder"):
        run_acceptance(target, [one], prompts, out=tmp_path)
