# SPDX-License-Identifier: Apache-2.0
"""The calls that verbs make exist: they import late, so only a user would notice otherwise."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from treespark import cli

VERBS = {
    node.name: node
    for path in sorted(Path(cli.__file__).parent.glob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef)
    and any(isinstance(inner, ast.ImportFrom) for inner in ast.walk(node))
}


@pytest.mark.parametrize("verb", VERBS)
def test_calls_of_a_verb_exist_and_take_its_arguments(verb):
    # The verbs import late: a renamed function would otherwise only show when a user runs them.
    imported = {}
    for node in ast.walk(VERBS[verb]):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            imported |= {a.asname or a.name: getattr(module, a.name) for a in node.names}
    calls = [node for node in ast.walk(VERBS[verb]) if isinstance(node, ast.Call)]
    for call in calls:
        if getattr(call.func, "id", None) in imported:
            signature = inspect.signature(imported[call.func.id])
            signature.bind(*call.args, **{keyword.arg: keyword for keyword in call.keywords})
