# SPDX-License-Identifier: Apache-2.0
"""The `treespark` command: each verb parses its flags and makes one call.

A verb imports its room when it runs, so that help and usage errors do not wait for torch. Exit
codes: 0 done, 1 failed (with a traceback), 2 a mistake of the user (one line), 130 interrupted.
"""

# Verbs enter the command when their module is imported, in the order of its help.
from treespark.cli import training  # isort: skip
from treespark.cli import prompts  # isort: skip
from treespark.cli import features  # isort: skip
from treespark.cli import decoding  # isort: skip
from treespark.cli import drafters  # isort: skip
from treespark.cli import report  # isort: skip
from treespark.cli import serving  # isort: skip
from treespark.cli import load  # isort: skip
from treespark.cli import suite  # isort: skip
from treespark.cli import workers  # isort: skip
from treespark.cli.app import app, main

__all__ = [
    "app",
    "decoding",
    "drafters",
    "features",
    "load",
    "main",
    "prompts",
    "report",
    "serving",
    "suite",
    "training",
    "workers",
]
