# SPDX-License-Identifier: Apache-2.0
"""Entry point for tools that want a setup.py; everything is declared in pyproject.toml."""

from setuptools import setup

setup()
