# SPDX-License-Identifier: Apache-2.0
"""What `report suite` writes: one page that needs nothing, and the numbers in other formats."""

import base64
import dataclasses
import hashlib
import html
import json
import os
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from tests.bench.suite_world import HOSTILE, METHODS, RunWriter, dataset, plausible_run, setting
from tests.bench.test_report_results import A, one_cell_run, timed_cell
from treespark.bench.report.page import json_block
from treespark.bench.report.study import read_studies
from treespark.bench.report.write import facts, notes, write_suite_report
from treespark.cli import main
from treespark.errors import UsageError

FIGURES = [
    *(f"figure-{number}" for number in range(2, 7)),
    "figure-profile",
    "figure-reasons",
]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a seeded run of all methods on all sets."""
    root = tmp_path_factory.mktemp("suite")
    run = plausible_run(root / "run", repeats=2, num_requests=1, num_traces=1)
    return write_suite_report([run], root / "out").parent


class Elements(HTMLParser):
    """Start tags of a page, and the texts of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.ids = [], [], []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        self._in_script = tag == "script"

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            self.scripts.append(data)


def test_all_formats_are_written(report):
    names = {str(path.relative_to(report)) for path in report.rglob("*") if path.is_file()}
    figures = {f"figures/{key}.{kind}" for key in FIGURES for kind in ("svg", "png")}
    assert names == {"index.html", "report.md", "report.tex", "report.json"} | figures
    for key in FIGURES:
        ET.parse(report / "figures" / f"{key}.svg")
        assert (report / "figures" / f"{key}.png").read_bytes().startswith(b"\x89PNG")
    text = (report / "report.md").read_text()
    for link in re.findall(r"\]\(([^)]*)\)", text):
        assert (report / link).exists(), link


def test_page_asks_for_nothing_and_runs_one_script(report):
    page = Elements((report / "index.html").read_text())
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        assert "src" not in attrs
        assert attrs.get("href", "#").startswith("#")
        assert attrs.get("xlink:href", "#").startswith("#")
        assert not [name for name in attrs if name.startswith("on")], attrs
    types = [attrs.get("type") for tag, attrs in page.tags if tag == "script"]
    assert types == ["application/json", None]
    (policy,) = [a["content"] for t, a in page.tags if a.get("http-equiv")]
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}';")
    assert "unsafe" not in policy.partition("style-src")[0]


def test_ids_of_the_page_are_unique_and_every_link_has_its_place(report):
    page = Elements((report / "index.html").read_text())
    assert sorted(page.ids) == sorted(set(page.ids))
    links = [a[k][1:] for _, a in page.tags for k in ("href", "xlink:href") if k in a]
    assert len(links) > 20
    assert set(links) <= set(page.ids)


def test_plots_of_the_page_take_its_colours(report):
    text = (report / "index.html").read_text()
    body = text[text.index("<body>") :]
    assert body.count("<svg") == len(FIGURES)
    assert "var(--s6)" in body
    # Fixed colours would be lost on a dark ground.
    assert re.findall(r"#(?:[0-9a-f]{6}|000)\b", body[: body.index("<script")]) == []


def test_same_records_give_the_same_files(tmp_path):
    run = one_cell_run(tmp_path / "run")
    outs = [write_suite_report([run], tmp_path / name).parent for name in ("out", "again")]
    for path in outs[0].rglob("*.*"):
        assert path.read_bytes() == (outs[1] / path.relative_to(outs[0])).read_bytes(), path


def test_json_has_unrounded_numbers_and_what_stands_behind_the_figures(report):
    (study,) = json.loads((report / "report.json").read_text())["studies"]
    keys = [table["key"] for table in study["tables"]]
    assert keys == ["table-1a", "table-1b", "table-2a", "table-2b", "table-3", "table-4",
                    "table-6a", "table-6b", "signs", "profile", "answers", "reasons"]  # fmt: skip
    cell = study["tables"][1]["rows"][0]["cells"][0]
    assert cell["text"] == f"{cell['value']['value']:.1f}" != str(cell["value"]["value"])
    assert cell["value"]["low"] < cell["value"]["value"] < cell["value"]["high"]
    rates = study["positions"]["general"]["treespark"]
    assert rates["over_rounds"] == [n / rates["num_rounds"] for n in rates["num_accepting"]]
    assert len(rates["over_proposing"]) == 7
    assert study["num_missing_cells"] == 0


