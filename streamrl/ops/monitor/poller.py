"""Looking at one run again and again, for `top`, the dashboard, the exporter and the launcher: a `Watcher`, which sees
sooner than a clock could tell that a part has gone silent, and whatever other machines' clocks say. A `Poller` does it
in a thread, so that whoever shows the run never waits for Redis.

Blocks as long as the server takes, within the client's limits; TransportError when it does not answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import redis

from streamrl.errors import TransportError
from streamrl.ops.monitor.build import build_view
from streamrl.ops.monitor.history import History
from streamrl.ops.monitor.remains import FolderWatcher, Remains, view_of
from streamrl.ops.monitor.runs import Opened, Target, opened
from streamrl.ops.monitor.view import View
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.telemetry.progress import Liveness

_RECORDS = 60
_OVERDUE_S = 2.0
_LEAVE_S = 1.0  # who leaves does not wait until Redis has answered: the thread ends with the process


@dataclass(frozen=True, slots=True)
class Seen:
    view: View | None = None
    error: str = ""  # Redis does not answer now


class Watching(Protocol):
    """One run, looked at again and again. TransportError when it cannot be seen now."""

    @property
    def history(self) -> History: ...

    def look(self) -> View: ...


def watch(there: Opened | Remains) -> Watching:
    if isinstance(there, Remains):
        return FolderWatcher(there)
    return Watcher(there.client, there.keys, server=there.server)


class Awaited:
    """A run whose Redis may come later: each look tries to reach it, until one has. It closes what it opened."""

    def __init__(self, target: Target) -> None:
        self.history = History()
        self._target, self._parts = target, ExitStack()
        self._there: Watching | None = None

    def look(self) -> View:
        if self._there is None:
            self._there = watch(self._parts.enter_context(opened(self._target, may_come=True)))
            self.history = self._there.history
        return self._there.look()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._parts.close()


def look_once(there: Opened | Remains) -> View:
    """For who asks now and then: the latest steps alone, for a short curve of the reward, and the pace."""
    if isinstance(there, Remains):
        return view_of(there, now=time.time())
    seen = snapshot(there.client, there.keys, num_records=_RECORDS, num_events=NUM_EVENTS)
    return build_view(seen, run_name=there.name, server=there.server)


class Poller:
    """Looks every `period_s`; `seen` is always the last outcome, and tells when an answer is overdue."""

    def __init__(
        self,
        watcher: Watching,
        *,
        period_s: float,
        on_look: Callable[[View], object] = lambda view: None,  # told of each answer, by the thread that looked
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
            view = self._watcher.look()
            self._seen, self._answered_at = Seen(view=view), self._clock()
            self._on_look(view)
        except TransportError as error:
            self._seen = Seen(view=self._seen.view, error=f"for {self._clock() - self._answered_at:.0f} s; {error}")

    def _run(self) -> None:
        while not self._stop.is_set():
            began = self._clock()
            self.look()
            # Never more than half of the time, however large the run.
            took = self._clock() - began
            self._stop.wait(max(took, self._period_s - took))


SILENT_S = 2.2  # parts report every second; shown as silent at once, taken for gone later
_PATIENCE_S = 0.5
NUM_EVENTS = 5  # of the journal: whatever an operator still says, why a run failed is among them


class Watcher:
    def __init__(self, client: redis.Redis, keys: Keys, *, server: str) -> None:
        self.history = History()
        self.view: View | None = None  # of the last time that Redis answered
        self._client, self._keys, self._server = client, keys, server
        self._liveness = Liveness()
        self._has_begun = False

    def look(self) -> View:
        seen = snapshot(self._client, self._keys, num_records=1, num_events=NUM_EVENTS, give_up_after_s=_PATIENCE_S)
        self.history.refresh(self._client, self._keys)
        self.view = build_view(
            seen,
            run_name=self._keys.name,
            server=self._server,
            history=self.history,
            ages=self._liveness.ages(seen.reports, at=seen.at),
            silent_s=SILENT_S,
        )
        self._has_begun |= self.view.run.state == "running"
        return self.view

    @property
    def is_over(self) -> bool:
        """The run was seen running, and is no more. What ended before we looked may be taken up any moment."""
        return self._has_begun and self.view is not None and self.view.run.state != "running"
