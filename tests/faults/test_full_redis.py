"""T11: the run's own budget of bytes is reached, or others fill the server: nothing is evicted, nothing lost, and once
there is room again the backlog drains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis

from streamrl.config import schema
from streamrl.learner.groups.plan import Kind
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from tests.faults.report import report
from tests.feed_world import encode_answer
from tests.helpers import make_ticket
from tests.redis.run_world import RunWorld

NUM_PROMPTS = 60
SETTINGS = schema.Redis(connect_timeout_s=5.0, reply_timeout_s=5.0)
GROUP = sum(len(part) for part in encode_answer(make_ticket(0, run_uid="u" * 32)))
BUDGET = 20 * GROUP
LONGEST_DRAIN_S = 10.0  # of this process: a busy machine stretches the clock, and a run that stands still never ends
ROOM_FOR_OTHERS = 4 << 20


async def test_while_nothing_can_be_committed_the_backlog_stays_within_its_budget(tmp_path: Path) -> None:
    sections = {"redis": {"max_backlog_bytes": BUDGET}, "lag": {"max_steps": 50}}
    async with a_run(tmp_path, **sections, sampling={"num_samples": 2, "max_tokens": 8}) as world:
        peak = 0
        for _ in range(40):
            plan = world.learner.plan()
            if plan is not None and plan.kind is Kind.STEP:
                world.learner.train(plan)
            await world.answer_all()
            peak = max(peak, num_bytes(world))
        assert world.learner.feed.metrics()["stream/issued"] < NUM_PROMPTS, "the budget held nothing back"
        began, worked = time.monotonic(), time.process_time()
        await finish(world)
        drained_s, worked_s = time.monotonic() - began, time.process_time() - worked
        audit, evicted = world.audit(), num_evicted(world.client)
    report("T11 budget", audit, injections=1, recovery_s=drained_s, peak_share=peak / BUDGET, evicted=evicted)
    assert BUDGET / 2 < peak <= BUDGET
    assert (audit.trained, audit.outstanding, evicted) == (NUM_PROMPTS, 0, 0)
    assert worked_s <= LONGEST_DRAIN_S


async def test_a_server_that_others_have_filled_delivers_what_is_out_and_the_run_goes_on_when_they_leave(
    tmp_path: Path,
) -> None:
    async with a_run(tmp_path, patience_s=0.2) as world:
        await world.train_steps(2)
        world.learner.plan()
        fill(world.client)
        await world.answer_all()  # deliveries are no more than what was asked for, and go through
        num_steps = 0
        while (plan := world.learner.plan()) is not None:
            if plan.kind is Kind.STEP:  # no ticket goes out, and that holds nothing up
                world.learner.train(plan)
                num_steps += 1
            world.learner.stream.renew()
            world.learner.commit()
        assert num_steps == 2, "all that was asked for"
        world.client.delete("others")
        began, worked = time.monotonic(), time.process_time()
        await finish(world)
        drained_s, worked_s = time.monotonic() - began, time.process_time() - worked
        audit, evicted = world.audit(), num_evicted(world.client)
    report("T11 maxmemory", audit, injections=1, recovery_s=drained_s, evicted=evicted)
    assert (audit.trained, audit.outstanding, evicted) == (NUM_PROMPTS, 0, 0)
    assert worked_s <= LONGEST_DRAIN_S


@asynccontextmanager
async def a_run(path: Path, **options: Any) -> AsyncIterator[RunWorld]:
    """With a server of its own, whose limits may be changed."""
    with EmbeddedRedis.start(path / "redis") as server, connect(server.url, SETTINGS) as client:
        async with connect_async(server.url, SETTINGS) as async_client:
            yield RunWorld(
                path,
                client=client,
                async_client=async_client,
                keys=Keys("run"),
                url=server.url,
                num_prompts=NUM_PROMPTS,
                **options,
            )


async def finish(world: RunWorld) -> None:
    world.learner.commit()
    while (plan := await world.next_step()).kind is not Kind.END:
        if plan.kind is Kind.STEP:
            world.learner.train(plan)
        world.learner.commit()
    world.learner.commit()


def fill(client: redis.Redis) -> None:
    """Somebody else's data takes all the memory that is left."""
    client.config_set("maxmemory", client.info("memory")["used_memory"] + ROOM_FOR_OTHERS)
    with contextlib.suppress(redis.exceptions.OutOfMemoryError):
        while True:
            client.append("others", b"x" * (64 << 10))


def num_bytes(world: RunWorld) -> int:
    entries = world.client.xrange(world.keys.groups("train"))
    return sum(len(fields[b"h"]) + len(fields[b"b"]) for _, fields in entries)


def num_evicted(client: redis.Redis) -> int:
    return int(client.info("stats")["evicted_keys"])