def test_no_text_can_end_the_data_block():
    block = json_block({"texts": HOSTILE})
    assert not set(block) & set("<>&\u2028\u2029")
    assert json.loads(block) == {"texts": list(HOSTILE)}


def test_texts_of_records_stay_texts(tmp_path):
    evil = '<script>alert("1")</script>'
    own = dataset(evil)
    run = RunWriter(setting([own], ("dspark",), command=[evil], drafters={evil: {"path": evil}}))
    timed_cell(run, (own.name, "dspark", 1, 0), 10)
    page = write_suite_report([run.write(tmp_path / "run")], tmp_path / "out")
    elements = Elements(page.read_text())
    assert [tag for tag, _ in elements.tags].count("script") == 2
    assert "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;" in page.read_text()


def test_setting_names_folders_without_the_way_to_them(tmp_path):
    folder = one_cell_run(tmp_path, command=["/home/me/bin/treespark", "bench", "suite", "my.yaml"],
                          target={"path": "/home/me/models/Qwen3-4B", "vocab_size": 9})  # fmt: skip
    (study,) = read_studies([folder])
    shown = dict(facts(study))
    assert shown["command"] == "treespark bench suite my.yaml"
    assert shown["target"] == "path Qwen3-4B, vocab_size 9"
    assert shown["versions"] == "treespark 0.1.0, torch 2.13.0"


def test_json_has_no_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, recipe = str(tmp_path / "models" / "Qwen3-4B"), {"out": "/elsewhere/run", "seed": 1}
    own = dataclasses.replace(A, source=str(tmp_path / "sets" / "a.jsonl"))
    command = ["treespark", "bench", "suite", f"--out={tmp_path}/run", "--data", str(tmp_path)]
    run = RunWriter(
        setting([own], ["dspark"], target={"path": path}, recipe=recipe, command=command)
    )
    timed_cell(run, ("a", "dspark", 1, 0), 10)
    folder = run.write(tmp_path / "run")
    write_suite_report([folder], tmp_path / "out")
    text = (tmp_path / "out" / "report.json").read_text()
    (study,) = json.loads(text)["studies"]
    assert study["runs"] == ["run"]
    assert study["setting"]["target"]["path"] == "models/Qwen3-4B"
    assert study["setting"]["command"][3:] == ["--out=run", "--data", "."]
    assert study["setting"]["recipe"] == {"out": os.path.relpath("/elsewhere/run"), "seed": 1}
    for path in (tmp_path / "out").rglob("*.*"):
        assert str(tmp_path).encode() not in path.read_bytes(), path


def test_figures_of_the_report_before_are_replaced_and_no_other_file(tmp_path):
    out = tmp_path / "out"
    write_suite_report([one_cell_run(tmp_path / "1")], out)
    for name in ("mine.svg", "gone.svg", "gone.png"):
        (out / "figures" / name).touch()
    kept = json.loads((out / "report.json").read_text())
    kept["figures"] += ["gone", "../outside", 3]
    (out / "report.json").write_text(json.dumps(kept))
    (out / "outside.svg").touch()
    run = RunWriter(setting([A], ("dspark",)))
    timed_cell(run, ("a", "dspark", 1, 0), 10)
    write_suite_report([run.write(tmp_path / "2")], out)
    left = {path.name for path in (out / "figures").iterdir()}
    listed = json.loads((out / "report.json").read_text())["figures"]
    assert left == {f"{key}.{suffix}" for key in listed for suffix in ("svg", "png")} | {"mine.svg"}
    assert (out / "outside.svg").exists()


def test_two_targets_have_their_own_tables_on_one_page(tmp_path):
    target = {"path": "models/Qwen3-8B", "fingerprint": "e" * 64}
    folders = [one_cell_run(tmp_path / "1"), one_cell_run(tmp_path / "2", target=target)]
    page = write_suite_report(folders, tmp_path / "out").read_text()
    assert '<h2 id="smollm2-135m-instruct-results">' in page
    assert '<h2 id="qwen3-8b-results">' in page
    assert "Table 1a. Acceptance length, general sets, one request at a time (Qwen3-8B)" in page
    assert "No request of this run was traced." in page


