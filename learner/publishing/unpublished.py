"""The publisher of a replay, which publishes nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import count

from streamrl.learner.publishing.shipping import Published
from streamrl.versions import make_version


class Unpublished:
    """A publisher that publishes nothing and reports every version as published at once.

    Group staleness is therefore measured against the recorded run's versions, which are known from the start.
    """

    busy = announcing = failing = False

    def __init__(self, term: int) -> None:
        self._versions = (make_version(term, n) for n in count())
        self.latest: Published | None = None

    def working(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, step: int, *, whole: bool = False) -> None:
        self.latest = Published(version=next(self._versions), step=step, num_bytes=0, changed_fraction=0.0)

    def settle(self, *, wait_s: float = 0.0) -> Published | None:
        return None
