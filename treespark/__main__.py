# SPDX-License-Identifier: Apache-2.0
"""`python -m treespark`: the same as the `treespark` command."""

from treespark.cli import main

main()
