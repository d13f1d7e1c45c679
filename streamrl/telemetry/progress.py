"""Progress and waits: what a part is doing or waiting for, since when, and when it last made progress.

Health is the age of the last *progress*, never a heartbeat: a process that is alive while its work stands still is the
failure that users of comparable systems complain about. Each part owns one `Progress`; a separate thread or
task writes its `report` to Redis once a second (`transport.reports`), so that reporting can never delay or stop work.

`Liveness` tells which parts are alive: an observer notices a report that stops changing sooner than clocks would.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

Role = Literal["learner", "worker", "host", "reward", "launcher"]  # host: a further one of a worker's engine
State = Literal["starting", "working", "waiting", "stopping"]
Detail = Mapping[str, int | float | str]


class Wait(StrEnum):
    """Everything that a part may wait for; each wait is bounded and visible."""

    RUN = "run"  # the run's configuration to appear in Redis
    LEASE = "lease"  # another learner holds the run
    PEERS = "peers"  # the other ranks
    TICKETS = "tickets"  # a worker without work
    GROUPS = "groups"  # the learner without rollouts
    STRAGGLERS = "stragglers"  # old tickets, before a step would make their groups too old
    WEIGHTS = "weights"  # a version that is needed before going on
    ENGINE = "engine"  # the engine to start or to answer
    HOSTS = "hosts"  # the other hosts of one engine
    REWARDS = "rewards"  # reward sources to answer
    EVALUATION = "evaluation"  # answers to evaluation tickets
    RESUME = "resume"  # the operator paused the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    part: str  # "learner/0", "worker/host-1234", "reward/0"
    role: Role
    host: str
    pid: int
    state: State
    doing: str  # the activity, or the name of the wait
    since: float  # when this activity or wait began (unix time)
    last_progress: float  # when the part last made progress
    at: float  # when this report was made
    detail: Detail = field(default_factory=dict)  # step, version, in flight, tokens/s, ...


class Progress:
    """The current state of one part; safe to use from several threads.

    It measures with `timer`, since a machine's clock may be set at any moment; `clock` tells only when a report is
    made, and the report's other times follow from it.
    """

    def __init__(
        self,
        *,
        part: str,
        role: Role,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.part = part
        self._clock, self._timer = clock, timer
        self._lock = threading.Lock()
        self._waited: dict[Wait, float] = {}
        now = timer()
        self._now = Report(  # with the timer's times
            part=part,
            role=role,
            host=socket.gethostname(),
            pid=os.getpid(),
            state="starting",
            doing="start",
            since=now,
            last_progress=now,
            at=now,
        )

    def working(self, doing: str) -> None:
        """Set the current activity; a new activity counts as progress."""
        self._enter("working", doing)

    def starting(self, doing: str) -> None:
        """Set an activity before the part can do its work, which counts as progress too."""
        self._enter("starting", doing)

    def stopping(self) -> None:
        self._enter("stopping", "stop")

    def advanced(self, **detail: int | float | str) -> None:
        """Record progress within the activity: a step was done, a group delivered."""
        with self._lock:
            self._now = replace(self._now, last_progress=self._timer(), detail={**self._now.detail, **detail})

    def note(self, **detail: int | float | str) -> None:
        """Record facts to show that are not progress."""
        with self._lock:
            self._now = replace(self._now, detail={**self._now.detail, **detail})

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Show a wait inside the context, and the previous activity after it. The caller bounds the wait."""
        with self._lock:
            before, began = self._now, self._timer()
            self._now = replace(before, state="waiting", doing=str(wait), since=began)
        try:
            yield
        finally:
            with self._lock:
                now = self._timer()
                self._now = replace(self._now, state=before.state, doing=before.doing, since=now)
                self._waited[wait] = self._waited.get(wait, 0.0) + now - began

    def take_waits(self) -> dict[Wait, float]:
        """Return the seconds spent in each wait since the last call."""
        with self._lock:
            taken, self._waited = self._waited, {}
        return taken

    def report(self) -> Report:
        with self._lock:
            now, at = self._now, self._clock()
            passed = at - self._timer()
            return replace(now, at=at, since=now.since + passed, last_progress=now.last_progress + passed)

    def _enter(self, state: State, doing: str) -> None:
        with self._lock:
            if (state, doing) == (self._now.state, self._now.doing):
                return  # another attempt at the same is no progress
            now = self._timer()
            self._now = replace(self._now, state=state, doing=doing, since=now, last_progress=now)


GONE_S = 10.0  # a part without a report for this long counts as gone


class Liveness:
    """How long each part's report has not changed, by the observer's clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[float, float]] = {}  # part -> (its report's time, when that was first seen)

    def ages(self, reports: Iterable[Report], *, at: float) -> dict[str, float]:
        now = self._clock()
        seen: dict[str, tuple[float, float]] = {}
        for report in reports:
            # At first sight only the clocks can tell; a report that has changed was made just now.
            last_at, since = self._seen.get(report.part, (report.at, now - max(0.0, at - report.at)))
            seen[report.part] = (report.at, since if report.at == last_at else now)
        self._seen = seen
        return {part: now - since for part, (_, since) in seen.items()}
