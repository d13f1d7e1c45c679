"""The newest published version, which rank 0 looks after: Redis holds it, and not all workers reject it.

Blocks on Redis, within its limits, every few seconds at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from streamrl.learner.process.lease import redis_may_be_away
from streamrl.learner.publishing.rejections import Rejections
from streamrl.telemetry.progress import Report

if TYPE_CHECKING:
    from streamrl.learner.publishing.shipping import Published

_CHECK_EVERY_S = 5.0

log = structlog.get_logger(__name__)


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
