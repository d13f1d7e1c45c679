"""Requests to end that come as signals: counted, and heeded where it suits the work."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Inside the context Ctrl-C and its kin raise nothing; `count` tells how often somebody asked."""

    def __init__(self) -> None:
        self.count = 0
        self._first: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._first = self._first or number

    @property
    def exit_code(self) -> int:
        """As a shell reports a process that the first of these signals ended; 0 when there was none."""
        return 0 if self._first is None else 128 + self._first
