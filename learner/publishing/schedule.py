"""When the loop publishes weights, and how far training may run ahead of them.

    step made ──► in flight? ──── no ──► send ──┐
                       │ yes                    ├─► ahead of the workers by more than lag.max_steps? ─ yes ─► wait
                       └── left alone ──────────┘                                                    failed: no step

Training waits for the version only; its anchor may still be in flight. If a version fails and training may not run
further ahead, the loop makes rounds without a step, and retries in each.

Waits for the publisher's thread in slices of a second, on all ranks alike, and checks before each whether to stop:
ending the learner need not wait for a store that hangs. `weights.give_up_after_s` ends all other waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from streamrl.errors import NotPublished
from streamrl.learner.metrics.record import Timers
from streamrl.learner.publishing.publish import Publishing
from streamrl.learner.publishing.shipping import Published
from streamrl.telemetry.progress import Progress, Wait
from streamrl.versions import show

_SLICE_S = 1.0


class Director(Protocol):
    """The conductor's interface for publishing."""

    def note_published(self, published: Published) -> None: ...

    def must_stop(self) -> bool: ...


class PublishSchedule:
    def __init__(
        self,
        *,
        publisher: Publishing,
        max_ahead: int,  # steps
        conductor: Director,
        progress: Progress,
        timers: Timers,
    ) -> None:
        self._publisher, self._max_ahead, self._conductor = publisher, max_ahead, conductor
        self._progress, self._timers = progress, timers
        self._not_published: NotPublished | None = None

    @property
    def latest(self) -> Published | None:
        return self._publisher.latest

    def settle(self, *, wait_s: float = 0.0) -> None:
        """Record what was published since the last call. Raises NotPublished if that has failed for too long."""
        if self._not_published is not None:
            raise self._not_published
        published = self._publisher.settle(wait_s=wait_s)
        if published is not None:
            self._conductor.note_published(published)
            self._progress.note(version=show(published.version))

    def retry(self, step: int) -> None:
        """Retry a failed publish with the current weights."""
        if self._publisher.failing:
            self._publisher.begin(step)

    def send_whole(self, step: int) -> None:
        if not self._publisher.busy:
            self._publisher.begin(step, whole=True)

    def send(self, step: int) -> bool:
        """Publish now and wait for it; False if it failed, or on a stop before."""
        with self._publishing():
            self._publisher.begin(step)
            return self.wait() and not self._publisher.failing

    def send_in_background(self, step: int) -> None:
        """Publish while training continues, unless that would take it more than lag.max_steps ahead of the workers'
        weights.

        A version still in flight is not waited for either: the next step's weights are published instead. If that
        has failed for too long, the next `settle` says so, after this step is recorded.
        """
        try:
            with self._publishing():
                self._send_unless_busy(step)
        except NotPublished as error:
            self._not_published = error

    def _send_unless_busy(self, step: int) -> None:
        self.settle()
        if self._publisher.busy and self._is_far_ahead(step):
            self.wait()
        if not self._publisher.busy:
            self._publisher.begin(step)
        if self._is_far_ahead(step):
            self._wait_while(lambda: self._publisher.announcing)

    def keeps_up(self, step: int) -> bool:
        """Whether the next step may be made, once the version in flight is published.

        False if that failed, or on a stop before: training would run too far ahead.
        """
        if not self._is_far_ahead(step):
            return True
        with self._publishing():
            if not (self._publisher.announcing or self._publisher.failing) and self.wait():
                self._publisher.begin(step)  # nothing was sent since, because an older version's anchor was in flight
            self._wait_while(lambda: self._publisher.announcing)
        return not self._is_far_ahead(step)

    def wait(self) -> bool:
        """Wait until nothing is in flight; False on a stop before."""
        return self._wait_while(lambda: self._publisher.busy)

    def _publishing(self) -> AbstractContextManager[None]:
        self._progress.working("publish")
        return self._timers.measure("publish")

    def _wait_while(self, under_way: Callable[[], bool]) -> bool:
        with self._progress.waiting(Wait.WEIGHTS):
            while under_way():
                if self._conductor.must_stop():
                    return False
                self.settle(wait_s=_SLICE_S)
        return True

    def _is_far_ahead(self, step: int) -> bool:
        return self.latest is None or step - self.latest.step > self._max_ahead
