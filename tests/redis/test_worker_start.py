"""How a worker begins where its Redis is away: it waits, says so, and ends when it is told to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

import pytest
from structlog.testing import capture_logs

from streamrl.config import schema
from streamrl.errors import ResourceError
from streamrl.permissions import Permissions
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.workers.main import Options
from streamrl.workers.service import run_stream, serve
from tests.feed_world import make_config
from tests.helpers import wait_until


def make_options(url: str) -> Options:
    return Options(redis_url=url, run="r", worker="w1", permissions=Permissions())


def never_leave(code: int) -> NoReturn:
    raise AssertionError(f"left with {code}")


async def test_it_waits_for_a_redis_that_comes_later_and_then_for_its_run(tmp_path: Path) -> None:
    stop = asyncio.Event()
    with capture_logs() as logs:
        working = asyncio.create_task(serve(make_options(f"unix://{tmp_path}/redis.sock"), stop, leave=never_leave))
        await asyncio.to_thread(wait_until, lambda: bool(logs), description="it says that it waits")
        with EmbeddedRedis.start(tmp_path) as server, connect(server.url, schema.Redis()) as client:
            await asyncio.to_thread(wait_until, lambda: bool(client.keys()), description="it reports there")
            assert not working.done()
            stop.set()
            await asyncio.wait_for(working, 60)
    [said] = [line for line in logs if line["event"] == "waiting_for_redis"]
    assert "redis.sock does not answer" in said["why"]
    assert "Start Redis there" in said["why"]


async def test_one_that_is_told_to_stop_before_redis_comes_ends_at_once(tmp_path: Path) -> None:
    stop = asyncio.Event()
    with capture_logs() as logs:
        working = asyncio.create_task(serve(make_options(f"unix://{tmp_path}/redis.sock"), stop, leave=never_leave))
        await asyncio.to_thread(wait_until, lambda: bool(logs), description="it says that it waits")
        stop.set()
        await asyncio.wait_for(working, 60)


async def test_a_run_that_is_found_is_worked_for_with_its_own_timeouts(redis_url: str, keys: Keys) -> None:
    config = make_config(redis={"reply_timeout_s": 60.0, "connect_timeout_s": 20.0}, worker={"lease_s": 90.0})
    async with run_stream(make_options(redis_url), keys, config) as stream:
        used = stream._client.get_connection_kwargs()
    assert (used["socket_timeout"], used["socket_connect_timeout"]) == (60.0, 20.0)


async def test_what_no_waiting_changes_is_a_mistake_at_once(tmp_path: Path) -> None:
    with EmbeddedRedis.start(tmp_path):
        url = f"unix://nobody:wrong@{tmp_path.resolve()}/redis.sock"
        with pytest.raises(ResourceError, match="Put the user into the URL"):
            await asyncio.wait_for(serve(make_options(url), asyncio.Event(), leave=never_leave), 60)
