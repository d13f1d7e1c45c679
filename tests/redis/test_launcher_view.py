"""What the launcher sees of its run, and shows: by the monitors' view of a real Redis."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import redis
import redis.asyncio
from rich.console import Console

from streamrl.config.placement import Placement
from streamrl.ops.launch.display import Display
from streamrl.ops.launch.processes import Interrupts
from streamrl.ops.launch.summary import Loads
from streamrl.ops.launch.supervisor import RunSupervisor
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.operator import remove_run
from tests.redis.monitor_world import Watched, healthy_run
from tests.redis.run_world import RunWorld


@pytest.fixture
async def run(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> Watched:
    return await healthy_run(RunWorld(tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url))


def make_supervisor(run: Watched, out: io.StringIO) -> RunSupervisor:
    config = run.world.config.model_copy(update={"name": run.world.keys.name})
    now = iter(range(0, 4000, 40))  # so that each look is worth a line
    return RunSupervisor(
        config=config,
        redis_url=run.world.url,
        embedded=None,
        client=run.world.client,
        display=Display(Console(file=out, width=300), clock=lambda: next(now)),
        interrupts=Interrupts(),
        takeover=False,
        placement=Placement(shares={}),
    )


def test_it_shows_the_parts_and_counts_the_loads_of_all_lives(run: Watched) -> None:
    out = io.StringIO()
    supervisor = make_supervisor(run, out)

    run.worker(pid=1, detail={"loads": 5, "loads_in_flight": 2})
    supervisor.look()
    run.worker(pid=2, detail={"loads": 1})
    supervisor.show()

    assert supervisor.loads == Loads(loaded=6, in_flight=2)
    assert "1 generate" in out.getvalue()
    assert "step 1" in out.getvalue()


def test_a_run_that_goes_on_has_not_ended_while_its_learner_starts(run: Watched) -> None:
    out = io.StringIO()
    supervisor = make_supervisor(run, out)
    supervisor._phase = ""  # the parts have been started
    run.world.learner.stream.release("stopped")
    run.report("launcher", "start", state="starting")

    supervisor.show()

    assert "the learner is starting" in out.getvalue().splitlines()
    assert "ended" not in out.getvalue()


def test_before_there_is_a_run_it_says_what_it_does(run: Watched, client: redis.Redis) -> None:
    out = io.StringIO()
    remove_run(client, run.world.keys)

    make_supervisor(run, out).show()

    assert set(out.getvalue().splitlines()) <= {"starting the parts", "0:00:00  starting the parts"}
