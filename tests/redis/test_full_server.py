"""A server at its memory limit: what frees memory or delivers goes through, what asks for more is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from streamrl.config import schema
from streamrl.errors import TransportError
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.lease import await_lease
from streamrl.protocol.transport.types import START, Announcement, Letter
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.wire.group import encode_group
from streamrl.versions import make_version
from tests.helpers import make_group, make_ticket

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


def make_learner(client: redis.Redis, *, give_up_after_s: float, term: int = 1) -> LearnerStream:
    learner = LearnerStream(
        client, KEYS, run_uid="uid", term=term, holder="job", lease_s=30.0, give_up_after_s=give_up_after_s
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


def test_the_learner_stays_the_learner_and_one_that_was_restarted_becomes_it(client: redis.Redis) -> None:
    learner = make_learner(client, give_up_after_s=0.3)
    fill(client)
    client.pexpire(KEYS.lease, 1000)
    learner.renew()
    assert client.pttl(KEYS.lease) > 20_000
    client.delete(KEYS.lease)  # it slept for longer than that
    learner.renew()
    assert client.get(KEYS.lease) == b"job"
    for _ in range(2):  # the same job again, and then after its lease has run out
        await_lease(client, KEYS, holder="job", lease_s=30.0, wait_s=0.0, give_up_after_s=0.3)
        make_learner(client, give_up_after_s=0.3, term=2)
        client.delete(KEYS.lease)


def test_what_repeats_a_dead_ticket_is_noted_and_a_ticket_can_die(client: redis.Redis) -> None:
    learner = make_learner(client, give_up_after_s=0.3)
    fill(client)
    learner.restore(cursor=START, retried={7: 3})
    assert learner.retried() == {7: 3}
    assert learner.letters.put([(make_ticket(0), Letter("it failed too often", 1.0))])
    assert client.xlen(KEYS.dead) == 1
    assert not learner.letters.put([(make_ticket(1), Letter("it was lost", 1.0))], wait_for_room=False)
    assert client.xlen(KEYS.dead) == 1


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


def test_tickets_are_refused_at_once_and_nothing_of_them_is_written(client: redis.Redis) -> None:
    learner = make_learner(client, give_up_after_s=60.0)
    fill(client)
    tickets = [make_ticket(0), make_ticket(1), make_ticket(0, purpose="eval")]
    began = time.monotonic()
    assert learner.issue(tickets) == tickets
    assert time.monotonic() - began < 10
    assert learner.present_tickets("train") == learner.present_tickets("eval") == []
    assert not learner.disturbed, "a full server has lost nothing"
    client.config_set("maxmemory", 0)
    assert learner.issue(tickets) == []
    assert [ticket.number for ticket in learner.present_tickets("train")] == [0, 1]


def test_what_waits_for_room_gives_up_with_a_clear_error(client: redis.Redis) -> None:
    learner = make_learner(client, give_up_after_s=0.3)
    client.delete(KEYS.tickets("train"))
    fill(client)
    with pytest.raises(TransportError, match=r"could not restore the streams within 0\.3 s: .*maxmemory"):
        learner.restore(cursor=START)
