"""T10: the address leads to a replica that has missed the last writes; and a server that somebody empties."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import redis

from streamrl.config import schema
from streamrl.learner.process.lease import LeaseKeeper
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.keys import Keys
from tests.faults.replicas import Server, server
from tests.faults.report import report
from tests.redis.run_world import RunWorld

NUM_FAILOVERS = 4
NUM_FLUSHES = 5
LEASE_S = 0.4
SETTINGS = schema.Redis(connect_timeout_s=5.0, reply_timeout_s=5.0)


async def test_failovers_to_replicas_that_missed_the_last_writes_lose_nothing(tmp_path: Path) -> None:
    address = tmp_path / "redis.sock"
    num_missed = 0
    recoveries: list[float] = []
    with ExitStack() as servers:
        primary = servers.enter_context(server(tmp_path / "0"))
        lead(address, primary)
        async with a_run(tmp_path, f"unix://{address}") as world:
            for number in range(1, NUM_FAILOVERS + 1):
                replica = servers.enter_context(server(tmp_path / str(number), replica_of=primary))
                await work(world, num_steps=2)
                replica.cut_off()
                before = primary.num_written
                await work(world, num_steps=2)
                num_missed += primary.num_written - before
                primary.process.kill()
                lead(address, replica)
                recoveries.append(await work(world, num_steps=1))
                primary = replica
            await work(world, num_steps=2)
            audit = world.audit()
    report("T10 failover", audit, injections=NUM_FAILOVERS, recovery_s=max(recoveries), missed_bytes=num_missed)
    assert num_missed > 0
    assert audit.trained > 0


async def test_a_server_that_is_emptied_in_mid_run_loses_nothing(
    tmp_path: Path, redis_url: str, client: redis.Redis
) -> None:
    recoveries: list[float] = []
    async with a_run(tmp_path, redis_url) as world:
        for flush in range(NUM_FLUSHES):
            await work(world, num_steps=2)
            if flush % 2:
                world.learner.plan()  # tickets are out, and some are answered
                await world.answer_all()
            world.client.flushall()
            recoveries.append(await work(world, num_steps=1))
        await work(world, num_steps=2)
        audit = world.audit()
    client.flushall()  # now that nobody renews the lease of a run that is not there, which would bring it back
    report("T10 flush", audit, injections=NUM_FLUSHES, recovery_s=max(recoveries))


@asynccontextmanager
async def a_run(path: Path, url: str) -> AsyncIterator[RunWorld]:
    with connect(url, SETTINGS) as client:
        async with connect_async(url, SETTINGS) as async_client:
            world = RunWorld(
                path, client=client, async_client=async_client, keys=Keys("run"), url=url, num_prompts=20_000
            )
            with LeaseKeeper(world.learner.stream.renew, lease_s=LEASE_S).keeping():
                yield world


async def work(world: RunWorld, *, num_steps: int) -> float:
    """Train and commit; seconds until the first step was made."""
    began = time.monotonic()
    await world.train_steps(1)
    first_s = time.monotonic() - began
    await world.train_steps(num_steps - 1)
    world.learner.commit()
    return first_s


def lead(address: Path, to: Server) -> None:
    """Who connects to the address reaches this server from now on."""
    aside = address.with_suffix(".new")
    os.symlink(to.socket, aside)
    aside.rename(address)
