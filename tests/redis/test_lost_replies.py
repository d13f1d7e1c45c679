"""Whatever reply is lost, the call takes effect once, and its caller learns the truth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import redis
import redis.asyncio

from streamrl.config import schema
from streamrl.errors import TransportError
from streamrl.protocol.transport.connection import check_server, connect, connect_async
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.types import START, Announcement, Letter
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.wire.group import encode_group
from streamrl.versions import make_version
from tests.helpers import make_group, make_ticket
from tests.proxy import Proxy

SCRIPT = b"EVALSHA"
SETTINGS = schema.Redis(reply_timeout_s=5.0, give_up_after_s=10.0)


@pytest.fixture
def lossy(proxy: Proxy) -> Iterator[redis.Redis]:
    with connect(proxy.url, SETTINGS) as client:
        yield client


@pytest.fixture
async def lossy_async(proxy: Proxy) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(proxy.url, SETTINGS) as client:
        yield client


@pytest.fixture
def learner(lossy: redis.Redis, keys: Keys) -> LearnerStream:
    """Every script is known to the server before replies are lost, so that what is lost is an answer."""
    stream = LearnerStream(lossy, keys, run_uid="uid", term=1, holder="job", lease_s=30.0, give_up_after_s=10.0)
    stream.claim(config_json="{}", fingerprint="model", wait_s=0.0)
    stream.restore(cursor=START)
    return stream


@pytest.fixture
async def worker(lossy_async: redis.asyncio.Redis, keys: Keys, learner: LearnerStream) -> WorkerStream:
    return WorkerStream(lossy_async, keys, worker="w", lease_s=60.0, give_up_after_s=10.0)


def test_a_client_repeats_nothing_by_itself(proxy: Proxy, lossy: redis.Redis, keys: Keys) -> None:
    proxy.drop_reply_to(b"XADD")
    with pytest.raises(redis.ConnectionError):
        lossy.xadd(keys.dead, {"n": 1})
    assert lossy.xlen(keys.dead) == 1


async def test_an_async_client_repeats_nothing_by_itself(
    proxy: Proxy, lossy_async: redis.asyncio.Redis, keys: Keys
) -> None:
    await lossy_async.ping()
    proxy.drop_reply_to(b"XADD")
    with pytest.raises(redis.ConnectionError):
        await lossy_async.xadd(keys.dead, {"n": 1})
    assert await lossy_async.xlen(keys.dead) == 1


APPENDS: dict[str, tuple[Callable[[LearnerStream, int], None], Callable[[Keys], str]]] = {
    "issue": (lambda learner, n: learner.issue([make_ticket(n)]), lambda keys: keys.tickets("train")),
    "dead": (lambda learner, n: learner.letters.put([(make_ticket(n), Letter("x", 1.0))]), lambda keys: keys.dead),
    "record": (lambda learner, n: learner.record(n, {"train_optim/loss": 1.0}), lambda keys: keys.metrics),
    "event": (lambda learner, n: learner.event("x", n=n), lambda keys: keys.events),
}


@pytest.mark.parametrize(("append", "stream"), APPENDS.values(), ids=APPENDS.keys())
def test_an_append_whose_reply_is_lost_appends_once(
    append: Callable[[LearnerStream, int], None],
    stream: Callable[[Keys], str],
    learner: LearnerStream,
    proxy: Proxy,
    lossy: redis.Redis,
    keys: Keys,
) -> None:
    append(learner, 0)
    proxy.drop_reply_to(SCRIPT, times=3)
    append(learner, 1)
    assert proxy.num_dropped == 3
    assert lossy.xlen(stream(keys)) == 2
    assert learner.disturbed


def test_an_announcement_an_anchor_and_a_commit_whose_replies_are_lost_succeed(
    learner: LearnerStream, proxy: Proxy, lossy: redis.Redis, keys: Keys
) -> None:
    def announce(n: int) -> None:
        learner.announce(told(n), keep=[])

    def told(n: int, manifest: bytes = b"m") -> Announcement:
        return Announcement(version=make_version(1, n), base=0, step=n, manifest=manifest)

    announce(0)
    proxy.drop_reply_to(SCRIPT, times=2)
    announce(1)
    proxy.drop_reply_to(SCRIPT, times=2)
    learner.amend(told(1, b"with an anchor"), keep=[])
    learner.commit(step=1, cursor="1-1", trim_below="1-1")
    proxy.drop_reply_to(SCRIPT, times=2)
    learner.commit(step=2, cursor="2-2", trim_below="2-2")
    assert proxy.num_dropped == 6
    assert lossy.hget(keys.meta, "step") == b"2"
    assert lossy.hgetall(keys.manifests) == {str(make_version(1, 1)).encode(): b"with an anchor"}


async def test_a_delivery_whose_reply_is_lost_is_known_as_our_own(
    learner: LearnerStream, worker: WorkerStream, proxy: Proxy, lossy: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(n) for n in range(3)])
    first, second, third = await worker.lease(max_tickets=3, block_ms=0)
    assert await worker.deliver(first, *encode_group(make_group(first.ticket)))
    proxy.drop_reply_to(SCRIPT, times=2)
    assert await worker.deliver(second, *encode_group(make_group(second.ticket)))
    assert proxy.num_dropped == 2
    assert [group.number for group in learner.present_groups("train", after=START)] == [0, 1]
    assert lossy.hget(keys.counters, "duplicates:train") is None
    # What somebody else delivered stays not ours, also when asked twice.
    other = WorkerStream(worker._client, keys, worker="other", lease_s=60.0)
    await other.run_info()
    await worker.hand_back([third])
    [third] = await other.lease(max_tickets=1, block_ms=0)
    assert await other.deliver(third, *encode_group(make_group(third.ticket)))
    proxy.drop_reply_to(SCRIPT)
    assert not await worker.deliver(third, *encode_group(make_group(third.ticket)))


async def test_groups_delivered_together_whose_reply_is_lost_learn_each_its_own_outcome(
    learner: LearnerStream, worker: WorkerStream, proxy: Proxy, lossy: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(n) for n in range(4)])
    first, *others = await worker.lease(max_tickets=4, block_ms=0)
    assert await worker.deliver(first, *encode_group(make_group(first.ticket)))
    learner.delete_tickets("train", [others[1].entry_id])
    proxy.drop_reply_to(SCRIPT, times=2)
    outcomes = await asyncio.gather(*(worker.deliver(one, *encode_group(make_group(one.ticket))) for one in others))
    assert outcomes == [True, False, True]
    assert proxy.num_dropped == 2
    assert [group.number for group in learner.present_groups("train", after=START)] == [0, 1, 3]
    assert lossy.hgetall(keys.counters)[b"delivered:train"] == b"3"


@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1), (1, 0), (0, 0, 1, 1), (1, 0, 1, 0)], ids=str)
async def test_two_calls_under_way_whose_replies_are_lost_find_each_its_own_receipt(
    lost: tuple[int, ...],
    learner: LearnerStream,
    worker: WorkerStream,
    proxy: Proxy,
    lossy: redis.Redis,
    keys: Keys,
) -> None:
    learner.issue([make_ticket(n) for n in range(5)])
    first, *others = await worker.lease(max_tickets=5, block_ms=0)
    assert await worker.deliver(first, *encode_group(make_group(first.ticket)))
    learner.delete_tickets("train", [others[3].entry_id])
    for lane in lost:
        proxy.drop_reply_to(keys.receipt("w", lane).encode())
    two_a_call = bytes(700_000)
    outcomes = await asyncio.gather(*(worker.deliver(one, b"header", two_a_call) for one in others))
    assert outcomes == [True, True, True, False]
    assert proxy.num_dropped == len(lost)
    assert sorted(group.number for group in learner.present_groups("train", after=START)) == [0, 1, 2, 3]
    counters = lossy.hgetall(keys.counters)
    assert (counters[b"delivered:train"], counters[b"duplicates:train"]) == (b"4", b"1")
    receipts = lossy.keys(keys.receipt("*", "*"))
    assert sorted(receipts) == [keys.receipt("w", lane).encode() for lane in range(2)]
    assert all(lossy.pttl(receipt) > 0 for receipt in receipts)


async def test_tickets_whose_lease_was_lost_on_the_way_arrive_all_the_same(
    learner: LearnerStream, worker: WorkerStream, proxy: Proxy
) -> None:
    learner.issue([make_ticket(0)])
    assert len(await worker.lease(max_tickets=4, block_ms=0)) == 1
    learner.issue([make_ticket(n) for n in range(1, 4)])
    proxy.drop_reply_to(SCRIPT)
    leased = await worker.lease(max_tickets=3, block_ms=0)
    while len(leased) < 3:  # what is held counts against what was asked for
        leased += await worker.lease(max_tickets=3, block_ms=50)
    assert proxy.num_dropped == 1
    assert [one.ticket.number for one in leased] == [1, 2, 3]


async def test_a_ticket_lost_on_the_way_to_a_waiting_worker_arrives_all_the_same(
    learner: LearnerStream, worker: WorkerStream, proxy: Proxy
) -> None:
    assert await worker.lease(max_tickets=1, block_ms=1) == []
    proxy.drop_reply_to(b"XREADGROUP\r\n", times=1)
    waiting = asyncio.create_task(worker.lease(max_tickets=1, block_ms=2000))
    await asyncio.to_thread(learner.issue, [make_ticket(0)])
    leased = await waiting or await worker.lease(max_tickets=1, block_ms=2000)
    assert [one.ticket.number for one in leased] == [0]


def test_a_server_that_stays_away_is_named_and_given_up(proxy: Proxy, lossy: redis.Redis, keys: Keys) -> None:
    stream = LearnerStream(lossy, keys, run_uid="uid", term=1, holder="job", lease_s=30.0, give_up_after_s=0.3)
    proxy.drop_reply_to(b"HGET", times=1000)
    with pytest.raises(TransportError, match=r"Redis at unix://.* could not read the operator's orders within 0.3 s"):
        stream.orders()


def test_a_server_that_is_away_for_a_moment_is_waited_for_when_it_is_looked_at(
    proxy: Proxy, lossy: redis.Redis
) -> None:
    proxy.drop_reply_to(b"INFO", times=3)
    check_server(lossy, give_up_after_s=10.0)
    proxy.drop_reply_to(b"INFO", times=1000)
    with pytest.raises(TransportError, match=r"could not read the server's info within 0.3 s"):
        check_server(lossy, give_up_after_s=0.3)


def test_connections_that_ended_while_nobody_spoke_are_made_again(learner: LearnerStream, proxy: Proxy) -> None:
    proxy.break_connections()
    learner.issue([make_ticket(0)])
    assert [ticket.number for ticket in learner.present_tickets("train")] == [0]