def test_unfinished_run_says_so(tmp_path):
    run = RunWriter(setting([A], ("dspark", "treespark")))
    timed_cell(run, ("a", "dspark", 1, 0), 10)
    (study,) = read_studies([run.write(tmp_path)])
    assert notes(study)[0].startswith("The run is not finished: 1 cells are missing.")


def test_sets_say_which_machine_they_were_measured_on(tmp_path):
    versions = {"processor": "faster", "packages": {"torch": "2.13.0"}}
    folders = [one_cell_run(tmp_path / "1"), one_cell_run(tmp_path / "2", "b", versions=versions)]
    (study,) = read_studies(folders)
    assert any(note.startswith("The sets were measured on 2 machines") for note in notes(study))
    shown = dict(facts(study))
    assert shown["machine 1"] == "A: treespark 0.1.0, torch 2.13.0"
    assert shown["machine 2"] == "B: processor faster, torch 2.13.0"
    (alone,) = read_studies(folders[:1])
    assert not any("machines" in note for note in notes(alone))


def test_nothing_is_written_where_something_is_wrong(tmp_path):
    good = one_cell_run(tmp_path / "run")
    with pytest.raises(UsageError, match="absent"):
        write_suite_report([good, tmp_path / "absent"], tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--out .*file: not a folder"):
        write_suite_report([good], tmp_path / "file")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["index.html", "report.md", "report.tex", "report.json"])
def test_files_that_are_no_report_of_ours_are_not_replaced(tmp_path, name):
    good, out = one_cell_run(tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine")
    with pytest.raises(UsageError, match=rf"--out .*out: its {name} is not of a report of ours"):
        write_suite_report([good], out)
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [(name, "mine")]
    (out / name).unlink()
    # Beside other files, and again, also where it was interrupted.
    (out / "notes.txt").write_text("mine")
    write_suite_report([good], out).unlink()
    assert write_suite_report([good], out).exists()
    assert (out / "notes.txt").read_text() == "mine"


def test_a_folder_in_place_of_a_file_is_named_before_anything_is_written(tmp_path):
    good, out = one_cell_run(tmp_path / "run"), tmp_path / "out"
    (out / "index.html").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"--out .*index\.html: cannot be written: it is a folder"):
        write_suite_report([good], out)
    assert [path.name for path in out.iterdir()] == ["index.html"]


def test_a_run_that_is_given_twice_is_named(tmp_path):
    folder = one_cell_run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"^RUN .*: one folder is given twice$"):
        write_suite_report([folder, folder / ".." / "run"], tmp_path / "out")


def test_dollars_and_markup_of_titles_are_shown_as_they_are(tmp_path):
    evil = r"$\frac$ *<b>* $x_1$"
    methods = [dataclasses.replace(METHODS["dspark"], title=evil), METHODS["treespark"]]
    own = dataclasses.replace(setting([A], ()), methods=methods, command=[])
    run = RunWriter(own)
    for method in ("dspark", "treespark"):
        timed_cell(run, ("a", method, 1, 0), 10)
    page = write_suite_report([run.write(tmp_path / "run")], tmp_path / "out")
    figures = "".join(path.read_text() for path in (page.parent / "figures").glob("*.svg"))
    assert html.escape(evil, quote=False) in figures
    text = (page.parent / "report.md").read_text()
    assert r"- method $\\frac$ \*\<b\>\* $x\_1$: chain" in text


def call(monkeypatch, *args):
    monkeypatch.setattr("sys.argv", ["treespark", "report", "suite", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_verb_writes_the_page_and_refuses_a_wrong_folder(tmp_path, monkeypatch, capsys):
    run, out = one_cell_run(tmp_path / "run"), tmp_path / "out"
    assert call(monkeypatch, run, "--out", out) == 0
    assert capsys.readouterr().out.strip() == str(out / "index.html")
    assert call(monkeypatch, tmp_path, "--out", tmp_path / "other") == 2
    assert "suite.json" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
