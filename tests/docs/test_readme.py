# SPDX-License-Identifier: Apache-2.0
"""The documents' commands: every verb, option, script and file in them exists."""

import ast
import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from treespark.cli import app

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "recipes" / "README.md",
    ROOT / "docs" / "serving.md",
    ROOT / "docs" / "drafters.md",
    ROOT / "docs" / "benchmarks.md",
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Options of pytest that the documents pass through tools/test.sh.
PYTEST_OPTIONS = {"-m", "-k"}
# The reader's own files.
USERS_FILE = re.compile(r"my-[\w-]+\.jsonl")


def blocks(path, language):
    """Contents of the fenced blocks of a language."""
    return [text for name, text in FENCED.findall(path.read_text("utf-8")) if name == language]


def commands(text):
    """Argument lists of a block of shell lines, comments and continuations resolved."""
    joined = text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


COMMANDS = [
    pytest.param(words, id=shlex.join(words))
    for path in DOCUMENTS
    for text in blocks(path, "bash")
    for words in commands(text)
]


def script_help(script):
    return subprocess.run(
        ["bash", str(ROOT / script), "--help"], capture_output=True, text=True, check=True
    ).stdout


def check_verb(args):
    """Parse a command as `treespark` would, without running it."""
    group = typer.main.get_command(app)
    assert args[0] in group.commands, f"no verb {args[0]}"
    if hasattr(group.commands[args[0]], "commands"):
        group, args = group.commands[args[0]], args[1:]
        assert set(args[:1]) & group.commands.keys(), f"no verb {args[:1]}"
    try:
        group.commands[args[0]].make_context(args[0], list(args[1:]))
    # Typer carries its own copy of click, so the class has no stable name.
    except Exception as problem:
        raise AssertionError(f"{args}: {problem}") from None


def check_script(script, args):
    """A script's own options are in its help; what it passes on exists too."""
    assert (ROOT / script).is_file(), f"no file {script}"
    text, rest = script_help(script), list(args)
    passed_on = []
    while rest:
        word = rest.pop(0)
        if re.search(rf"^  {re.escape(word)} ", text, re.MULTILINE):
            # `--option NAME` in the help takes a value.
            if re.search(rf"^  {re.escape(word)} [A-Z]", text, re.MULTILINE):
                rest.pop(0)
        elif script == "tools/test.sh" and word in PYTEST_OPTIONS:
            rest.pop(0)
        else:
            passed_on.append(word)
    if script == "launch/quickstart.sh":
        check_verb(["quickstart", *passed_on])
    elif script == "launch/train_910b.sh":
        check_verb(["train", *passed_on])
    elif script == "launch/serve_single.sh":
        check_verb(["serve", *passed_on])
    elif script == "launch/serve_workers.sh":
        check_verb(["workers", *passed_on])
    else:
        assert [word for word in passed_on if not (ROOT / word).exists()] == []


def check_tool(script, args):
    """A Python tool exists and its source defines the options."""
    source = (ROOT / script).read_text("utf-8")
    for word in args:
        if word.startswith("--"):
            assert f'"{word}"' in source, f"{script} has no {word}"


def check(words):
    if words[0] == "bash":
        check_script(words[1], words[2:])
    elif words[0] == "treespark":
        check_verb(words[1:])
    elif words[0] == "python":
        check_tool(words[1], words[2:])
    else:
        # made by the set-up scripts
        assert words == ["source", ".venv/bin/activate"]


@pytest.mark.parametrize("words", COMMANDS)
def test_command_names_existing_verbs_options_and_scripts(words):
    check(words)


@pytest.mark.parametrize(
    "line",
    [
        "treespark serve runs/smollm2-135m --epochs 3",
        "treespark train recipes/smollm2-135m-treespark.yaml --epochs 3",
        "treespark fetch smollm2-135m",
        "treespark prompts my-prompts.jsonl --out runs/prompts.jsonl",
        "treespark prompts build",
        "bash launch/train.sh",
        "bash launch/quickstart.sh --weel-index https://example.org",
        "bash tools/test.sh tests/absent",
        "python tools/check_margins.py runs/smollm2-135m --tolerance 1",
        "rm -r runs",
    ],
)
def test_wrong_command_is_noticed(line):
    with pytest.raises((AssertionError, OSError)):
        check(shlex.split(line))


