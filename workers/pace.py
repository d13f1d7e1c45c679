"""How fast an engine makes tokens, and that it makes any: one that hangs may answer all the same when it is asked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from streamrl.errors import EngineError
from streamrl.workers.engines.base import EngineStats

_WINDOW_S = 10.0


class Pace:
    """Looked at now and then; a look raises when tokens were due for longer than the limit and none came."""

    def __init__(self, stats: EngineStats, *, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._since = clock()  # when tokens had come, or were not due
        self._looks = deque([(self._since, stats.num_made)])  # of the last seconds: (when, tokens made by then)

    def look(self, stats: EngineStats) -> float:
        """Tokens a second, over the last seconds."""
        now = self._clock()
        if stats.in_flight == 0 or stats.num_made != self._looks[-1][1]:
            self._since = now
        elif now - self._since > self._stall_s:
            raise EngineError(
                f"the engine made no token for {now - self._since:.0f} s while {stats.in_flight} samples were in "
                f"flight (worker.stall_s = {self._stall_s:g})"
            )
        self._looks.append((now, stats.num_made))
        while self._looks[0][0] < now - _WINDOW_S:
            self._looks.popleft()
        began, before = self._looks[0]
        return (stats.num_made - before) / (now - began) if now > began else 0.0
