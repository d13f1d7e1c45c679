"""A server at its memory limit: what frees memory or delivers goes through, what asks for more waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from streamrl.config import schema
from streamrl.errors import TransportError
from streamrl.transport.connection import connect, connect_async
from streamrl.transport.embedded import EmbeddedRedis
from streamrl.transport.keys import Keys
from streamrl.transport.learner import LearnerStream
from streamrl.transport.types import START, Announcement
from streamrl.transport.worker import WorkerStream
from streamrl.versions import make_version
from streamrl.wire.group import encode_group
from tests.helpers import make_group, make_ticket, wait_until

SETTINGS = schema.Redis(reply_timeout_s=5.0)
KEYS = Keys("x")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path) as server:
        yield server


@pytest.fixture
def client(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with connect(server.url, SETTINGS) as client:
        yield client


def make_learner(client: redis.Redis, *, give_up_after_s: float) -> LearnerStream:
    learner = LearnerStream(
        client, KEYS, run_uid="uid", epoch=1, holder="job", lease_s=30.0, give_up_after_s=give_up_after_s
    )
    learner.claim(config_json="{}", fingerprint="model", wait_s=0.0)
    learner.restore(cursor=START)
    return learner


def fill(client: redis.Redis) -> None:
    client.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        client.set("more", "bytes")


async def test_deliveries_commits_and_announcements_go_through(server: EmbeddedRedis, client: redis.Redis) -> None:
    learner = make_learner(client, give_up_after_s=0.5)
    learner.issue([make_ticket(0)])
    async with connect_async(server.url, SETTINGS) as async_client:
        worker = WorkerStream(async_client, KEYS, worker="w", lease_s=30.0, give_up_after_s=0.5)
        [leased] = await worker.lease(max_tickets=1, block_ms=0)
        fill(client)
        assert await worker.run_info() is not None
        assert await worker.renew([leased]) == []
        assert await worker.deliver(leased, *encode_group(make_group(leased.ticket)))
    [group] = learner.present_groups("train", after=START)
    assert group.number == 0
    learner.announce(Announcement(version=make_version(1, 0), base=0, step=0, manifest=b"m"), keep=[])
    learner.commit(step=1, cursor=group.entry_id, trim_below="9999999999999-0")
    assert learner.present_groups("train", after=START) == []
    learner.restore(cursor=group.entry_id)
    learner.count_issued(1)
    assert client.hget(KEYS.meta, "issued") == b"1"


async def test_deliveries_that_go_together_go_through_though_the_first_has_lost_its_ticket(
    server: EmbeddedRedis, client: redis.Redis
) -> None:
    learner = make_learner(client, give_up_after_s=0.5)
    learner.issue([make_ticket(n) for n in range(3)])
    async with connect_async(server.url, SETTINGS) as async_client:
        worker = WorkerStream(async_client, KEYS, worker="w", lease_s=30.0, give_up_after_s=0.5)
        leased = await worker.lease(max_tickets=3, block_ms=0)
        learner.delete_tickets("train", [leased[0].entry_id])
        fill(client)
        outcomes = await asyncio.gather(*(worker.deliver(one, *encode_group(make_group(one.ticket))) for one in leased))
        assert outcomes == [False, True, True]
        assert not await worker.deliver(leased[0], *encode_group(make_group(leased[0].ticket)))
    assert [group.number for group in learner.present_groups("train", after=START)] == [1, 2]


def test_issuing_waits_for_room(client: redis.Redis) -> None:
    learner = make_learner(client, give_up_after_s=20.0)
    fill(client)

    def num_refusals() -> int:
        return int(client.info("stats")["total_error_replies"])

    before = num_refusals()
    issuing = threading.Thread(target=learner.issue, args=([make_ticket(0)],))
    issuing.start()
    wait_until(lambda: num_refusals() >= before + 2, description="issuing was refused and repeated")
    assert learner.present_tickets("train") == []
    client.config_set("maxmemory", 0)
    issuing.join(timeout=20)
    assert [ticket.number for ticket in learner.present_tickets("train")] == [0]
    assert not learner.disturbed, "a full server has lost nothing"


def test_issuing_gives_up_with_a_clear_error(client: redis.Redis) -> None:
    learner = make_learner(client, give_up_after_s=0.3)
    fill(client)
    with pytest.raises(TransportError, match=r"could not issue tickets within 0\.3 s: .*maxmemory"):
        learner.issue([make_ticket(0)])
