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

_OVERDUE_S = 2.0
_LEAVE_S = 1.0  # who leaves does not wait until Redis has answered: the thread ends with the process


@dataclass(frozen=True, slots=True)
class Seen:
    view: View | None = None
    error: str = ""  # Redis does not answer now


class Looker:
    """Looks every `period_s`; `seen` is always the last outcome, and tells when an answer is overdue."""

    def __init__(
        self,
        watcher: Watcher,
        *,
        period_s: float,
        on_look: Callable[[Seen], None] | None = None,  # told of each outcome, by the thread that looked
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seen = Seen()
        self._watcher, self._period_s, self._on_look, self._clock = watcher, period_s, on_look, clock
        self._answered_at = clock()
        self._stop = threading.Event()

    @property
    def seen(self) -> Seen:
        silence_s = self._clock() - self._answered_at
        if self._seen.error or silence_s < _OVERDUE_S + self._period_s:
            return self._seen
        return Seen(view=self._seen.view, error=f"for {silence_s:.0f} s: it takes the question, and does not answer")

    @contextmanager
    def looking(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="looks at Redis", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(_LEAVE_S)

    def look(self) -> None:
        try:
            self._seen = Seen(view=self._watcher.look())
            self._answered_at = self._clock()
        except TransportError as error:
            self._seen = Seen(view=self._seen.view, error=f"for {self._clock() - self._answered_at:.0f} s; {error}")
        if self._on_look is not None:
            self._on_look(self._seen)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = self._clock()
            self.look()
            # Never more than half of the time, however large the run.
            took = self._clock() - began
            self._stop.wait(max(took, self._period_s - took))
