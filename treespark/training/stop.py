# SPDX-License-Identifier: Apache-2.0
"""Turns SIGTERM and Ctrl-C into a request that the loop honours at the end of a step."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType


class StopRequest:
    """Context manager; `requested` becomes True at the first signal, the second acts as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._number = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process ended by the signal: 128 + its number."""
        return 128 + self._number

    def _note(self, number: int, _: FrameType | None) -> None:
        self.requested, self._number = True, number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
