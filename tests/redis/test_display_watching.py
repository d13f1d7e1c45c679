"""The launcher's display, fed from a real Redis: a worker that was killed is never frame at work."""

from __future__ import annotations

import io
import time

from rich.console import Console

from streamrl.ops.launch.display import Frame, render
from streamrl.ops.monitor.poller import Watcher
from tests.helpers import wait_until
from tests.redis.monitor_world import Watched


def launch(run: Watched) -> Watcher:
    """What a launcher watches with, from its first look."""
    return Watcher(run.world.client, run.world.keys, server="here")


def row_of_worker(watcher: Watcher) -> str:
    """Its line on the display now."""
    frame = Frame(title="x", phase="", began=time.time(), view=watcher.look(), footer="")
    console = Console(width=100, height=24, file=io.StringIO(), record=True)
    console.print(render(frame, now=time.time(), width=100, height=24))
    return next(line for line in console.export_text().splitlines() if line.startswith("│ doomed"))


def test_a_worker_is_silent_seconds_after_it_was_killed(run: Watched) -> None:
    run.learner("train", state="working")
    run.worker(name="doomed")
    watcher = launch(run)
    assert "generate" in row_of_worker(watcher)
    wait_until(lambda: "SILENT" in row_of_worker(watcher), description="it is silent")
    assert "generate" not in row_of_worker(watcher)


def test_the_next_launch_shows_it_silent_at_its_first_look_until_it_reports_again(run: Watched) -> None:
    run.learner("train", state="working")
    run.worker(name="doomed", ago_s=60.0)
    watcher = launch(run)
    assert "SILENT 60s" in row_of_worker(watcher)
    run.worker(name="doomed")
    assert "generate" in row_of_worker(watcher)
