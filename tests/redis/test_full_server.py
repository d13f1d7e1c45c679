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
from streamrl.protocol.transport.entries import encode_report
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.lease import await_lease
from streamrl.protocol.transport.operator import purge, read_letters, remove_run, set_control
from streamrl.protocol.transport.operator_scripts import report
from streamrl.protocol.transport.script import run
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.protocol.transport.types import START, Announcement, Letter
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.wire.group import encode_group
from streamrl.telemetry.progress import Progress
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
        await_lease(client, KEYS, run_uid=lambda: "uid", holder="job", lease_s=30.0, wait_s=0.0, give_up_after_s=0.3)
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


def test_operators_and_monitors_are_not_shut_out(client: redis.Redis) -> None:
    learner = make_learner(client, give_up_after_s=0.3)
    learner.letters.put([(make_ticket(0), Letter("it failed too often", 1.0))])
    fill(client)
    for word in ("pause", "run", "drain", "run"):
        assert set_control(client, KEYS, word, by="the test")
        assert learner.orders().control == word
    for second in range(2):  # the first report of a process, and one that replaces it
        progress = Progress(part="learner/0", role="learner", clock=lambda second=second: 5.0 + second)
        run(client, report(KEYS, "learner/0", encode_report(progress.report())))
    assert [one.at for one in snapshot(client, KEYS).reports] == [6.0]
    assert purge(client, KEYS, read_letters(client, KEYS), by="the test") == 1
    assert learner.letters.purged() == {0}
    learner.record(1, {"train_optim/loss": 1.0})
    learner.event("tested")
    told = [event.kind for event in snapshot(client, KEYS).events]
    assert told == [*["control"] * 4, "dead_purge", "tested"]
    assert client.xlen(KEYS.metrics) == 1
    assert remove_run(client, KEYS)


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
