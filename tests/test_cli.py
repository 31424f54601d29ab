# SPDX-License-Identifier: Apache-2.0
"""The command line: lazy rooms, exit codes, one-line mistakes, and the calls the verbs make."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import treespark
from treespark import cli
from treespark.errors import UsageError

HEAVY = ("torch", "transformers", "numpy", "yaml")


def run_process(*args, **options):
    command = [sys.executable, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command in this process; returns exit code, stdout and stderr."""
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["treespark", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out = capsys.readouterr()
        return stopped.value.code, out.out, out.err

    return run


@pytest.fixture
def room(monkeypatch):
    """Put a stand-in for module `name` in place whose `function` records its call."""

    def room(name, function, result=None):
        calls = []

        def stand_in(*args, **options):
            calls.append((args, options))
            if isinstance(result, BaseException):
                raise result
            return result

        module = types.ModuleType(name)
        setattr(module, function, stand_in)
        monkeypatch.setitem(sys.modules, name, module)
        return calls

    return room


def name_of(command):
    return command.name or command.callback.__name__


def test_help_of_every_verb_loads_no_heavy_package():
    groups = cli.app.registered_groups
    verbs = [[name_of(command)] for command in cli.app.registered_commands]
    verbs += [[group.name] for group in groups]
    verbs += [
        [group.name, name_of(command)]
        for group in groups
        for command in group.typer_instance.registered_commands
    ]
    code = (
        "import sys\nfrom treespark import cli\n"
        f"for verb in {[[], *verbs]!r}:\n"
        "    sys.argv = ['treespark', *verb, '--help']\n"
        "    try: cli.main()\n"
        "    except SystemExit as stop: assert stop.code == 0\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    result = run_process("-c", code)
    assert result.returncode == 0, result.stderr
    assert all(f" {verb[-1]} " in result.stdout for verb in verbs)


def test_help_answers_within_a_third_of_a_second():
    def cpu_seconds():
        before = os.times()
        assert run_process("-m", "treespark", "--help").returncode == 0
        after = os.times()
        return (
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )

    # Processor time, the best of three: a busy machine must not fail this.
    assert min(cpu_seconds() for _ in range(3)) < 0.3


def test_version_is_the_package_version(run):
    assert run("version") == (0, f"{treespark.__version__}\n", "")


def test_env_as_json_names_versions_device_and_reasons(run):
    code, out, _ = run("env", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["treespark"] == treespark.__version__
    assert facts["packages"]["torch"]
    assert [row["name"] for row in facts["device"]["candidates"]] == ["npu", "cuda", "cpu"]
    assert all(row["usable"] != bool(row["reason"]) for row in facts["device"]["candidates"])


def test_env_as_text_says_the_same(run):
    code, out, _ = run("env")
    assert code == 0
    assert treespark.__version__ in out
    assert "torch_npu" in out


def test_usage_error_is_one_line_and_exit_code_2(run, room):
    room("treespark.target.fetch", "fetch", UsageError("target 'x': unknown,\n  allowed: y"))
    code, out, err = run("fetch", "x", "--out", "folder")
    assert (code, out, err) == (2, "", "error: target 'x': unknown, allowed: y\n")


def test_mistake_in_a_recipe_is_one_line_and_exit_code_2(run, tmp_path):
    code, out, err = run("train", tmp_path / "none.yaml")
    assert (code, out) == (2, "")
    assert err == f"error: {tmp_path}/none.yaml: No such file or directory\n"


def test_other_errors_keep_their_traceback_and_exit_code_1(tmp_path):
    code = (
        "import sys, types\nfrom treespark import cli\n"
        "module = types.ModuleType('treespark.target.fetch')\n"
        "def fetch(*args): raise RuntimeError('disk on fire')\n"
        "module.fetch = fetch\nsys.modules[module.__name__] = module\n"
        "sys.argv = ['treespark', 'fetch', 'x', '--out', 'y']\ncli.main()\n"
    )
    result = run_process("-c", code)
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith("RuntimeError: disk on fire\n")


@pytest.mark.parametrize("args", [["version"], ["--help"], ["serve", "--help"]])
def test_an_output_that_cannot_be_written_is_one_line(args):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "treespark", *args],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=120,
        )  # fmt: skip
    assert result.stderr == "error: standard output: No space left on device\n"
    assert result.returncode == 1


def test_nothing_is_said_of_a_reader_that_left():
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, "-m", "treespark", "version"],
        stdout=write, stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    os.close(write)
    assert (result.returncode, result.stderr) == (1, "")


