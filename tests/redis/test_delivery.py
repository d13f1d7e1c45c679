"""Delivery: a ticket gives exactly one group, whoever reclaims it and whatever reply is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import redis

from streamrl.protocol.transport import worker_scripts as scripts
from streamrl.protocol.transport.keys import WORKERS, Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.script import Call, run
from streamrl.protocol.transport.types import START, Leased
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.wire.group import decode_body, decode_header, encode_group
from streamrl.protocol.wire.ticket import PURPOSES
from tests.helpers import make_group, make_ticket, wait_until_async
from tests.redis.conftest import LEASE_S, MakeWorker


def packed(leased: Leased) -> tuple[bytes, bytes]:
    return encode_group(make_group(leased.ticket))


def delivered(learner: LearnerStream) -> list[int]:
    return [group.number for group in learner.present_groups("train", after=START)]


async def test_a_group_takes_its_tickets_place(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(3)])
    [leased] = await worker.lease(max_tickets=1, block_ms=0)
    header, body = packed(leased)
    assert await worker.deliver(leased, header, body)
    [entry] = learner.read("train", after=START, count=10, block_ms=0)
    assert (entry.number, entry.run_uid) == (3, "uid")
    assert decode_body(decode_header(entry.header), entry.body).header.ticket == 3
    assert learner.present_tickets("train") == []
    assert client.xpending(keys.tickets("train"), WORKERS)["pending"] == 0


async def test_evaluation_groups_go_to_their_own_stream(learner: LearnerStream, worker: WorkerStream) -> None:
    learner.issue([make_ticket(0, purpose="eval")])
    [leased] = await worker.lease(max_tickets=1, block_ms=0)
    assert await worker.deliver(leased, *packed(leased))
    assert delivered(learner) == []
    assert [entry.number for entry in learner.read("eval", after=START, count=1, block_ms=0)] == [0]


async def test_a_reclaimed_ticket_gives_one_group_and_the_second_delivery_is_counted(
    learner: LearnerStream, make_worker: MakeWorker, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(0)])
    slow, quick = make_worker("slow"), make_worker("quick", lease_s=LEASE_S)
    [first] = await slow.lease(max_tickets=1, block_ms=0)
    reclaimed: list[Leased] = []

    async def is_reclaimed() -> bool:
        reclaimed.extend(await quick.lease(max_tickets=1, block_ms=10))
        return bool(reclaimed)

    await wait_until_async(is_reclaimed, description="the expired lease is reclaimed")
    assert await quick.deliver(reclaimed[0], *packed(reclaimed[0]))
    assert not await slow.deliver(first, *packed(first))
    assert delivered(learner) == [0]
    assert client.hget(keys.counters, "duplicates:train") == b"1"
    assert client.hget(keys.counters, "delivered:train") == b"1"


async def test_a_late_worker_is_refused_once_another_holds_the_ticket(
    learner: LearnerStream, make_worker: MakeWorker, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(0)])
    slow, other = make_worker("slow"), make_worker("other")
    [leased] = await slow.lease(max_tickets=1, block_ms=0)
    await slow.hand_back([leased])
    [held] = await other.lease(max_tickets=1, block_ms=0)
    assert not await slow.deliver(leased, *packed(leased))
    assert client.hget(keys.counters, "refused:train") == b"1"
    assert await other.renew([held]) == []
    assert await other.deliver(held, *packed(held))
    assert delivered(learner) == [0]


async def test_a_late_worker_may_deliver_what_nobody_took_over(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    tickets = keys.tickets("train")
    learner.issue([make_ticket(0)])
    [leased] = await worker.lease(max_tickets=1, block_ms=0)
    [pending] = client.xpending_range(tickets, WORKERS, "-", "+", 1)
    client.xclaim(tickets, WORKERS, pending["consumer"], 0, [leased.entry_id], idle=86_400_000, justid=True)
    assert await worker.deliver(leased, *packed(leased))
    assert delivered(learner) == [0]


async def test_what_a_worker_handed_back_is_no_more_its_own_to_deliver(
    learner: LearnerStream, worker: WorkerStream
) -> None:
    learner.issue([make_ticket(0)])
    [leased] = await worker.lease(max_tickets=1, block_ms=0)
    await worker.hand_back([leased])
    assert not await worker.deliver(leased, *packed(leased))
    assert delivered(learner) == []


async def test_an_answer_to_something_else_under_the_same_number_is_not_delivered(
    learner: LearnerStream, worker: WorkerStream
) -> None:
    """Redis went back, and forth again: the entry is the worker's, and asks for another prompt."""
    learner.issue([make_ticket(0)])
    [leased] = await worker.lease(max_tickets=1, block_ms=0)
    other = replace(leased, ticket=make_ticket(0, retry_of=7))
    assert not await worker.deliver(other, *packed(other))
    assert await worker.deliver(leased, *packed(leased))


async def test_a_ticket_the_learner_took_back_is_not_delivered(learner: LearnerStream, worker: WorkerStream) -> None:
    learner.issue([make_ticket(0)])
    [leased] = await worker.lease(max_tickets=1, block_ms=0)
    learner.delete_tickets("train", [leased.entry_id])
    assert await worker.renew([leased]) == [leased]
    assert not await worker.deliver(leased, *packed(leased))
    assert delivered(learner) == []


