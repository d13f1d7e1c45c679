"""The newest published version, which rank 0 looks after: Redis holds it, and not all workers reject it.

Blocks on Redis, within its limits, every few seconds at most; on the workers' reports for two seconds at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from streamrl.errors import Fenced, RunGone, TrainingError, TransportError
from streamrl.learner.process.lease import redis_may_be_away
from streamrl.protocol.weights.rejected import REMEDY_OF_ALL, borne_s, rejects
from streamrl.telemetry.progress import GONE_S, Liveness, Report
from streamrl.versions import show

if TYPE_CHECKING:
    from streamrl.learner.publishing.shipping import Published

_CHECK_EVERY_S = 5.0

log = structlog.get_logger(__name__)

ReadReports = Callable[[], tuple[float, Sequence[Report]]]  # (server time, reports)


class WeightsStream(Protocol):
    """What the run's stream tells about versions."""

    def has_manifests(self, versions: Sequence[int]) -> bool: ...

    def reports(self) -> tuple[float, Sequence[Report]]: ...


class NewestVersion:
    def __init__(self, stream: WeightsStream, *, give_up_after_s: float, clock: Callable[[], float]) -> None:
        self._stream, self._clock = stream, clock
        self._rejections = Rejections(stream.reports, give_up_after_s=give_up_after_s, clock=clock)
        self._published: Published | None = None
        self._next_check = 0.0

    def note(self, published: Published) -> None:
        self._published, self._next_check = published, 0.0

    def check_held(self) -> bool:
        """Return whether Redis holds its manifests, and cannot have lost their blobs just before: it was not emptied,
        and lost no latest writes. True between checks, and while Redis is away.

        New workers would wait for weights forever, and the learner for their groups. Checked after each version and
        every `_CHECK_EVERY_S`.
        """
        needed = self._published.needs if self._published is not None else ()
        if not needed or self._clock() < self._next_check:
            return True
        self._next_check = self._clock() + _CHECK_EVERY_S
        with redis_may_be_away("weights not checked"):
            if not self._stream.has_manifests(needed):
                log.warning("weights lost in Redis", needed=needed)
                return False
        return True

    def check_rejections(self) -> None:
        """Raise TrainingError if all workers reject it."""
        if self._published is not None:
            self._rejections.check(self._published.version)


class Rejections:
    """Detects that all workers reject the newest version: then no group, no step and no better version would ever come.

    Rank 0 checks while it waits for groups or for a validation: it reads the workers' reports every few seconds, and
    ends the run if no worker serves the version for as long as `weights.rejected` defines. Workers without recent
    reports do not count. Those that have neither served nor rejected anything yet delay the end, with a limit. One
    worker that serves is enough to continue: then the other machines are at fault, which `streamrl why` reports.
    """

    def __init__(
        self, read: ReadReports, *, give_up_after_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._give_up_after_s, self._clock = read, give_up_after_s, clock
        self._liveness = Liveness(clock)
        self._next_check = 0.0
        self._version = 0  # the newest, at the last look
        self._since: float | None = None  # when it was first rejected while no worker serves
        self._reports_unread = False  # the last attempt to read them failed

    def check(self, newest: int) -> None:
        """Raise TrainingError when no worker serves this version, and none will."""
        if self._clock() < self._next_check:
            return
        self._next_check = self._clock() + _CHECK_EVERY_S
        try:
            at, reports = self._read()
        except (Fenced, RunGone):
            raise
        except TransportError as error:
            if not self._reports_unread:  # once in a row: the user's ACL may be too old to allow it
                log.warning("reports_unread", error=str(error), hint="rejections by all workers go unnoticed")
            self._reports_unread = True
            return
        self._reports_unread = False
        self._judge(newest, self._living_workers(reports, at=at))

    def _living_workers(self, reports: Sequence[Report], *, at: float) -> list[Report]:
        workers = [report for report in reports if report.role == "worker"]
        ages = self._liveness.ages(workers, at=at)
        return [worker for worker in workers if ages[worker.part] <= GONE_S]

    def _judge(self, newest: int, workers: Sequence[Report]) -> None:
        if newest != self._version or any(_serves(worker) for worker in workers):
            self._version, self._since = newest, None
        rejecting = [worker for worker in workers if rejects(worker.detail)[1] == show(newest)]
        if not rejecting or any(_serves(worker) for worker in workers):
            return  # workers that rejected it may have exited to restart: keep the time running
        if self._since is None:
            self._since = self._clock()
            log.warning("version_rejected", version=show(newest), workers=len(rejecting))
        lasted_s = self._clock() - self._since
        if lasted_s >= borne_s(self._give_up_after_s, some_start=len(rejecting) < len(workers)):
            raise TrainingError(_describe(newest, rejecting, num_workers=len(workers), lasted_s=lasted_s))


def _serves(worker: Report) -> bool:
    """Whether it serves: it reports a version once it has verified one."""
    return "version" in worker.detail and not rejects(worker.detail)[0]


def _describe(newest: int, rejecting: Sequence[Report], *, num_workers: int, lasted_s: float) -> str:
    first = rejecting[0]
    if len(rejecting) == num_workers:
        who = f"all {num_workers} workers reject" if num_workers > 1 else "the only worker rejects"
    else:
        who = f"{len(rejecting)} of {num_workers} workers reject, and no other serves,"
    return (
        f"{who} version {show(newest)}, for {lasted_s:.0f} s now (weights.give_up_after_s), so no group can arrive. "
        f"{first.part}: {rejects(first.detail)[0]}. What to do: {REMEDY_OF_ALL}"
    )
