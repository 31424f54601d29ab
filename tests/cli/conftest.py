# SPDX-License-Identifier: Apache-2.0
"""The command line run in this process, with stand-ins for the rooms that verbs enter."""

import logging
import sys
import types

import pytest

from treespark import cli


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