def test_a_full_disk_elsewhere_keeps_its_traceback(run, room):
    room("treespark.target.fetch", "fetch", OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        run("fetch", "x", "--out", "y")


def test_interrupt_is_exit_code_130(run, room):
    room("treespark.target.fetch", "fetch", KeyboardInterrupt())
    assert run("fetch", "x", "--out", "y")[0] == 130


def test_interrupt_signal_ends_the_process_with_130(tmp_path):
    code = (
        "import signal, sys, time, types\nfrom treespark import cli\n"
        # A shell's background jobs ignore it, and so would this one if the tests run in one.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "module = types.ModuleType('treespark.target.fetch')\n"
        "def fetch(*args): print('ready', flush=True); time.sleep(60)\n"
        "module.fetch = fetch\nsys.modules[module.__name__] = module\n"
        "sys.argv = ['treespark', 'fetch', 'x', '--out', 'y']\ncli.main()\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("env", "--jsn"), ["--jsn", " env --help"]),
        (("nonsense",), ["nonsense", "--help"]),
        (("fetch",), ["NAME", " fetch --help"]),
        (("version", "extra"), ["extra", " version --help"]),
        (("generate", "t", "--max-tokens", 0), ["--max-tokens 0: ", "1", " generate --help"]),
        (("generate", "t", "--max-tokens=x"), ["--max-tokens x: ", "integer"]),
        (("generate", "t", "--max-tokens"), ["--max-tokens", "argument"]),
        (("train", "r", "--resume", "x"), ["--resume x: ", "'auto'", "'never'"]),
        (("compare", "t", "--out", "o"), ["--prompts", " compare --help"]),
    ],
)
def test_mistake_of_parsing_is_one_line_and_exit_code_2(run, args, words):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


def test_no_verb_shows_the_help(run):
    code, out, err = run()
    assert code == 2
    assert "Usage: " in out + err
    assert " generate " in out + err


def test_unknown_log_level_is_refused(run, monkeypatch):
    monkeypatch.setenv("TREESPARK_LOG_LEVEL", "loud")
    code, _, err = run("version")
    assert code == 2
    assert err == "error: TREESPARK_LOG_LEVEL=LOUD: allowed: DEBUG, INFO, WARNING, ERROR\n"


def test_log_lines_carry_the_rank_of_a_worker(run, monkeypatch):
    seen = {}
    monkeypatch.setattr(logging, "basicConfig", seen.update)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run("version")[0] == 0
    assert " rank 1 " in seen["format"]


@pytest.mark.parametrize(
    ("world_size", "rank", "word"),
    [("abc", "0", "WORLD_SIZE=abc"), ("2", None, "RANK="), ("9" * 5000, "0", "WORLD_SIZE=9")],
)
def test_variables_of_a_worker_that_are_no_numbers_are_refused(
    run, monkeypatch, world_size, rank, word
):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    code, _, err = run("version")
    assert code == 2
    assert err.startswith(f"error: {word}")
    assert err.count("\n") == 1


def test_train_passes_the_resolved_recipe_and_resume(run, room, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "target: {model: t}\n"
        "drafter: {num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16,"
        " intermediate_size: 64}\n"
        "data: {continuations: [c.jsonl]}\ntrain: {epochs: 1}\noutput: {dir: o}\n"
    )
    calls = room("treespark.training.loop", "train", Path("done"))
    code, out, _ = run("train", recipe, "--set", "train.seed=7", "--resume", "never")
    (((loaded,), options),) = calls
    assert (code, out) == (0, "done\n")
    assert (loaded.train.seed, options) == (7, {"resume": "never"})


