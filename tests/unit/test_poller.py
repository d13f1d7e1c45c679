"""The thread that looks: whoever shows what it sees never waits for Redis."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from streamrl.errors import TransportError
from streamrl.ops.monitor.poller import ConnectingWatcher, Poller, Watching, watch
from streamrl.ops.monitor.remains import read_remains
from streamrl.ops.monitor.runs import find_target
from streamrl.ops.monitor.view import View
from tests.helpers import wait_until
from tests.launch_world import make_view
from tests.run_folders import make_folder


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


def test_an_answer_that_cannot_be_shown_is_told_and_the_next_one_is_shown() -> None:
    view = make_view()
    mended = threading.Event()

    class Broken:
        def look(self) -> View:
            if not mended.is_set():
                raise KeyError("no such part")
            return view

    looker = Poller(Broken(), period_s=0.01)  # type: ignore[arg-type]
    with looker.looking():
        wait_until(lambda: "KeyError('no such part')" in looker.seen.error, description="it is told")
        mended.set()
        wait_until(lambda: looker.seen.view is view and not looker.seen.error, description="the thread goes on")


@pytest.mark.parametrize("connects", [False, True])
def test_a_folder_that_is_moved_away_is_told_and_watched_again_once_it_is_back(tmp_path: Path, connects: bool) -> None:
    folder = make_folder(tmp_path, "big", "finished")
    watcher: Watching = watch(read_remains(folder))
    if connects:
        watcher = ConnectingWatcher(find_target(folder, None, None))
    looker = Poller(watcher, period_s=0.01)
    with looker.looking():
        wait_until(lambda: looker.seen.view is not None, description="the run is seen")
        folder.rename(tmp_path / "away")
        wait_until(lambda: "it does not exist" in looker.seen.error, description="it is told that the folder is gone")
        assert looker.seen.view is not None
        (tmp_path / "away").rename(folder)
        wait_until(lambda: not looker.seen.error, description="the folder is read again")
