# SPDX-License-Identifier: Apache-2.0
"""Tables and lines in a terminal whose texts come from files, paths and servers."""

from __future__ import annotations

from rich.console import Console


def plain_console(width: int | None = None) -> Console:
    """Return a console on stdout that shows texts as they are: `[/x]` and `:100:` are no markup."""
    return Console(width=width, markup=False, emoji=False)
