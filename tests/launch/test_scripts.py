# SPDX-License-Identifier: Apache-2.0
"""The set-up scripts, offline: a stand-in Python records what would be installed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ["launch/quickstart.sh", "tools/test.sh"]
SHELL_FILES = [
    path
    for path in [
        *(
            file
            for folder in ("launch", "tools", "npu_ops")
            for file in ROOT.glob(f"{folder}/*.sh")
        ),
        ROOT / ".ci" / "run",
    ]
    if path.exists()
]
# Answers as a Python would; `-m venv DIR` makes DIR with this same file as its python.
STAND_IN = """#!/usr/bin/env bash
echo "$*" >>"{log}"
case "$*" in
*version_info\\ \\<*) exit {too_old} ;;
*ensurepip,*) exit {no_venv} ;;
*print*version_info*) echo python3.99-venv ;;
*importlib.metadata*) echo torch==2.13.0+stand.in ;;
--version) echo Python 3.9.2 ;;
-m\\ venv*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
*install*{fails}*) exit 1 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout with nothing but what the scripts read."""
    root = tmp_path / "a checkout"
    for name in ("launch", "tools", ".ci"):
        shutil.copytree(ROOT / name, root / name)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, root)
    return root


@pytest.fixture
def python(tmp_path):
    """Make a stand-in Python; returns its path and a function that reads its log."""

    def make(name="python3", too_old=0, no_venv=0, fails="nothing"):
        log = tmp_path / "log"
        path = tmp_path / name
        path.write_text(STAND_IN.format(log=log, too_old=too_old, no_venv=no_venv, fails=fails))
        path.chmod(0o755)

        def read():
            lines = log.read_text().splitlines() if log.exists() else []
            log.unlink(missing_ok=True)
            return lines

        return path, read

    return make


def bash(checkout, script, *args, **options):
    return subprocess.run(
        ["bash", str(checkout / script), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


@pytest.mark.parametrize("path", SHELL_FILES, ids=lambda path: path.name)
def test_shell_file_passes_shellcheck(path):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run(["shellcheck", "-x", path], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_dry_run_prints_torch_first_and_runs_nothing(checkout, script):
    result = bash(checkout, script, "--dry-run", "--wheel-index", "https://example.org/simple")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    installs = [line for line in lines if " install " in line]
    assert "--index-url https://example.org/simple torch==2.13.0" in installs[0]
    assert "--no-deps" in installs[0]
    assert all("--constraint" in line or "--no-deps" in line for line in installs[1:])
    assert all("example.org" not in line for line in installs[1:])
    assert not (checkout / ".venv").exists()


def test_dry_run_of_the_tests_names_all_checks_and_passes_arguments_on(checkout):
    result = bash(checkout, "tools/test.sh", "--dry-run", "-k", "two words", "tests/tree")
    last = result.stdout.splitlines()[-4:]
    tools = ("-m ruff check .", "/lint-imports", "-m mypy", "-m pytest")
    assert all(tool in line for tool, line in zip(tools, last, strict=True))
    assert last[-1].endswith("-m pytest -k two\\ words tests/tree")


def test_fixture_folder_comes_after_a_path_that_pytest_reads_options_from(checkout):
    result = bash(checkout, "tools/test.sh", "--dry-run", "--fixtures", "/data")
    assert result.stdout.splitlines()[-1].endswith("-m pytest tests --fixtures /data")


def test_dry_run_of_the_quickstart_ends_with_the_verb(checkout):
    result = bash(checkout, "launch/quickstart.sh", "--dry-run", "--minutes", "1")
    assert result.stdout.splitlines()[-1].endswith("-m treespark quickstart --minutes 1")


def test_continuous_integration_runs_the_tests(checkout):
    result = bash(checkout, ".ci/run", "--dry-run")
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1].endswith("-m pytest")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_how_to_get_the_cpu_build(checkout, script):
    result = bash(checkout, script, "--help")
    assert result.returncode == 0
    assert "--wheel-index https://download.pytorch.org/whl/cpu" in result.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_second_run_installs_nothing_until_pyproject_changes(checkout, script, python):
    path, log = python()
    first = bash(checkout, script, "--python", path)
    assert first.returncode == 0, first.stderr
    assert sum(" install " in line for line in log()) == 3
    constraint = checkout / ".venv" / "torch-constraint.txt"
    assert constraint.read_text() == "torch==2.13.0+stand.in\n"
    assert bash(checkout, script, "--python", path).returncode == 0
    assert not any(" install " in line or "-m venv" in line for line in log())
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert bash(checkout, script, "--python", path).returncode == 0
    again = log()
    assert sum(" install " in line for line in again) == 3
    assert not any("-m venv" in line for line in again)


def test_failed_installation_is_tried_again(checkout, python):
    path, log = python(fails="constraint")
    assert bash(checkout, "tools/test.sh", "--python", path).returncode != 0
    log()
    path, log = python()
    shutil.copy(path, checkout / ".venv" / "bin" / "python")
    assert bash(checkout, "tools/test.sh", "--install-only", "--python", path).returncode == 0
    assert sum(" install " in line for line in log()) == 3


def test_install_only_stops_before_the_checks(checkout, python):
    path, log = python()
    assert bash(checkout, "tools/test.sh", "--install-only", "--python", path).returncode == 0
    assert not any("-m pytest" in line or "-m ruff" in line for line in log())


def test_old_python_is_refused_with_its_version(checkout, python):
    path, _ = python(too_old=1)
    result = bash(checkout, "tools/test.sh", "--python", path)
    assert result.returncode == 1
    assert "is Python 3.9.2; need Python 3.10 or newer" in result.stderr
    assert not (checkout / ".venv").exists()


def test_missing_python_is_named(checkout):
    result = bash(checkout, "launch/quickstart.sh", "--python", "/nowhere/python3")
    assert result.returncode == 1
    assert "/nowhere/python3: not found" in result.stderr


@pytest.mark.parametrize(
    ("name", "package"), [("python3", "python3-venv"), ("python3.99", "python3.99-venv")]
)
def test_missing_venv_names_the_apt_command(checkout, python, name, package):
    path, _ = python(name, no_venv=1)
    result = bash(checkout, "launch/quickstart.sh", "--python", path)
    assert result.returncode == 1
    assert f"apt-get install -y {package}" in result.stderr
    assert not (checkout / ".venv").exists()


def test_option_without_its_value_is_a_usage_error(checkout):
    result = bash(checkout, "tools/test.sh", "--wheel-index")
    assert result.returncode == 2
    assert result.stderr == "error: --wheel-index: needs a value\n"


def test_embedded_target_is_the_one_pyproject_pins():
    script = (ROOT / "launch" / "_env.sh").read_text()
    pinned = re.search(r"^EMBEDDED_TARGET=(.*)$", script, re.MULTILINE)[1]
    assert f'"{pinned}"' in (ROOT / "pyproject.toml").read_text()
