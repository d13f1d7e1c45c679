"""A run that was started elsewhere: on this machine by another program, or by `streamrl up`.

Its folder and its Redis show its state. It is ended by an operator's command, as in `streamrl stop`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from streamrl.errors import ResourceError, TransportError
from streamrl.ops.monitor.poller import look_once
from streamrl.ops.monitor.remains import Remains
from streamrl.ops.monitor.runs import find_target, opened
from streamrl.ops.monitor.view import RunStatus, View
from streamrl.ops.python.launcher import EndOfRun
from streamrl.protocol.transport import operator as orders

_LOOK_EVERY_S = 0.5
_PATIENCE_S = 120.0  # while a Redis that was there is away; the default patience of the run's own parts


def look_at(folder: Path) -> View:
    """Return the state of the run in this folder, as in `streamrl status`."""
    with opened(find_target(folder, None, None)) as opened_run:
        return look_once(opened_run)


def _find(folder: Path) -> RunStatus | Remains:
    """Return the run as its Redis shows it, or what its folder records: without a view, which takes all its curves."""
    with opened(find_target(folder, None, None)) as source:
        return source if isinstance(source, Remains) else look_once(source).run


class Attached:
    phase = ""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._away_since: float | None = None  # over all waits, since short ones may follow each other
        run = _find(folder)
        if run.state == "absent":
            raise ResourceError(f"the run in {folder} has not started; streamrl.start starts it")
        self.name = run.name

    @property
    def ended(self) -> EndOfRun | None:
        run = _find(self._folder)
        match run.state:
            case "finished" | "stopped" | "failed":
                error = run.error or f"run {run.name!r} failed at step {run.step}"
                summary = run.summary if isinstance(run, Remains) else None
                return EndOfRun(state=run.state, steps=run.step, summary=summary, error=error)
            case "crashed":
                error = f"run {run.name!r} crashed at step {run.step}; streamrl.start resumes it"
                return EndOfRun(state="failed", error=error)
        return None

    def wait(self, timeout_s: float | None) -> bool:
        deadline = self._clock() + timeout_s if timeout_s is not None else float("inf")
        while not self._has_ended():
            left_s = deadline - self._clock()
            if left_s <= 0:
                return False
            time.sleep(min(_LOOK_EVERY_S, left_s))
        return True

    def _has_ended(self) -> bool:
        """Raises if nothing has answered for too long."""
        try:
            ended = self.ended
        except (ResourceError, TransportError):
            if self._away_since is None:
                self._away_since = self._clock()
            if self._clock() > self._away_since + _PATIENCE_S:
                raise
            return False
        self._away_since = None
        return ended is not None

    def end(self, timeout_s: float | None) -> None:
        with opened(find_target(self._folder, None, None)) as opened_run:
            if isinstance(opened_run, Remains):
                return
            orders.set_control(opened_run.client, opened_run.keys, "stop", by=orders.operator())
        if not self.wait(timeout_s):
            raise TimeoutError(f"run {self.name!r} has not stopped in {timeout_s:g} s; the stop command stays in force")
