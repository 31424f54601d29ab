# SPDX-License-Identifier: Apache-2.0
"""`treespark ops`, and the operators in `treespark env`."""

import json
import logging
import sys

import pytest

from npu_ops import registry
from treespark import cli


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command in this process; returns what it prints."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["treespark", *args])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 0
        return capsys.readouterr().out

    return run


def test_ops_names_operator_implementation_and_reason(run):
    facts = json.loads(run("ops", "--json"))
    names = [row["operator"] for row in facts["operators"]]
    assert names == ["markov_topk", "pack_tree", "tree_attention"]
    text = run("ops")
    assert "markov_topk     cpu   fast\n" in text
    assert facts["reason"] in text


def test_env_has_the_same_table(run):
    facts = json.loads(run("env", "--json"))
    assert facts["operators"] == json.loads(run("ops", "--json"))
    assert run("env").endswith(run("ops"))


def test_modes_are_those_of_the_registry():
    assert sys.modules["treespark.cli.app"].OPS_MODES == registry.MODES
