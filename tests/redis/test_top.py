"""`streamrl top` in a real terminal, watching a real Redis."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.ops.cli.watching.status import top as top_command
from streamrl.ops.monitor.poller import SILENT_S
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from tests.redis.monitor_world import Watched
from tests.redis.run_world import RunWorld
from tests.terminal_world import TerminalProgram, in_terminal

_WORKER = """
import sys, threading
from streamrl.config import schema
from streamrl.telemetry.progress import Progress
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.reports import write_reports
progress = Progress(part=sys.argv[3], role="worker")
progress.working("generate")
with connect(sys.argv[1], schema.Redis()) as client, write_reports(client, Keys(sys.argv[2]), progress):
    print("reports", flush=True)
    threading.Event().wait(60)
"""


@contextmanager
def top(run: Watched, *, width: int = 80, height: int = 24, **environment: str) -> Iterator[TerminalProgram]:
    target = ["top", "--redis", run.world.url, "--run", run.world.keys.name]
    with run.alive(), in_terminal(target, width=width, height=height, **environment) as program:
        yield program


@contextmanager
def living_worker(run: Watched, part: str) -> Iterator[subprocess.Popen[str]]:
    """A process that reports as a worker does."""
    command = [sys.executable, "-c", _WORKER, run.world.url, run.world.keys.name, part]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "reports\n"
            yield process
        finally:
            process.kill()


async def busy(run: Watched, *, workers: int = 30) -> None:
    await run.world.train_steps(2)
    for reward in (0.1, 0.4, 0.9):
        run.world.learner.step += 1
        run.record(**{"train_rollouts/rewards": reward, "policy/ess": 0.98})
    run.learner("train", state="working")
    for number in range(workers):
        run.worker(name=f"host-{number:03}", detail={"tokens_per_s": 100 + number, "in_flight": 3, "step": 0})


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
async def test_the_whole_run_is_on_the_screen_at_any_size(run: Watched, width: int, height: int) -> None:
    await busy(run)
    with top(run, width=width, height=height) as program:
        shown = program.shows("host-000", "tokens/s", "q quit")
        lines = shown.splitlines()
        assert lines[0].startswith(run.world.keys.name)
        for word in ("running", "step 5", "learner", "reward 0.900", "ESS 0.980", "stream", "weights", "workers"):
            assert word in shown, shown
        assert any(mark in shown for mark in "▁▂▃▄▅▆▇█")
        assert ("host-029" in shown) == (height == 50)
        assert ("delivered" in shown) == (width == 200)
        program.press("q")
        assert program.process.wait(60) == 0


async def test_without_colour_it_is_all_there_and_bare(run: Watched) -> None:
    await busy(run)
    with top(run, NO_COLOR="1") as program:
        program.shows("host-000")
        assert not re.search(rb"\x1b\[[0-9;]*(3[0-7]|38;5|9[0-7])[0-9;]*m", program.raw)
    with top(run) as program:
        program.shows("host-000")
        assert re.search(rb"\x1b\[[0-9;]*3[0-7][0-9;]*m", program.raw)


async def test_keys_sort_filter_freeze_and_open(run: Watched) -> None:
    await busy(run, workers=4)
    with top(run) as program:
        program.shows("host-000", "by name")
        program.press("sss")
        lines = program.shows("by tokens/s").splitlines()
        assert next(line[:8] for line in lines if line.startswith("host-")) == "host-003"
        program.press("r")
        program.shows("by tokens/s, reversed")
        program.press("/002\r")
        program.shows("1 of 4 match '002'")
        program.press("\r")
        program.shows("worker/host-002", "process", "tokens_per_s")
        program.press("\x1b")
        program.shows("1 of 4 match")
        program.press("\x1b")
        program.hides("match")
        program.press("f")
        program.shows("FROZEN")
        run.worker(name="late")
        program.press("f")
        program.shows("late")
        program.press("?")
        program.shows("sort by the next column")


async def test_a_group_opens_with_its_samples(run: Watched) -> None:
    run.world.learner.plan()
    await run.world.answer_all()
    run.learner("train", state="working")
    run.worker()
    with top(run) as program:
        program.shows("generate")
        program.press("g")
        program.shows("ticket", "0.500", "worker/test")
        program.press("\r")
        program.shows("ticket 5   ", "worker/test", "sample 1   reward 0 (exact 0)", "versions 1.0 (4 tokens)")


def test_a_worker_that_is_killed_and_comes_back_is_seen(run: Watched) -> None:
    run.learner("train", state="working")
    with living_worker(run, "worker/doomed") as doomed, top(run) as program:
        program.shows("doomed", "generate")
        doomed.kill()
        program.shows("SILENT")
        with living_worker(run, "worker/doomed"):
            program.hides("SILENT")


def test_who_is_silent_is_shown_so_within_3_s_as_far_as_it_depends_on_us() -> None:
    [every_s] = [option.default for option in top_command.params if option.name == "every_s"]
    assert SILENT_S + every_s < 3.0


def test_a_terminal_that_does_not_say_how_large_it_is_is_taken_for_a_usual_one(run: Watched) -> None:
    run.healthy()
    with top(run) as program:
        program.shows("generate")
        program.forget_size()
        program.press("w")
        program.shows("nothing holds it back")


def test_it_says_plainly_that_the_learner_is_gone(run: Watched) -> None:
    run.learner("train", state="working")
    run.worker()
    target = ["top", "--redis", run.world.url, "--run", run.world.keys.name]
    with in_terminal(target) as program:
        program.shows("step 0")
        run.world.client.delete(run.world.keys.lease)
        program.shows("stalled: the learner is gone", "GONE: silent for")
        program.press("w")
        program.shows("its lease has expired", "from the last checkpoint")


def test_it_says_plainly_that_redis_is_gone_and_goes_on_when_it_is_back(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis.start(tmp_path / "redis"))
        client = stack.enter_context(connect(server.url, schema.Redis()))
        async_client = connect_async(server.url, schema.Redis())
        world = RunWorld(tmp_path, client=client, async_client=async_client, keys=Keys("x"), url=server.url)
        run = Watched(world)
        run.healthy()
        program = stack.enter_context(top(run))
        program.shows("generate")
        server.stop()
        program.shows("REDIS IS GONE", "below is the last state seen", "generate")
        stack.enter_context(EmbeddedRedis.start(tmp_path / "redis"))
        program.hides("REDIS IS GONE")


async def test_it_follows_the_size_of_the_window(run: Watched) -> None:
    await busy(run)
    with top(run) as program:
        program.shows("host-000")
        program.resize(width=140, height=50)
        program.shows("host-029", "loads host")
        assert max(map(len, program.lines())) <= 140


def test_without_a_terminal_it_says_what_to_use(run: Watched) -> None:
    command = [sys.executable, "-m", "streamrl.ops.cli.main", "top", "--redis", run.world.url, "--run", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
    assert (done.returncode, "streamrl status" in done.stderr) == (2, True)


def test_on_a_terminal_that_cannot_redraw_it_says_what_to_use(run: Watched) -> None:
    with top(run, TERM="dumb") as program:
        program.shows("TERM=dumb", "streamrl status")
        assert program.process.wait(60) == 2
