# SPDX-License-Identifier: Apache-2.0
"""Rules of the repository that no other tool checks: form of files, forbidden calls, layers."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
SPDX = "# SPDX-License-Identifier: Apache-2.0"
PYTHON_FILES = sorted(
    path
    for path in [
        ROOT / "setup.py",
        *(f for d in ("treespark", "npu_ops", "tests", "tools") for f in (ROOT / d).rglob("*.py")),
    ]
    if path.exists()
)
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "os.system",
    "pickle.load",
    "pickle.loads",
    "torch.load",
    "joblib.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
}
FORBIDDEN_KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}
# Public attribute names under which torch and its NPU plug-in reach a device, or its collectives.
DEVICE_WORDS = re.compile(r"\b(npu|cuda|hccl|nccl|torch_npu)\b")


def short(path):
    return str(path.relative_to(ROOT))


def problems_of(source, forbidden_modules=FORBIDDEN_MODULES):
    """Forbidden constructs of a Python source, as `line: what`."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS:
                yield f"{node.lineno}: {called}()"
            for keyword in node.keywords:
                constant = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in FORBIDDEN_KEYWORDS and not constant:
                    yield f"{node.lineno}: {keyword.arg}={ast.unparse(keyword.value)}"
        for name in names:
            if name.split(".")[0] in forbidden_modules or name in FORBIDDEN_CALLS:
                yield f"{node.lineno}: import {name}"


@pytest.mark.parametrize("path", PYTHON_FILES, ids=short)
def test_python_file_has_licence_line_docstring_and_under_400_lines(path):
    source = path.read_text(encoding="utf-8")
    assert source.splitlines()[:1] == [SPDX]
    assert ast.get_docstring(ast.parse(source)), "no module docstring"
    assert len(source.splitlines()) < 400


@pytest.mark.parametrize("path", PYTHON_FILES, ids=short)
def test_python_file_makes_no_forbidden_call(path):
    # A test may write a hostile file, to see it refused.
    modules = set() if short(path).startswith("tests/") else FORBIDDEN_MODULES
    assert list(problems_of(path.read_text(encoding="utf-8"), modules)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import load",
        "from torch import load",
        "torch.load(path, weights_only=True)",
        "yaml.load(text, Loader=Loader)",
        "eval('1')",
        "subprocess.run('ls', shell=True)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=flag)",
    ],
)
def test_forbidden_call_is_found(source):
    assert len(list(problems_of(source))) >= 1


def test_model_eval_and_explicit_refusals_are_allowed():
    source = "model.eval()\nnp.load(p, allow_pickle=False)\nyaml.safe_load(t)\nrun(shell=False)"
    assert list(problems_of(source)) == []


@pytest.mark.parametrize(
    "path",
    [p for p in PYTHON_FILES if short(p).startswith("treespark/") and p.name != "device.py"],
    ids=short,
)
def test_device_words_appear_only_in_the_device_layer(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [f"{n}: {line}" for n, line in enumerate(lines, 1) if DEVICE_WORDS.search(line)]
    assert found == []


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def layers():
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    (listed,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [re.findall(r"[\w.]+", layer) for layer in listed]


def test_every_module_of_the_package_has_its_layer():
    present = {
        f"treespark.{path.stem}"
        for path in (ROOT / "treespark").iterdir()
        if path.name != "__init__.py" and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    assert present <= {name for layer in layers() for name in layer}


def test_layers_stand_in_the_agreed_order():
    order = [sorted(name.removeprefix("treespark.") for name in layer) for layer in layers()]
    rooms = [
        ["cli"],
        ["bench"],
        ["training"],
        ["data"],
        ["serving"],
        ["drafter", "target"],
        ["tree"],
    ]
    assert [layer for layer in order if layer in rooms] == rooms


@pytest.mark.parametrize("folder", ["treespark", *(p.name for p in (ROOT / "treespark").iterdir())])
def test_every_folder_with_modules_is_a_package(folder):
    path = ROOT if folder == "treespark" else ROOT / "treespark"
    if (path / folder).is_dir() and any((path / folder).glob("*.py")):
        assert (path / folder / "__init__.py").exists()


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("treespark/tree/planted.py", "import treespark.errors\nimport treespark.serving"),
        ("treespark/drafter/planted.py", "import treespark.target"),
        ("treespark/tree/planted.py", "import treespark.device"),
        ("treespark/target/planted.py", "import torch_npu"),
        ("treespark/serving/planted.py", "import deepspeed"),
        ("treespark/data/planted.py", "import fastapi"),
        ("npu_ops/planted.py", "import treespark.errors"),
    ],
)
def test_planted_import_against_the_layers_is_caught(tmp_path, where, line):
    ignore = shutil.ignore_patterns("__pycache__")
    for package in ("treespark", "npu_ops"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    planted = tmp_path / where
    planted.write_text(line + "\n")
    (planted.parent / "__init__.py").touch()
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.exists():
        pytest.skip("import-linter is not installed beside this Python")
    result = subprocess.run(
        [sys.executable, str(lint), "--no-cache"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert where.removesuffix(".py").replace("/", ".") in result.stdout


def test_version_is_static_and_console_script_exists():
    project = pyproject()["project"]
    assert project["dynamic"] == ["version"]
    assert project["scripts"] == {"treespark": "treespark.cli:main"}
    source = (ROOT / "treespark" / "__init__.py").read_text(encoding="utf-8")
    assert re.search(r'^__version__ = "\d+\.\d+\.\d+"$', source, re.MULTILINE)


def test_npu_and_heavy_packages_stay_out_of_the_base():
    project = pyproject()["project"]
    base = {re.match(r"[\w-]+", name)[0] for name in project["dependencies"]}
    numbers = {"torch", "transformers", "numpy", "safetensors"}
    assert base == numbers | {"pyyaml", "tqdm", "typer", "pydantic", "rich"}
    assert {"npu", "train", "serve", "bench", "demo", "dev"} <= set(
        project["optional-dependencies"]
    )


def test_licence_is_apache_2_in_full():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
