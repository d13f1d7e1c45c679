"""Watches an engine while it generates: shows its figures, and raises EngineError when it is dead or has stalled."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping

from streamrl.errors import EngineError
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.base import Engine, EngineStats

_ALIVE_EVERY_S = 10.0
_SHOW_EVERY_S = 1.0
_PACE_S = 10.0  # window of the reported tokens per second


async def watch_engine(
    engine: Engine, progress: Progress, *, facts: Callable[[], Mapping[str, int | float | str]], stall_s: float
) -> None:
    """Watch until cancelled. `facts`: what the monitor shows of the rewards, beside the engine's figures."""
    pace = Pace(engine.stats(), stall_s=stall_s)
    try:
        while True:
            until = time.monotonic() + _ALIVE_EVERY_S
            while time.monotonic() < until:
                progress.note(**_figures(engine.stats(), pace), **facts())
                await asyncio.sleep(min(_SHOW_EVERY_S, stall_s / 4))
            await engine.check_alive()
    finally:  # the engine's last figures are not those of the minutes that another one takes to start
        progress.note(in_flight=0, waiting=0, kv_used=0.0, tokens_per_s=0)


def _figures(stats: EngineStats, pace: Pace) -> dict[str, int | float]:
    drafts = {} if stats.drafts_accepted is None else {"drafts_accepted": round(stats.drafts_accepted, 3)}
    return {
        "in_flight": stats.in_flight,
        "waiting": stats.num_waiting,
        "kv_used": round(stats.kv_used, 3),
        "tokens_per_s": round(pace.look(stats)),
        **drafts,
    }


class Pace:
    """Measures tokens per second, and detects a stalled engine: a hung engine may still pass its liveness check.

    Time between two looks counts as half of `stall_s` at most: if it was more, this process was stopped, perhaps with
    its engine. Time in which the engine loads or returns weights does not count: that has limits of its own.
    """

    def __init__(self, stats: EngineStats, *, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._waited_s = 0.0  # since tokens arrived, or none were due
        self._looks = deque([(clock(), stats.num_made)])  # (time, tokens made so far) over the last seconds

    def look(self, stats: EngineStats) -> float:
        """Return recent tokens per second. EngineError if tokens were due for `stall_s` and none came."""
        now = self._clock()
        looked, num_made = self._looks[-1]
        if not stats.is_busy:
            self._waited_s += min(now - looked, self._stall_s / 2)
        if stats.in_flight == 0 or stats.num_made != num_made:
            self._waited_s = 0.0
        elif self._waited_s > self._stall_s:
            raise EngineError(
                f"the engine generated no token for {self._waited_s:.0f} s while {stats.in_flight} samples were in "
                f"flight (worker.stall_s = {self._stall_s:g})"
            )
        self._looks.append((now, stats.num_made))
        while self._looks[0][0] < now - _PACE_S:
            self._looks.popleft()
        began, num_before = self._looks[0]
        return (stats.num_made - num_before) / (now - began) if now > began else 0.0
