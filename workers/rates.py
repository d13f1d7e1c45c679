"""How fast something goes, over the last seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Rate:
    def __init__(self, *, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._since = clock()
        self._recent: deque[tuple[float, int]] = deque()  # (when, how many)

    def add(self, count: int) -> None:
        self._recent.append((self._clock(), count))

    def per_second(self) -> float:
        """Over the window, or over what has passed of the first one."""
        now = self._clock()
        while self._recent and self._recent[0][0] < now - self._window_s:
            self._recent.popleft()
        passed = min(self._window_s, now - self._since)
        return sum(count for _, count in self._recent) / passed if passed > 0 else 0.0