def test_prompts_build_passes_its_recipe(run, room):
    calls = room("treespark.data.mixture", "run_mixture")
    assert run("prompts", "build", "r.yaml")[0] == 0
    assert calls == [((Path("r.yaml"),), {})]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "Missing command"),
        (("a.jsonl", "--out", "o"), "No such command 'a.jsonl' (see "),
    ],
)
def test_prompts_without_collect_or_build_is_one_line(run, args, message):
    code, _, err = run("prompts", *args)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("flags", "room_name", "options"),
    [
        (
            ["--batch-size", 2, "--drop-truncated", "--drafter", "d"],
            "continuations",
            {"batch_size": 2, "dtype": "auto", "device": None, "drafter": Path("d")},
        ),
        (
            ["--server", "u", "--model", "m", "--retries", 0, "--drop-truncated"],
            "server_continuations",
            {"server": "u", "model": "m", "concurrency": 32, "retries": 0, "temperature": 0.0}
            | {"api_key_env": "OPENAI_API_KEY"},
        ),
    ],
)
def test_continuations_passes_its_flags(run, room, flags, room_name, options):
    calls = room(f"treespark.data.{room_name}", f"run_{room_name}")
    assert run("continuations", "t", "p", "--out", "o", *flags)[0] == 0
    shared = {"target": Path("t"), "prompts": Path("p"), "out": Path("o")}
    shared |= {"max_tokens": 512, "drop_truncated": True}
    assert calls == [((), {**shared, **options})]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "m"], "--model m: only with --server"),
        (["--temperature", "0"], "--temperature 0.0: only with --server"),
        (["--server", "u", "--drafter", "d"], "--drafter d: not allowed with --server"),
        (["--server", "u", "--batch-size", "4"], "--batch-size 4: not allowed with --server"),
    ],
)
def test_continuations_refuses_options_of_the_other_way(run, flags, message):
    code, _, err = run("continuations", "t", "p", "--out", "o", *flags)
    assert (code, err) == (2, f"error: {message}\n")


def test_prompts_collect_passes_its_flags(run, room, tmp_path):
    calls = room("treespark.data.prompts", "run_prompts")
    sys.modules["treespark.data.prompts"].parse_shares = lambda text: {"parsed": text}
    flags = ["--out", "o", "--tokenizer", "t", "--count", 5, "--seed", 3, "--shares", "a=1"]
    assert (
        run("prompts", "collect", "a.jsonl", "b.jsonl", *flags, "--evaluation", "e.jsonl")[0] == 0
    )
    assert calls == [
        (
            (),
            {
                "inputs": [Path("a.jsonl"), Path("b.jsonl")],
                "out": Path("o"),
                "tokenizer": Path("t"),
                "max_prompt_tokens": 2048,
                "count": 5,
                "seed": 3,
                "shares": {"parsed": "a=1"},
                "evaluation": [Path("e.jsonl")],
            },
        )
    ]


def test_generate_wants_a_drafter_or_the_word_that_there_is_none(run, room):
    calls = room("treespark.bench.generate", "run_generate")
    code, _, err = run("generate", "target", "hello")
    assert code == 2
    assert err.startswith("error: --drafter: missing")
    code, _, err = run("generate", "target", "hello", "--drafter", "d", "--no-drafter")
    assert code == 2
    assert "contradicts --drafter d" in err
    assert calls == []
    assert run("generate", "target", "hello", "--no-drafter")[0] == 0
    assert run("generate", "target", "hello", "--drafter", "d", "--budget", 0)[0] == 0
    (_, plain), (_, tree) = calls
    assert (plain["drafter"], tree["drafter"]) == (None, Path("d"))
    assert (plain["budget"], tree["budget"]) == (None, 0)


def test_compare_refuses_budgets_that_are_no_numbers(run, room):
    calls = room("treespark.bench.compare", "run_compare")
    flags = ["--prompts", "p", "--out", "o", "--drafter", "d", "--budgets"]
    code, _, err = run("compare", "target", *flags, "8,x")
    assert code == 2
    assert err == "error: --budgets 8,x: need whole numbers separated by commas, as in 8,16,32\n"
    assert calls == []
    assert run("compare", "target", *flags, "9" * 5000)[0] == 2
    assert run("compare", "target", *flags, "8, 16")[0] == 0
    assert calls[0][1]["budgets"] == [8, 16]
    assert run("compare", "target", *flags[:-1])[0] == 0
    assert calls[1][1]["budgets"] == [8, 12, 16, 20, 32]


@pytest.mark.parametrize("other", [("--no-drafter",), ("--drafter", "d", "--budget", 4)])
def test_compare_refuses_budgets_beside_what_overrules_them(run, room, other):
    calls = room("treespark.bench.compare", "run_compare")
    flags = ["--prompts", "p", "--out", "o", "--budgets", 9]
    code, _, err = run("compare", "target", *flags, *other)
    assert code == 2
    assert err.startswith("error: --budgets 9: contradicts --")
    assert calls == []


def test_export_onto_its_source_is_refused_before_loading(run, tmp_path):
    (tmp_path / "d").mkdir()
    code, _, err = run("export", tmp_path / "d", "--target", "none", "--out", tmp_path / "d")
    assert code == 2
    assert "is the drafter that is exported" in err


def test_public_names_are_lazy_and_resolve():
    code = (
        "import sys, treespark; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    )
    assert run_process("-c", code).stdout == "[]\n"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = treespark.nothing
    for name in treespark.__all__:
        assert getattr(treespark, name) is not None
