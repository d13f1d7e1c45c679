"""A run that was started elsewhere: on this machine by another program, or by `streamrl up`.

Its folder and its Redis show its state. It is ended by an operator's command, as in `streamrl stop`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from streamrl.errors import ResourceError, TransportError
from streamrl.ops.monitor.evidence import is_running, is_taken_up
from streamrl.ops.monitor.poller import look_once
from streamrl.ops.monitor.remains import Remains, read_remains
from streamrl.ops.monitor.runs import Opened, find_target, opened
from streamrl.ops.monitor.view import RunStatus, View
from streamrl.ops.python.launcher import EndOfRun
from streamrl.protocol.transport import operator as orders

_LOOK_EVERY_S = 0.5
# While a Redis that was there is away, or a learner that was killed is not there again; the default patience of the
# run's own parts.
_PATIENCE_S = 120.0


def look_at(folder: Path) -> View:
    """Return the state of the run in this folder, as in `streamrl status`."""
    with _opened(folder) as source:
        return look_once(source)


def end_in_view(view: View, folder: Path) -> EndOfRun | None:
    """Return how the run has ended, as its Redis shows it; None if it goes on. Redis does not know of a learner that is
    starting, nor that one was killed. ResourceError if it holds nothing of the run; a learner may restore that."""
    if is_taken_up(view):
        return None
    if view.run.state == "absent":
        raise ResourceError(f"Redis at {view.redis.server} holds nothing of run {view.run.name!r} any more")
    return _end_of(view.run, has_crashed=is_running(view) and _was_killed(view, folder))


def _was_killed(view: View, folder: Path) -> bool:
    """Return whether nobody holds the run or restarts its learner, whose process is gone."""
    has_launcher = any(part.role == "launcher" and part.alive for part in view.others)
    return view.learner.holder is None and not has_launcher and read_remains(folder).state == "crashed"


def _end_of(run: RunStatus | Remains, *, has_crashed: bool) -> EndOfRun | None:
    if has_crashed:
        error = f"run {run.name!r} crashed at step {run.step}; streamrl.start resumes it"
        return EndOfRun(state="failed", error=error)
    match run.state:
        case "finished" | "stopped" | "failed":
            error = run.error or f"run {run.name!r} failed at step {run.step}"
            summary = run.summary if isinstance(run, Remains) else None
            return EndOfRun(state=run.state, steps=run.step, summary=summary, error=error)
    return None


def _opened(folder: Path) -> AbstractContextManager[Opened | Remains]:
    return opened(find_target(folder, None, None))


class Attached:
    phase = ""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._away_since: float | None = None  # over all waits, since short ones may follow each other
        self._killed_since: float | None = None  # likewise
        with _opened(folder) as source:
            run = source if isinstance(source, Remains) else look_once(source).run
        if run.state == "absent":
            raise ResourceError(f"the run in {folder} has not started; streamrl.start starts it")
        self.name = run.name

    @property
    def ended(self) -> EndOfRun | None:
        with _opened(self._folder) as source:
            if isinstance(source, Remains):  # without a view, which takes all its curves
                return _end_of(source, has_crashed=source.state == "crashed")
            view = look_once(source)
        ended = end_in_view(view, self._folder)
        if ended is None or not is_running(view):
            self._killed_since = None
            return ended
        # torchrun, or whoever started `learn`, may be about to start the killed learner again.
        if self._killed_since is None:
            self._killed_since = self._clock()
        return ended if self._clock() >= self._killed_since + _PATIENCE_S else None

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
        with _opened(self._folder) as source:
            if isinstance(source, Remains):
                return
            orders.set_control(source.client, source.keys, "stop", by=orders.operator())
        if not self.wait(timeout_s):
            raise TimeoutError(f"run {self.name!r} has not stopped in {timeout_s:g} s; the stop command stays in force")
