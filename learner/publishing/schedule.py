"""When the loop's weights go out, and how far training may run ahead of them.

    step made ──► on its way yet? ── no ──► send ──┐
                       │ yes                       ├─► ahead of the workers by more than lag.max_steps? ─ yes ─► wait
                       └── left alone ─────────────┘                                                    failed: no step

What workers wait for is the version; its anchor may still be on its way when training goes on. Where a version failed
that training must not run further ahead of, the loop makes rounds without a step, and sends again in each.

Waits in slices of a second for the publisher's thread, all ranks alike, and asks before each whether to stop: whoever
ends the learner need not wait for a store that hangs. `weights.give_up_after_s` ends what nobody else ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from streamrl.learner.metrics.record import Timers
from streamrl.learner.publishing.publish import Publishing
from streamrl.learner.publishing.shipping import Published
from streamrl.telemetry.progress import Progress, Wait
from streamrl.versions import show

_SLICE_S = 1.0


class Director(Protocol):
    """What publishing needs of the loop's conductor."""

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

    @property
    def latest(self) -> Published | None:
        return self._publisher.latest

    def settle(self, *, wait_s: float = 0.0) -> None:
        """Note what got out since the last look."""
        published = self._publisher.settle(wait_s=wait_s)
        if published is not None:
            self._conductor.note_published(published)
            self._progress.note(version=show(published.version))

    def retry(self, step: int) -> None:
        """What failed is tried again, with the weights as they are now."""
        if self._publisher.failing:
            self._publisher.begin(step)

    def send_whole(self, step: int) -> None:
        if not self._publisher.busy:
            self._publisher.begin(step, whole=True)

    def send(self, step: int) -> bool:
        """Now, and wait for it; False when it failed, or when told to stop before."""
        with self._publishing():
            self._publisher.begin(step)
            return self.wait() and not self._publisher.failing

    def send_beside(self, step: int) -> None:
        """While training goes on, unless that would take it further ahead of the workers' weights than lag.max_steps.

        A version that is still on its way is not waited for either: the next step's weights go out instead.
        """
        with self._publishing():
            self.settle()
            if self._publisher.busy and self._is_far_ahead(step):
                self.wait()
            if not self._publisher.busy:
                self._publisher.begin(step)
            if self._is_far_ahead(step):
                self._wait_while(lambda: self._publisher.announcing)

    def keeps_up(self, step: int) -> bool:
        """Whether the next step may be made, once the version on its way is out. False when it failed, or when told
        to stop before: training would run too far ahead."""
        if not self._is_far_ahead(step):
            return True
        with self._publishing():
            if not (self._publisher.announcing or self._publisher.failing) and self.wait():
                self._publisher.begin(step)  # none was sent since, as the anchor of an older one was on its way
            self._wait_while(lambda: self._publisher.announcing)
        return not self._is_far_ahead(step)

    def wait(self) -> bool:
        """Until nothing is on its way; False when told to stop before."""
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
