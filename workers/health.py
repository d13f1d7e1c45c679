"""How a worker is, as its own parts say it: what probes and metrics are made of.

Alive: it is not to be killed. Not alive: tokens, scores or groups are due, and none came for far longer than the bounds
after which the worker should have mended or ended itself; a wait with a name and a bound is no such thing.
Ready: groups come out of it, or would if there were tickets. Each answer brings the reasons against it.

Nobody is asked anything for the sake of an answer: a reward source counts as out of reach when it says so itself, or
when the last samples that needed it got no score, or wait for one too long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from streamrl.errors import RewardError
from streamrl.telemetry.progress import Progress
from workers.answer import Scorer
from workers.engines.base import EngineStats
from workers.rewards.base import ScoreItem, Scores
from workers.rollout import Counts

_SCORE_S = 60.0  # a sample that waits so long for its score


class WatchedRewards:
    """Passes on, and remembers how it went."""

    def __init__(self, rewards: Scorer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rewards = rewards
        self._clock = clock
        self._pending: dict[int, float] = {}  # since when, oldest first
        self._num_asked = 0
        self._failing = ""

    async def score(self, item: ScoreItem) -> Scores:
        self._num_asked += 1
        number = self._num_asked
        self._pending[number] = self._clock()
        try:
            scores = await self._rewards.score(item)
        except RewardError as error:
            self._failing = str(error)
            raise
        finally:
            del self._pending[number]
        self._failing = ""
        return scores

    def outage(self) -> str | None:
        return self._rewards.outage()

    def facts(self) -> dict[str, int | float | str]:
        return self._rewards.facts()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def trouble(self) -> str:
        """Empty: none that we know of."""
        if (outage := self._rewards.outage()) is not None:
            return outage
        oldest = next(iter(self._pending.values()), None)
        if oldest is not None and self._clock() - oldest > _SCORE_S:
            return f"a sample has waited {self._clock() - oldest:.0f} s for its score"
        return f"the last score could not be had: {self._failing}" if self._failing else ""


class Work(Protocol):
    """What is read of `workers.rollout.Rollout`."""

    counts: Counts

    @property
    def engine_stats(self) -> EngineStats | None:
        """None: no engine is at work."""


class Versions(Protocol):
    """What is read of `workers.weights.WeightFollower`."""

    num_proved: int

    @property
    def proved_version(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Of a worker that has found its run."""

    work: Work
    weights: Versions
    rewards: WatchedRewards
    stall_s: float


class Health:
    def __init__(self, progress: Progress, *, clock: Callable[[], float] = time.time) -> None:
        self.progress = progress
        self.parts: Parts | None = None
        self._clock = clock
        self._num_made = 0
        self._made_at = clock()  # when tokens were last seen to have come, or not to be due

    def progress_age_s(self) -> float:
        """Since the worker last got on: a group, a version, an activity, or a token."""
        stats = self.parts.work.engine_stats if self.parts else None
        if stats is not None and stats.num_made != self._num_made:
            self._num_made, self._made_at = stats.num_made, self._clock()
        report = self.progress.report()
        return max(0.0, self._clock() - max(report.last_progress, report.since, self._made_at))

    def against_alive(self) -> list[str]:
        age_s = self.progress_age_s()
        report = self.progress.report()
        if self.parts is None or report.state != "working" or report.doing != "generate":
            return []  # bounded, and ended by whoever bounds it
        stats = self.parts.work.engine_stats
        busy = (stats is not None and stats.in_flight > 0) or self.parts.rewards.num_pending > 0
        limit_s = 3 * self.parts.stall_s
        return [f"nothing got on for {age_s:.0f} s, with work at hand"] if busy and age_s > limit_s else []

    def against_ready(self) -> list[str]:
        report = self.progress.report()
        if self.parts is None:
            return [f"{report.state}: {report.doing}"]
        reasons = self.against_alive()
        if report.state in ("starting", "stopping"):
            reasons.append(f"{report.state}: {report.doing}")
        if self.parts.work.engine_stats is None:
            reasons.append(f"no engine is at work: {report.doing}")
        elif not self.parts.weights.proved_version:
            reasons.append(f"no version of the weights is proved: {report.detail.get('rejected') or report.doing}")
        elif self.progress_age_s() > self.parts.stall_s and self.parts.work.engine_stats.in_flight:
            reasons.append(f"no token for {self.progress_age_s():.0f} s")
        if trouble := self.parts.rewards.trouble():
            reasons.append(f"rewards: {trouble}")
        return reasons