def recipe_output(words):
    """Folder that a `train` command writes, by its recipe."""
    path = ROOT / words[2]
    out = yaml.safe_load(path.read_text("utf-8"))["output"]["dir"]
    return str((path.parent / out).resolve().relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_in_a_command_exists_or_was_made_by_an_earlier_one(path):
    made = set()
    for words in (words for text in blocks(path, "bash") for words in commands(text)):
        # What `--set` names is the recipe's business.
        outs = {words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--out", "--set")}
        for word in words[1:]:
            is_path = "/" in word and not word.startswith(("http", ".venv/"))
            if not is_path or word in outs or USERS_FILE.fullmatch(word):
                continue
            earlier = any(word == out or word.startswith(f"{out}/") for out in made)
            assert earlier or (not word.startswith("runs/") and (ROOT / word).exists()), word
        made |= outs
        if words[:2] == ["treespark", "train"]:
            made.add(recipe_output(words))
        if words[1].startswith("tools/make_tiny_"):
            made.add(words[2])


def test_set_up_is_exactly_two_commands():
    text = (ROOT / "README.md").read_text("utf-8")
    section = text.partition("\n## Set up\n")[2]
    (first, *_) = [body for name, body in FENCED.findall(section) if name == "bash"]
    assert [words[:2] for words in commands(first)] == [
        ["bash", "launch/quickstart.sh"],
        ["bash", "tools/test.sh"],
    ]
    assert [len(words) for words in commands(first)] == [2, 2]


def tree_paths(text):
    """Paths of an annotated file tree: the first column by indentation, and names in the notes."""
    folders = []
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, note = line.strip().partition("  ")
        folders = [*folders[:depth], name]
        yield "".join(part for part in folders if part.endswith("/") or part == name)
        parent = "".join(part for part in folders[:depth] if part.endswith("/"))
        for other in re.findall(r"[\w/]+\.(?:py|sh|md)\b", note):
            yield other if "/" in other else parent + other


def test_every_file_of_the_annotated_tree_exists():
    section = (ROOT / "README.md").read_text("utf-8").partition("\n## Files\n")[2]
    listed = list(tree_paths(FENCED.search(section)[2]))
    assert len(listed) > 40
    assert [name for name in listed if not (ROOT / name).exists()] == []


def test_every_room_of_the_package_is_in_the_annotated_tree():
    section = (ROOT / "README.md").read_text("utf-8").partition("\n## Files\n")[2]
    listed = set(tree_paths(FENCED.search(section)[2]))
    rooms = {f"treespark/{p.parent.name}/" for p in (ROOT / "treespark").glob("*/__init__.py")}
    assert rooms - listed == set()


def test_files_named_in_the_text_exist():
    for path in DOCUMENTS:
        text = FENCED.sub("", path.read_text("utf-8"))
        for name in re.findall(r"`([\w/.-]+\.(?:py|md|sh|yaml))`", text):
            rooms = [ROOT / "treespark" / room / name for room in ("training", "serving")]
            places = [ROOT / name, path.parent / name, *rooms]
            assert any(place.exists() for place in places), f"{path.name}: {name}"


def test_python_block_imports_public_names():
    for text in blocks(ROOT / "README.md", "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []


def test_recipes_page_lists_every_recipe_and_prompt_file():
    page = (ROOT / "recipes" / "README.md").read_text("utf-8")
    for path in (ROOT / "recipes" / "bench").glob("*.yaml"):
        assert path.name in page, f"{path.name} is missing from recipes/README.md"
    for path in (ROOT / "recipes" / "ablations").glob("*.yaml"):
        assert f"`{path.stem.split('-', 2)[2]}`" in page
    for path in [*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "recipes" / "prompts").iterdir()]:
        name = path.name if path.suffix == ".yaml" else path.stem
        assert f"`{name}`" in page
