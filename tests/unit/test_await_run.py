"""A worker's wait for its run: as long as a learner shows itself, and no longer than that makes sense without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from streamrl.errors import OtherSchema, ResourceError
from streamrl.protocol.transport.types import RunInfo, RunState
from streamrl.telemetry.progress import Progress
from streamrl.workers.follow_run import await_run
from tests.feed_world import Clock

HOUR_S = 3600.0


def made(state: RunState) -> RunInfo:
    return RunInfo(uid="uid", name="run", term=1, config_json="{}", fingerprint="f", state=state)


class Run:
    """A double of the stream; what it tells goes by the time since the wait began."""

    def __init__(self, state: Callable[[float], RunState | None], report: Callable[[float], bytes | None]) -> None:
        self.clock = Clock()
        self._began = self.clock()
        self._state, self._report = state, report
        self.is_of_another_version_s = 0.0

    @property
    def waited_s(self) -> float:
        return self.clock() - self._began

    async def run_info(self) -> RunInfo | None:
        if self.waited_s < self.is_of_another_version_s:
            raise OtherSchema("install the same version")
        state = self._state(self.waited_s)
        return made(state) if state is not None else None

    async def learner_report(self) -> bytes | None:
        return self._report(self.waited_s)

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await asyncio.sleep(0)


async def wait(run: Run, stop: asyncio.Event | None = None) -> RunInfo | None:
    return await await_run(
        run,
        name="run",
        stop=stop or asyncio.Event(),
        progress=Progress(part="worker/0", role="worker"),
        clock=run.clock,
        sleep=run.sleep,
    )


def a_second(elapsed_s: float) -> bytes:
    """A report that is written every second."""
    return f"loads, for {elapsed_s:.0f} s".encode()


@pytest.mark.parametrize("before", [None, "stopped", "failed", "finished"])
async def test_a_learner_that_loads_its_model_for_an_hour_is_waited_for(before: RunState | None) -> None:
    run = Run(lambda elapsed_s: "running" if elapsed_s > HOUR_S else before, a_second)

    assert await wait(run) == made("running")
    assert run.waited_s > HOUR_S


@pytest.mark.parametrize("last_words", [None, b"of a learner that was killed"])
async def test_a_run_that_has_ended_and_that_nobody_takes_up_is_left_soon(last_words: bytes | None) -> None:
    run = Run(lambda _: "stopped", lambda _: last_words)

    assert await wait(run) is None
    assert 60 < run.waited_s < 600


@pytest.mark.parametrize("for_s", [300.0, HOUR_S])
async def test_a_run_of_another_version_is_waited_out_while_a_new_learner_may_load(for_s: float) -> None:
    run = Run(lambda _: "running", a_second)
    run.is_of_another_version_s = for_s
    if for_s < HOUR_S:
        assert await wait(run) == made("running")
    else:
        with pytest.raises(OtherSchema):
            await wait(run)
        assert run.waited_s < 700


async def test_when_the_learner_shows_itself_no_more_the_wait_is_bounded_from_then_on() -> None:
    run = Run(lambda _: "stopped", lambda elapsed_s: a_second(elapsed_s) if elapsed_s < HOUR_S else None)

    assert await wait(run) is None
    assert HOUR_S < run.waited_s < HOUR_S + 600


async def test_a_run_that_no_learner_makes_is_a_mistake_of_the_user() -> None:
    run = Run(lambda _: None, lambda _: None)

    with pytest.raises(ResourceError, match="no learner created the run 'run' in this Redis within 600 s"):
        await wait(run)


async def test_a_word_to_stop_is_heard_while_it_waits() -> None:
    stop = asyncio.Event()

    def report(elapsed_s: float) -> bytes:
        if elapsed_s > HOUR_S:
            stop.set()
        return a_second(elapsed_s)

    assert await wait(Run(lambda _: "stopped", report), stop) is None
