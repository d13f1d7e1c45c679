"""How fast something goes, over the last seconds.

An engine that hangs: it may answer when asked whether it lives, and make no token all the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from streamrl.errors import EngineError
from streamrl.workers.engines.base import EngineStats


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


class StallWatch:
    """Looked at now and then; a look raises when tokens were due for longer than the limit and none came."""

    def __init__(self, *, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._since = clock()
        self._num_made = 0

    def look(self, stats: EngineStats) -> None:
        now = self._clock()
        if stats.in_flight == 0 or stats.num_made != self._num_made:
            self._since, self._num_made = now, stats.num_made
        elif now - self._since > self._limit_s:
            raise EngineError(
                f"the engine made no token for {now - self._since:.0f} s while {stats.in_flight} samples were in "
                f"flight (worker.stall_s = {self._limit_s:g})"
            )
