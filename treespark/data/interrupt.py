# SPDX-License-Identifier: Apache-2.0
"""SIGINT and SIGTERM as a request to stop at the next safe point."""

import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """Context manager that notes the first signal; a second one acts as it did before.

    Outside the main thread, where Python delivers no signals, it stays False.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        self.__exit__()

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that this signal ended."""
        assert self.signal is not None
        return 128 + self.signal
