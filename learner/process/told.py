"""Whether this rank is to end. A signal's handler sets it, in the main thread, wherever that happens to be.

A `threading.Event` has a lock, which that very thread may hold just then: as a wait begins, or in the midst of another
signal. It would wait for itself for ever. Blocks for as long as is asked.
"""

from __future__ import annotations

import threading
import time

_LOOK_EVERY_S = 0.02


class Told(threading.Event):
    """Without a lock: who waits looks again and again. It is never taken back."""

    def __init__(self) -> None:
        super().__init__()
        self._is_told = False

    def is_set(self) -> bool:
        return self._is_told

    def set(self) -> None:
        self._is_told = True

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_told:
            left_s = _LOOK_EVERY_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                break
            time.sleep(min(left_s, _LOOK_EVERY_S))
        return self._is_told
