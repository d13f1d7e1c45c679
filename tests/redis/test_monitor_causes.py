"""`streamrl why` against real runs: each cause brought about, and named first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import schema
from streamrl.ops.monitor.causes import TABLE
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.operator import remove_run, set_control
from tests.helpers import wait_until
from tests.redis.monitor_world import Watched
from tests.redis.run_world import RunWorld


async def test_a_run_that_gets_on_has_no_cause(run: Watched) -> None:
    await run.world.train_steps(1)
    run.record()
    run.healthy()
    assert run.first() == ("", "healthy")


def test_a_name_that_nobody_has_is_absent(run: Watched) -> None:
    remove_run(run.world.client, run.world.keys)
    assert run.first() == ("absent", "ended")
    assert "removed" in run.view().causes[0].evidence
    run.world.client.delete(run.world.keys.tombstone)
    assert "holds nothing" in run.view().causes[0].evidence


# The server and the state of the run


def test_a_full_server_is_the_first_cause(run: Watched) -> None:
    run.healthy()
    used: Any = run.world.client.info("memory")
    try:
        run.world.client.config_set("maxmemory", int(used["used_memory"] * 1.1))
        assert run.first() == ("redis_full", "degraded")
        run.world.client.config_set("maxmemory", int(used["used_memory"] * 0.9))
        assert run.first() == ("redis_full", "stalled")
    finally:
        run.world.client.config_set("maxmemory", 0)


async def test_a_server_that_cannot_save_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    with EmbeddedRedis.start(folder) as server, connect(server.url, schema.Redis()) as client:
        async with connect_async(server.url, schema.Redis()) as async_client:
            world = RunWorld(tmp_path, client=client, async_client=async_client, keys=Keys("x"), url=server.url)
            run = Watched(world)
            run.healthy()
            shutil.rmtree(folder)
            client.bgsave()
            wait_until(lambda: run.first() == ("redis_refuses_writes", "stalled"), description="the save has failed")


def test_a_replica_is_named(run: Watched) -> None:
    run.healthy()
    run.world.client.replicaof("127.0.0.1", 1)
    try:
        assert run.first() == ("redis_read_only", "stalled")
    finally:
        run.world.client.replicaof("no", "one")


def test_a_server_that_may_evict_is_named(run: Watched) -> None:
    run.healthy()
    try:
        run.world.client.config_set("maxmemory", 1 << 40)
        run.world.client.config_set("maxmemory-policy", "allkeys-lru")
        assert run.first() == ("redis_evicts", "degraded")
    finally:
        run.world.client.config_set("maxmemory-policy", "noeviction")
        run.world.client.config_set("maxmemory", 0)


@pytest.mark.parametrize(("state", "verdict"), [("finished", "healthy"), ("stopped", "ended"), ("failed", "ended")])
def test_a_run_that_has_ended_says_how(run: Watched, state: Any, verdict: str) -> None:
    run.world.learner.stream.release(state)
    assert run.first() == (state, verdict)


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_a_run_that_a_learner_is_about_to_take_up_has_not_ended(run: Watched, state: Any) -> None:
    run.world.learner.stream.release(state)
    run.learner("load the model", state="starting")
    assert run.first() == ("learner_starting", "healthy")
    assert state not in {cause.name for cause in run.view().causes}


@pytest.mark.parametrize("state", ["absent", "finished", "stopped", "failed"])
def test_a_run_whose_launcher_waits_for_the_learners_first_word_is_starting(run: Watched, state: Any) -> None:
    if state == "absent":
        remove_run(run.world.client, run.world.keys)
        run.world.client.delete(run.world.keys.tombstone)
    else:
        run.world.learner.stream.release(state)
    run.learner("start", state="starting", ago_s=20)  # it imports torch, and falls silent meanwhile
    run.report("launcher", "start", state="starting")
    assert run.first() == ("learner_starting", "healthy")
    assert state not in run.causes()
    run.report("launcher", "watch", state="working")
    assert "learner_starting" not in run.causes()


def test_a_learner_that_crashed_is_not_gone_while_a_launcher_starts_it_again(run: Watched) -> None:
    run.learner(ago_s=40)
    run.world.client.delete(run.world.keys.lease)
    run.report("launcher", "start", state="starting")
    run.worker("tickets", state="waiting")
    assert run.first() == ("learner_starting", "healthy")


def test_a_pause_is_the_cause_whoever_waits(run: Watched) -> None:
    set_control(run.world.client, run.world.keys, "pause", by="the test")
    run.learner("resume", for_s=600)
    run.worker("resume", state="waiting", for_s=600)
    assert run.first() == ("paused", "stalled")


def test_a_drain_explains_itself(run: Watched) -> None:
    set_control(run.world.client, run.world.keys, "drain", by="the test")
    run.healthy()
    assert run.first() == ("ending", "healthy")


def test_every_cause_of_the_table_is_tested_here() -> None:
    here = "".join(path.read_text() for path in Path(__file__).parent.glob("test_monitor*_causes.py"))
    of_folders = {"crashed"}  # tests/unit/test_remains.py
    assert [name for name in TABLE if f'"{name}"' not in here and name not in of_folders] == []
