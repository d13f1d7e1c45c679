"""Repeated looks at one run, for `top`, the dashboard, the exporter and the launcher. A `Watcher` notices a silent part
sooner than clocks would, and independently of other machines' clocks. A `Poller` looks in a thread, so that the display
never waits for Redis.

Blocks on the server, within the client's limits; TransportError if it does not answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import redis

from streamrl.errors import TransportError, UserError
from streamrl.ops.monitor.build import build_view
from streamrl.ops.monitor.history import History
from streamrl.ops.monitor.remains import FolderWatcher, Remains, view_of
from streamrl.ops.monitor.runs import Opened, Target, find_target, opened
from streamrl.ops.monitor.view import View
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.telemetry.progress import Liveness

_RECORDS = 60
_OVERDUE_S = 2.0
_JOIN_S = 1.0  # do not wait longer for Redis on exit: the thread ends with the process


@dataclass(frozen=True, slots=True)
class LatestView:
    view: View | None = None
    error: str = ""  # why Redis does not answer now


class Watching(Protocol):
    """One run, looked at repeatedly. TransportError if it cannot be seen now."""

    @property
    def history(self) -> History: ...

    def look(self) -> View: ...


def watch(source: Opened | Remains) -> Watching:
    if isinstance(source, Remains):
        return FolderWatcher(source)
    return Watcher(source.client, source.keys, server=source.server)


class ConnectingWatcher:
    """A run whose Redis may start later: each look tries to connect until one succeeds, and anew once a run that only
    its folder showed goes on. Closes what it opened."""

    def __init__(self, target: Target) -> None:
        self.history = History()
        self._target, self._stack = target, ExitStack()
        self._watching: Watching | None = None
        self._goes_on = False  # after its folder showed that it had ended

    def look(self) -> View:
        if self._watching is None:
            self._watching = self._connect()
            self.history = self._watching.history
        try:
            return self._watching.look()
        except TransportError:
            if isinstance(self._watching, FolderWatcher):
                self._stack.close()
                self._watching, self._goes_on = None, True
            raise

    def _connect(self) -> Watching:
        target = self._target
        try:
            if self._goes_on:  # an embedded server that was not running had no URL
                target = find_target(target.folder, target.url, target.run)
            return watch(self._stack.enter_context(opened(target, caller_retries=True)))
        except UserError as error:
            if not self._goes_on:
                raise
            raise TransportError(str(error)) from error  # a server that has ended again may start again

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def look_once(source: Opened | Remains) -> View:
    """Look once: only the latest steps, enough for a short reward curve and the pace, and all validations, which most
    of these steps are without."""
    if isinstance(source, Remains):
        return view_of(source, now=time.time())
    seen = snapshot(source.client, source.keys, num_records=_RECORDS, num_events=NUM_EVENTS)
    history = History.of_recent(seen.records, source.client, source.keys)
    return build_view(seen, run_name=source.name, server=source.server, history=history)


class Poller:
    """Looks every `period_s`; `seen` is always the last outcome, and reports an overdue answer."""

    def __init__(
        self,
        watcher: Watching,
        *,
        period_s: float,
        on_look: Callable[[View], object] = lambda view: None,  # called with each view, in the polling thread
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seen = LatestView()
        self._watcher, self._period_s, self._on_look, self._clock = watcher, period_s, on_look, clock
        self._answered_at = clock()
        self._stop = threading.Event()

    @property
    def seen(self) -> LatestView:
        silence_s = self._clock() - self._answered_at
        if self._seen.error or silence_s < _OVERDUE_S + self._period_s:
            return self._seen
        return LatestView(
            view=self._seen.view, error=f"for {silence_s:.0f} s: it accepts the request, but does not reply"
        )

    @contextmanager
    def looking(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="redis poller", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(_JOIN_S)

    def look(self) -> None:
        try:
            view = self._watcher.look()
            self._seen, self._answered_at = LatestView(view=view), self._clock()
            self._on_look(view)
        except TransportError as error:
            self._seen = LatestView(
                view=self._seen.view, error=f"for {self._clock() - self._answered_at:.0f} s; {error}"
            )

    def _run(self) -> None:
        while not self._stop.is_set():
            began = self._clock()
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - it must be seen, instead of a display that stands still
                self._seen = LatestView(view=self._seen.view, error=f"in a form that can be shown: {error!r}")
            # Look at most half of the time, however large the run.
            took = self._clock() - began
            self._stop.wait(max(took, self._period_s - took))


SILENT_S = 2.2  # parts report every second; they show as silent after this, and count as gone later
_PATIENCE_S = 0.5
NUM_EVENTS = 5  # of the journal: enough to include why a run failed, even after further operator commands


class Watcher:
    def __init__(self, client: redis.Redis, keys: Keys, *, server: str) -> None:
        self.history = History()
        self.view: View | None = None  # the last one that Redis answered
        self._client, self._keys, self._server = client, keys, server
        self._liveness = Liveness()
        self._was_running = False

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
        self._was_running |= self.view.run.state == "running"
        return self.view

    @property
    def is_over(self) -> bool:
        """The run was seen running, and no longer runs. One that ended before the first look may be resumed any
        time."""
        return self._was_running and self.view is not None and self.view.run.state != "running"
