"""The thread that looks: whoever shows what it sees never waits for Redis."""

from __future__ import annotations

import threading
import time

from streamrl.errors import TransportError
from streamrl.ops.monitor.poller import Poller
from streamrl.ops.monitor.view import View
from tests.helpers import wait_until


class StuckWatcher:
    """A server that takes the question and does not answer, until it is let go."""

    def __init__(self) -> None:
        self.is_asked, self.let_go = threading.Event(), threading.Event()

    def look(self) -> View:
        self.is_asked.set()
        self.let_go.wait(30)
        raise TransportError("gone")


def test_leaving_does_not_wait_for_an_answer() -> None:
    watcher = StuckWatcher()
    looker = Poller(watcher, period_s=0.01)  # type: ignore[arg-type]
    began = time.monotonic()

    with looker.looking():
        assert watcher.is_asked.wait(10)

    assert time.monotonic() - began < 10
    watcher.let_go.set()
    wait_until(lambda: looker.seen.error.endswith("gone"), description="the thread has looked on")


def test_an_answer_that_is_overdue_is_told_while_it_is_waited_for() -> None:
    now = 0.0
    looker = Poller(StuckWatcher(), period_s=1.0, clock=lambda: now)  # type: ignore[arg-type]
    assert looker.seen.error == ""
    now = 5.0
    assert looker.seen.error == "for 5 s: it accepts the request, but does not reply"
