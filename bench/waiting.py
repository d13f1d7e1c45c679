"""Where a learner's Redis time goes: waiting for groups that do not exist yet, or calls in progress.

    read starts ──── a group arrives ──── read returns         the stream was empty: starved until the arrival
    arrival ── read starts ────────────── read returns         an ordinary call

The id of a group's entry tells when it arrived, in milliseconds of the server's clock, which must be ours; ambiguous
milliseconds count as starved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.types import Entry, Orders, entry_order
from streamrl.protocol.wire.ticket import Purpose, Ticket


class TimedStream(LearnerStream):
    """Adds up the time of a step's calls and its commit."""

    calls_s = 0.0  # all but `starved_s`
    starved_s = 0.0  # in reads, while the stream was empty

    def read(self, purpose: Purpose, *, after: str, count: int, block_ms: int) -> list[Entry]:
        requested_at = time.time()
        found = super().read(purpose, after=after, count=count, block_ms=block_ms)
        answered_at = time.time()
        starved_s = starved(requested_at, answered_at, found)
        self.starved_s += starved_s
        self.calls_s += answered_at - requested_at - starved_s
        return found

    def fetch(self, purpose: Purpose, ids: Sequence[str]) -> list[Entry | None]:
        with self._timed():
            return super().fetch(purpose, ids)

    def orders(self) -> Orders:
        with self._timed():
            return super().orders()

    def issue(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        with self._timed():
            return super().issue(tickets)

    def commit(self, *, step: int, cursor: str, trim_below: str, ended: Sequence[str] = ()) -> None:
        with self._timed():
            super().commit(step=step, cursor=cursor, trim_below=trim_below, ended=ended)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.calls_s += time.perf_counter() - began


def starved(requested_at: float, answered_at: float, found: Sequence[Entry]) -> float:
    """Return the seconds of a read during which the stream was empty.

    `requested_at`, `answered_at`: when the read began and ended.
    """
    if not found:
        return answered_at - requested_at
    milliseconds, _ = entry_order(found[0].id)
    came_by = (milliseconds + 1) / 1e3
    return max(0.0, min(came_by, answered_at) - requested_at)