async def test_an_entry_id_given_again_to_another_ticket_is_not_delivered_for_it(
    learner: LearnerStream, make_worker: MakeWorker, client: redis.Redis, keys: Keys
) -> None:
    """After a failover to a server with a slower clock an id comes again: here ticket 61 under the id of ticket 57."""
    learner.issue([make_ticket(57)])
    old, new = make_worker("old"), make_worker("new")
    [lost] = await old.lease(max_tickets=1, block_ms=0)
    client.delete(keys.tickets("train"))
    learner.restore(cursor=START)
    donor = make_ticket(61)
    learner.issue([donor])
    [(_, fields)] = client.xrange(keys.tickets("train"))
    client.delete(keys.tickets("train"))
    client.xgroup_create(keys.tickets("train"), WORKERS, id="0", mkstream=True)
    client.xadd(keys.tickets("train"), fields, id=lost.entry_id)
    [held] = await new.lease(max_tickets=1, block_ms=0)
    assert held.entry_id == lost.entry_id

    assert not await old.deliver(lost, *packed(lost))
    assert [(t.number, t.entry_id) for t in learner.present_tickets("train")] == [(61, held.entry_id)]
    assert await new.deliver(held, *packed(held))
    assert delivered(learner) == [61]


async def test_a_ticket_of_another_run_under_the_same_id_is_not_delivered_for(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(0)])
    [leased] = await worker.lease(max_tickets=1, block_ms=0)
    [(_, fields)] = client.xrange(keys.tickets("train"))
    client.delete(keys.tickets("train"))
    client.xgroup_create(keys.tickets("train"), WORKERS, id="0", mkstream=True)
    client.xadd(keys.tickets("train"), {**fields, b"u": b"other"}, id=leased.entry_id)
    client.xreadgroup(WORKERS, "somebody", {keys.tickets("train"): ">"})
    assert not await worker.deliver(leased, *packed(leased))
    assert client.xlen(keys.groups("train")) == 0


async def test_a_ticket_that_nobody_leased_is_not_delivered(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(0)])
    [(entry_id, _)] = client.xrange(keys.tickets("train"))
    await worker.run_info()
    forged = Leased(entry_id=entry_id.decode(), ticket=make_ticket(0), purpose="train")
    assert not await worker.deliver(forged, *packed(forged))
    assert delivered(learner) == []


async def test_the_same_number_issued_again_can_be_delivered_again(
    learner: LearnerStream, worker: WorkerStream
) -> None:
    """A failed attempt: the learner issues the ticket anew, and the receipt of the first delivery does not hinder."""
    for attempt in range(2):
        learner.issue([make_ticket(0, attempt=attempt)])
        [leased] = await worker.lease(max_tickets=1, block_ms=0)
        assert await worker.deliver(leased, *packed(leased))
        assert not await worker.deliver(replace(leased, entry_id="1-1"), *packed(leased))
    assert delivered(learner) == [0, 0]


async def test_a_call_that_comes_again_after_the_next_of_its_lane_delivers_nothing(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    """A worker that was taken for dead, or a road on which something lay for long."""
    learner.issue([make_ticket(n) for n in range(3)])
    leased = await worker.lease(max_tickets=3, block_ms=0)
    streams = [key for purpose in ("eval", "train") for key in (keys.tickets(purpose), keys.groups(purpose))]

    def call(one: Leased, *, lane: int) -> Call:
        touched = (keys.meta, keys.tombstone, keys.receipt("w", lane), keys.counters, *streams)
        entry = ("train", one.entry_id, one.ticket.number, one.ticket.identity, *packed(one))
        return Call(scripts.DELIVER, touched, ("uid", WORKERS, "w", f"call {one.entry_id}", 10_000, *entry))

    calls = [call(one, lane=lane) for lane, one in zip((0, 1, 0), leased, strict=True)]
    assert [run(client, call) for call in calls] == [[b"OK", b"1"]] * 3
    assert run(client, calls[1]) == [b"OK", b"1"]  # the other lane still has its receipt
    assert run(client, calls[0]) == [b"OK", b"0"]
    assert delivered(learner) == [0, 1, 2]


async def test_a_ticket_given_twice_in_one_call_is_delivered_once_and_the_others_beside_it(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([*(make_ticket(n) for n in range(3)), make_ticket(0, purpose="eval")])
    leased = await worker.lease(max_tickets=4, block_ms=0)
    twice = next(one for one in leased if one.ticket.number == 1)
    outcomes = await asyncio.gather(*(worker.deliver(one, *packed(one)) for one in (*leased, twice)))
    assert outcomes == [True] * 4 + [False]
    assert client.hget(keys.counters, "duplicates:train") == b"1"
    assert delivered(learner) == [0, 1, 2]
    assert [group.number for group in learner.present_groups("eval", after=START)] == [0]
    assert all(client.xpending(tickets, WORKERS)["pending"] == 0 for tickets in map(keys.tickets, PURPOSES))


async def test_many_workers_at_random_deliver_each_ticket_once(learner: LearnerStream, make_worker: MakeWorker) -> None:
    """Leases so short that tickets are reclaimed all the time, workers that deliver late, twice, or hand back."""
    num_tickets = 60
    learner.issue([make_ticket(n) for n in range(num_tickets)])

    async def work(worker: WorkerStream, place: int) -> None:
        turn = place
        while learner.present_tickets("train"):
            for leased in await worker.lease(max_tickets=4, block_ms=5):
                turn += 1
                if turn % 5 == 0:
                    await worker.hand_back([leased])
                elif turn % 3 == 0:
                    continue  # forgotten: its lease runs out
                else:
                    await worker.deliver(leased, *packed(leased))
                    await worker.deliver(leased, *packed(leased))

    workers = [make_worker(f"w{n}", lease_s=0.02) for n in range(6)]
    await asyncio.wait_for(asyncio.gather(*(work(w, n) for n, w in enumerate(workers))), timeout=240)
    assert sorted(delivered(learner)) == list(range(num_tickets))
