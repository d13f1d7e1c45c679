"""An engine that hangs: it may answer when asked whether it lives, and make no token all the same."""

from __future__ import annotations

import time
from collections.abc import Callable

from streamrl.errors import EngineError
from workers.engines.base import EngineStats


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
