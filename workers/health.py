"""A worker's health, as reported by its own parts: the basis of probes and metrics.

Alive: it must not be killed. It is not alive if tokens, scores or groups are due and none has come for far longer than
the bounds after which the worker should have recovered or ended by itself. A named, bounded wait does not count.
Ready: it delivers groups, or would if there were tickets. Each answer lists the reasons against it.

A probe sends no requests of its own: a reward source counts as unreachable when it reports so itself, or when the last
samples that needed it got no score or have waited for one too long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from streamrl.telemetry.progress import Progress
from streamrl.workers.rewards.mixing import Rewards
from streamrl.workers.rollout.roles import Work
from streamrl.workers.weights.roles import Weights

_BOUND_FACTOR = 3.0  # multiple of the parts' own bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingParts:
    """The parts of a worker that has found its run."""

    work: Work
    weights: Weights
    rewards: Rewards
    stall_s: float


class Health:
    def __init__(self, progress: Progress, *, timer: Callable[[], float] = time.monotonic) -> None:
        self.progress = progress
        self.parts: WorkingParts | None = None
        self._timer = timer
        self._num_made = 0  # tokens and scores
        self._made_at = timer()  # when the count last changed

    def progress_age_s(self) -> float:
        """Seconds since the worker last made progress: a group, a version, an activity, a token, or a score. Loading
        and returning weights is progress too: the engine bounds it."""
        if (num_made := self._count()) != self._num_made or self._engine_is_busy():
            self._num_made, self._made_at = num_made, self._timer()
        report = self.progress.report()
        age_s = report.at - max(report.last_progress, report.since)
        return max(0.0, min(age_s, self._timer() - self._made_at))

    def against_alive(self) -> list[str]:
        age_s = self.progress_age_s()
        report = self.progress.report()
        if self.parts is None or report.state != "working" or report.doing != "generate":
            return []  # bounded, and ended by whoever set the bound
        stats, rewards = self.parts.work.engine_stats, self.parts.rewards
        limit_s = math.inf
        if stats is not None and stats.in_flight > 0:
            limit_s = _BOUND_FACTOR * self.parts.stall_s
        elif rewards.num_pending > 0:
            limit_s = _BOUND_FACTOR * max(self.parts.stall_s, rewards.patience_s)
        return [f"no progress for {age_s:.0f} s, although work is pending"] if age_s > limit_s else []

    def _count(self) -> int:
        """Tokens and scores so far."""
        if self.parts is None:
            return 0
        stats = self.parts.work.engine_stats
        return self.parts.rewards.num_received + (0 if stats is None else stats.num_made)

    def _engine_is_busy(self) -> bool:
        stats = None if self.parts is None else self.parts.work.engine_stats
        return stats is not None and stats.is_busy

    def against_ready(self) -> list[str]:
        report = self.progress.report()
        if self.parts is None:
            return [f"{report.state}: {report.doing}"]
        reasons = self.against_alive()
        if report.state in ("starting", "stopping"):
            reasons.append(f"{report.state}: {report.doing}")
        if self.parts.work.engine_stats is None:
            if report.state != "starting":  # or it has been said
                reasons.append(f"no engine is running: {report.doing}")
        elif not self.parts.weights.proved_version:
            reasons.append(f"no version of the weights is proved yet: {report.detail.get('rejected') or report.doing}")
        elif self.progress_age_s() > self.parts.stall_s and self.parts.work.engine_stats.in_flight:
            reasons.append(f"no token for {self.progress_age_s():.0f} s")
        if trouble := self.parts.rewards.trouble():
            reasons.append(f"rewards: {trouble}")
        return reasons
