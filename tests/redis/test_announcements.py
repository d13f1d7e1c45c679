"""Workers that wait for a version are woken by its announcement, and whatever keeps them from hearing it costs none.

The server blocks for some seconds where nothing is heard, so that a wait says by its answer whether it was woken.
"""

from __future__ import annotations

import asyncio

import redis

from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.operator import remove_run
from streamrl.protocol.transport.types import Announcement
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.versions import make_version
from tests.helpers import wait_until_async
from tests.redis.conftest import MakeLearner, MakeWorker

FIRST, SECOND, THIRD = (make_version(1, n) for n in range(3))
NOTHING_S = 0.05  # for a wait that is to hear nothing
LONG_S = 600.0


def announce(learner: LearnerStream, version: int) -> None:
    learner.announce(Announcement(version=version, base=0, step=0, manifest=b"m"), keep=[])


async def waits(client: redis.Redis, count: int) -> None:
    async def blocked() -> bool:
        return client.info("clients")["blocked_clients"] == count

    await wait_until_async(blocked, description=f"{count} clients wait")


async def test_an_announcement_wakes_every_worker_that_waits(
    learner: LearnerStream, make_worker: MakeWorker, client: redis.Redis
) -> None:
    workers = [make_worker(f"w{n}") for n in range(3)]
    waiting = [asyncio.create_task(worker.announcements.await_newer(0, within_s=LONG_S)) for worker in workers]
    await waits(client, 3)
    announce(learner, FIRST)
    assert await asyncio.gather(*waiting) == [True] * 3
    for worker in workers:
        latest = await worker.announcements.latest()
        assert latest is not None
        assert latest.version == FIRST


async def test_one_that_came_before_the_wait_is_heard_and_none_twice(
    learner: LearnerStream, worker: WorkerStream
) -> None:
    announce(learner, FIRST)
    announce(learner, SECOND)
    assert await worker.announcements.await_newer(FIRST, within_s=LONG_S)
    assert not await worker.announcements.await_newer(FIRST, within_s=NOTHING_S)
    assert not await worker.announcements.await_newer(SECOND, within_s=NOTHING_S)
    announce(learner, THIRD)
    assert await worker.announcements.await_newer(SECOND, within_s=LONG_S)


async def test_the_same_announcement_again_rings_once(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    announce(learner, FIRST)
    announce(learner, SECOND)
    announce(learner, SECOND)
    assert [entry_id for entry_id, _ in client.xrange(keys.announced)] == [f"{SECOND}-0".encode()]


async def test_a_worker_hears_on_when_redis_was_emptied(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis
) -> None:
    announce(learner, FIRST)
    assert await worker.announcements.await_newer(0, within_s=LONG_S)
    waiting = asyncio.create_task(worker.announcements.await_newer(FIRST, within_s=LONG_S))
    await waits(client, 1)
    client.flushall()
    announce(learner, SECOND)
    assert await waiting


async def test_a_worker_that_may_not_hear_looks_instead(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    announce(learner, FIRST)
    client.set(keys.announced, "no stream")
    assert not await worker.announcements.await_newer(0, within_s=LONG_S)
    latest = await worker.announcements.latest()
    assert latest is not None
    assert latest.version == FIRST


async def test_a_worker_that_lost_its_connection_while_it_waited_looks_again(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis
) -> None:
    waiting = asyncio.create_task(worker.announcements.await_newer(0, within_s=LONG_S))
    await waits(client, 1)
    for one in client.client_list():
        if one["cmd"] == "xread":
            client.client_kill_filter(_id=one["id"])
    assert not await waiting
    announce(learner, FIRST)
    assert await worker.announcements.await_newer(0, within_s=LONG_S)


async def test_a_run_of_the_same_name_rings_for_its_own_workers(
    learner: LearnerStream, make_learner: MakeLearner, make_worker: MakeWorker, client: redis.Redis, keys: Keys
) -> None:
    announce(learner, THIRD)
    remove_run(client, keys)
    announce(make_learner(uid="another"), FIRST)
    assert await make_worker("new").announcements.await_newer(0, within_s=LONG_S)


def test_a_version_that_was_put_on_a_server_before_another_took_over_does_not_count(learner: LearnerStream) -> None:
    announce(learner, FIRST)
    learner._server_run_id = "of the one that died"
    announce(learner, SECOND)
    assert not learner.has_manifests([SECOND])
    announce(learner, THIRD)
    assert learner.has_manifests([THIRD])


def test_an_anchor_that_was_put_on_a_server_before_another_took_over_does_not_count(learner: LearnerStream) -> None:
    announce(learner, FIRST)
    learner._server_run_id = "of the one that died"
    learner.amend(Announcement(version=FIRST, base=0, step=0, manifest=b"with an anchor"), keep=[FIRST])
    assert not learner.has_manifests([FIRST])
    announce(learner, SECOND)
    assert learner.has_manifests([SECOND])


def test_a_version_whose_blobs_may_be_lost_does_not_count(learner: LearnerStream, client: redis.Redis) -> None:
    """They were put before Redis was emptied, and announced after that."""
    announce(learner, FIRST)
    assert learner.has_manifests([FIRST])
    client.flushall()
    announce(learner, SECOND)
    assert not learner.has_manifests([SECOND])
    announce(learner, THIRD)
    assert learner.has_manifests([THIRD])
    assert not learner.has_manifests([SECOND, THIRD]), "a delta on it is no use either"
