"""Which parts live: who looks on sees sooner than a clock could tell that a report has ceased to change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from streamrl.telemetry.progress import Report

GONE_S = 10.0  # without a report for so long, a part is taken for gone


class Liveness:
    """Since when each part's report has not changed, by the clock of who looks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[float, float]] = {}  # part -> (its report's time, when that was first seen)

    def ages(self, reports: Iterable[Report], *, at: float) -> dict[str, float]:
        now = self._clock()
        seen: dict[str, tuple[float, float]] = {}
        for report in reports:
            before = self._seen.get(report.part)
            if before is not None and before[0] == report.at:
                seen[report.part] = before
            else:
                # At first sight only the clocks can tell; a report that has changed was made just now.
                age_s = max(0.0, at - report.at) if before is None else 0.0
                seen[report.part] = (report.at, now - age_s)
        self._seen = seen
        return {part: now - since for part, (_, since) in seen.items()}
