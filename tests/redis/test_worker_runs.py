"""Which run a worker serves: before it is there, after it is gone, and under another's name or wire schema."""

from __future__ import annotations

import pytest
import redis

from streamrl.errors import ResourceError, RunGone
from streamrl.protocol.transport.keys import WORKERS, Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.operator import remove_run
from streamrl.protocol.transport.worker import WorkerStream
from tests.helpers import make_ticket
from tests.redis.conftest import MakeLearner, MakeWorker
from tests.redis.leasing import numbers


async def test_a_worker_before_its_run_waits_and_then_serves_it(
    worker: WorkerStream, make_learner: MakeLearner
) -> None:
    assert await worker.run_info() is None
    assert await worker.lease(max_tickets=1, block_ms=10) == []
    assert await worker.announcements.latest() is None
    make_learner().issue([make_ticket(0)])
    info = await worker.run_info()
    assert info is not None
    assert (info.uid, info.term, info.config_json, info.fingerprint) == ("uid", 1, '{"name": "x"}', "model")
    assert numbers(await worker.lease(max_tickets=1, block_ms=0)) == [0]


async def test_a_worker_of_another_wire_schema_than_its_learners_ends_and_leases_nothing(
    learner: LearnerStream, worker: WorkerStream, make_worker: MakeWorker, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(0)])
    assert await worker.run_info() is not None
    client.hset(keys.meta, "schema", 99)
    for call in (worker.run_info(), make_worker("new").lease(max_tickets=1, block_ms=0)):
        with pytest.raises(ResourceError, match=r"messages of schema 99, and this worker reads schema \d+: install"):
            await call
    assert client.xpending(keys.tickets("train"), WORKERS)["pending"] == 0


async def test_a_run_of_another_wire_schema_that_has_ended_has_ended(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    """Which schema the learner writes that resumes it is known once it does."""
    learner.release("stopped")
    client.hset(keys.meta, "schema", 99)
    info = await worker.run_info()
    assert info is not None
    assert info.state == "stopped"


async def test_a_removed_run_tells_its_workers_that_it_is_gone(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(0)])
    leased = await worker.lease(max_tickets=1, block_ms=0)
    assert remove_run(client, keys)
    for call in (
        worker.run_info(),
        worker.lease(max_tickets=1, block_ms=0),
        worker.renew(leased),
        worker.deliver(leased[0], b"h", b"b"),
        worker.announcements.latest(),
    ):
        with pytest.raises(RunGone):
            await call
    assert client.exists(keys.groups("train")) == 0


async def test_a_run_of_the_same_name_is_not_the_workers_run(
    worker: WorkerStream, make_worker: MakeWorker, make_learner: MakeLearner, client: redis.Redis, keys: Keys
) -> None:
    make_learner().issue([make_ticket(0)])
    [leased] = await worker.lease(max_tickets=1, block_ms=0)
    remove_run(client, keys)
    make_learner(uid="another").issue([make_ticket(0, run_uid="another")])
    with pytest.raises(RunGone):
        await worker.deliver(leased, b"h", b"b")
    with pytest.raises(RunGone):
        await worker.lease(max_tickets=1, block_ms=0)
    assert numbers(await make_worker("new").lease(max_tickets=1, block_ms=0)) == [0]


async def test_an_emptied_server_is_waited_for(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis
) -> None:
    learner.issue([make_ticket(0)])
    leased = await worker.lease(max_tickets=1, block_ms=0)
    client.flushall()
    assert await worker.run_info() is None
    assert await worker.renew(leased) == leased
    assert not await worker.deliver(leased[0], b"h", b"b")
    learner.issue([make_ticket(0)])
    assert numbers(await worker.lease(max_tickets=1, block_ms=0)) == [0]
