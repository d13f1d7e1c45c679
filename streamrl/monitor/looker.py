"""A thread that looks at a run again and again, so that whoever shows it never waits for Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from streamrl.errors import TransportError
from streamrl.monitor.view import View
from streamrl.monitor.watcher import Watcher


@dataclass(frozen=True, slots=True)
class Seen:
    view: View | None = None
    error: str = ""  # Redis does not answer now


class Looker:
    """Looks every `period_s`; `seen` is always the last outcome."""

    def __init__(self, watcher: Watcher, *, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seen = Seen()
        self._watcher, self._period_s, self._clock = watcher, period_s, clock
        self._gone_since: float | None = None
        self._stop = threading.Event()

    @contextmanager
    def looking(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="looks at Redis", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def look(self) -> None:
        try:
            self.seen = Seen(view=self._watcher.look())
            self._gone_since = None
        except TransportError as error:
            now = self._clock()
            self._gone_since = self._gone_since or now
            self.seen = Seen(view=self.seen.view, error=f"for {now - self._gone_since:.0f} s; {error}")

    def _run(self) -> None:
        while not self._stop.is_set():
            began = self._clock()
            self.look()
            # Never more than half of the time, however large the run.
            took = self._clock() - began
            self._stop.wait(max(took, self._period_s - took))
