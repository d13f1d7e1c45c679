"""A lock-free stop flag, which a signal handler sets in the main thread, and which ranks share.

`threading.Event` has a lock that the interrupted thread may hold itself: as a wait begins, or inside another signal's
handler. Setting it then would deadlock. `wait` blocks as long as asked, by polling; `share_signals` until all ranks
have joined.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from streamrl.learner.process.ranks import World

_POLL_EVERY_S = 0.02


class StopFlag(threading.Event):
    """An event without a lock: waiters poll it. It is never cleared."""

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            left_s = _POLL_EVERY_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                break
            time.sleep(min(left_s, _POLL_EVERY_S))
        return self._is_set


def share_signals(stop: threading.Event, world: World) -> None:
    """Set `stop` on every rank if a signal has set it on any of them. A collective."""
    if world.largest(np.array([float(stop.is_set())]))[0]:
        stop.set()
