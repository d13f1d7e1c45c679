"""T22: a run is removed while its workers are at work: nothing of theirs is accepted any more, and they leave."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import redis
import redis.asyncio

from streamrl.errors import RunGone
from streamrl.ops.audit import audit_folder
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.operator import remove_run
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.telemetry.progress import Progress
from streamrl.versions import make_version
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.rewards.base import RewardDouble
from streamrl.workers.rewards.mixing import Rewards, Weighted
from streamrl.workers.rollout.answer import Answerer
from streamrl.workers.rollout.loop import Rollout
from streamrl.workers.weights.roles import WeightsDouble
from tests.faults.report import report
from tests.feed_world import MODEL, encode_answer
from tests.helpers import make_ticket, wait_until_async
from tests.redis.run_world import RunWorld

NUM_WORKERS = 6
LONGEST_LEAVE_S = 10.0


async def test_workers_of_a_removed_run_leave_and_nothing_of_theirs_is_accepted(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> None:
    world = RunWorld(
        tmp_path / "removed", client=client, async_client=async_client, keys=keys, url=redis_url, num_prompts=100
    )
    await world.train_steps(2)
    world.learner.commit()
    world.learner.plan()
    streams = [WorkerStream(async_client, keys, worker=f"w{n}", lease_s=30.0) for n in range(NUM_WORKERS)]
    for stream in streams:
        assert await stream.run_info()  # as each worker begins; one that has never seen the run would wait for it
    engines = [EngineDouble(hold=n % 2 == 0) for n in range(NUM_WORKERS)]  # every other one is in the middle of it
    at_work = [
        asyncio.create_task(make_rollout(stream, world).run(engine, asyncio.Event()))
        for stream, engine in zip(streams, engines, strict=True)
    ]

    async def is_busy() -> bool:
        return any(engine.requests for engine in engines)

    await wait_until_async(is_busy, description="somebody works at a ticket")
    began = time.monotonic()
    assert remove_run(client, keys)
    ended = await asyncio.wait_for(asyncio.gather(*at_work, return_exceptions=True), LONGEST_LEAVE_S)
    leave_s = time.monotonic() - began
    assert [type(end) for end in ended] == [RunGone] * NUM_WORKERS
    assert client.keys() == [keys.tombstone.encode()], "somebody has written"

    again = RunWorld(tmp_path / "again", client=client, async_client=async_client, keys=keys, url=redis_url)
    again.learner.plan()
    before = {key: client.dump(key) for key in client.scan_iter()}
    for stream in streams:
        with pytest.raises(RunGone):
            await stream.lease(max_tickets=1, block_ms=0)
    assert {key: client.dump(key) for key in client.scan_iter()} == before
    report("T22", audit_folder(world.config.folder), injections=1, leave_s=leave_s, accepted=0)


async def test_a_group_for_a_removed_run_is_refused_though_another_run_has_its_name_and_number(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> None:
    world = RunWorld(tmp_path / "removed", client=client, async_client=async_client, keys=keys, url=redis_url)
    world.learner.plan()
    await world.worker.run_info()
    held = await world.worker.lease(max_tickets=2, block_ms=0)
    remove_run(client, keys)
    again = RunWorld(tmp_path / "again", client=client, async_client=async_client, keys=keys, url=redis_url)
    again.learner.plan()
    for leased in held:
        with pytest.raises(RunGone):
            await world.worker.deliver(leased, *encode_answer(make_ticket(leased.ticket.number)))
    assert client.xlen(keys.groups("train")) == 0
    assert again.audit().clean


def make_rollout(stream: WorkerStream, world: RunWorld) -> Rollout:
    source = Weighted(reward=RewardDouble(lambda item: float(len(item.token_ids))), weight=1.0)
    return Rollout(
        tickets=stream,
        weights=WeightsDouble(version=make_version(1, 0)),
        answerer=Answerer(rewards=Rewards({"exact": source}), config=world.config, worker="w", fingerprint=MODEL),
        config=world.config,
        has_other_settings=lambda info: False,
        progress=Progress(part="worker/w", role="worker"),
    )
