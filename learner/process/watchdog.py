"""Ends this rank when its loop is stuck, so that torchrun restarts the ranks from the last checkpoint.

A collective that never returns and a file system that hangs raise nothing. The watchdog is a thread, so it runs while
the loop is stuck; it only ends the process, since a stuck thread cannot be recovered. `guardian` handles a rank that is
stopped entirely.

    anywhere         the limit: longer than Redis may be away, since ranks wait in a collective for one that waits for
                     Redis
    while computing  only other ranks are awaited, and micro-batches take similar times: many times the longest seen in
                     earlier steps, once these had some, but at least a minute
    at the disk      gigabytes are written while others wait: the setting for that

Time in which this thread did not run either does not count: then the whole process was stopped, as in a container that
is frozen for some minutes, and the loop needs time to go on.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NoReturn

from streamrl.learner.process.background import background_loop

EXIT_STALLED = 75
_MIN_LIMIT_S = 60.0
_LONGEST_FACTOR = 20
_MIN_SEEN = 10  # micro-batches of earlier steps
_LATE_S = 10.0  # a check that comes so late: this thread was stopped, too

_Phase = Literal["anywhere", "computing", "at disk"]


class Watchdog:
    def __init__(
        self,
        *,
        limit_s: float,
        at_disk_s: float,  # the limit while `at_disk`
        check_every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        on_stall: Callable[[str], object] | None = None,
    ) -> None:
        self._limit_s, self._at_disk_s = limit_s, at_disk_s
        self._check_every_s, self._clock = check_every_s, clock
        self._on_stall = on_stall or _end_process
        self._last = clock()
        self._phase: _Phase = "anywhere"
        self._num_seen, self._longest_s = 0, 0.0  # intervals between beats while computing
        # Those of earlier steps alone, since within the first one every kind of pass has a slow beginning: a reference
        # may have seen many micro-batches before the policy compiles its first.
        self._num_seen_before = 0
        self._stopped = threading.Event()

    def beat(self) -> None:
        """Report progress; called at every round and between long phases."""
        now = self._clock()
        if self._phase == "computing":
            self._num_seen += 1
            self._longest_s = max(self._longest_s, now - self._last)
        self._last = now

    def computing(self) -> AbstractContextManager[None]:
        """Inside, this rank waits only for its peers, which do the same; it beats after each micro-batch."""
        return self._during("computing")

    def at_disk(self) -> AbstractContextManager[None]:
        """Inside, all ranks write a checkpoint or the finished model, or wait for the one that does."""
        return self._during("at disk")

    @contextmanager
    def _during(self, phase: _Phase) -> Iterator[None]:
        self.beat()
        self._num_seen_before = self._num_seen
        self._phase = phase
        try:
            yield
        finally:
            self.beat()
            self._phase = "anywhere"

    def watching(self) -> AbstractContextManager[None]:
        self.beat()
        return background_loop(self._watch, name="watchdog", stopped=self._stopped)

    def _watch(self) -> None:
        checked, counted_from = time.monotonic(), self._last
        while not self._stopped.wait(self._check_every_s):
            before, checked = checked, time.monotonic()
            if checked - before > self._check_every_s + _LATE_S:
                counted_from = self._clock()
            stalled_s = self._clock() - max(self._last, counted_from)
            if stalled_s > self._bound_s:
                self._on_stall(f"the loop made no progress for {stalled_s:.0f} s: ending this rank for a restart")
                return

    @property
    def _bound_s(self) -> float:
        if self._phase == "at disk":
            return self._at_disk_s
        if self._phase == "anywhere" or self._num_seen_before < _MIN_SEEN:
            return self._limit_s
        return min(self._limit_s, max(_MIN_LIMIT_S, _LONGEST_FACTOR * self._longest_s))


def _end_process(reason: str) -> NoReturn:
    print(reason, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_STALLED)
