"""Leasing, renewing, handing back: who may work on a ticket, and for how long."""

from __future__ import annotations

import asyncio
import time

import redis

from streamrl.protocol.transport.keys import WORKERS, Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.snapshot import snapshot
from streamrl.protocol.transport.types import Leased
from streamrl.protocol.transport.worker import WorkerStream
from tests.helpers import make_ticket, wait_until_async
from tests.redis.conftest import LEASE_S, MakeWorker
from tests.redis.leasing import all_of, numbers


def delivery_counts(client: redis.Redis, keys: Keys) -> list[int]:
    pending = client.xpending_range(keys.tickets("train"), WORKERS, min="-", max="+", count=100)
    return [entry["times_delivered"] for entry in pending]


async def test_a_ticket_arrives_as_it_was_issued(learner: LearnerStream, worker: WorkerStream) -> None:
    ticket = make_ticket(7, fields={"answer": "42"}, attempt=2, min_version=5, retry_of=3)
    learner.issue([ticket])
    [leased] = await worker.lease(max_tickets=4, block_ms=0)
    assert leased.purpose == "train"
    assert leased.ticket.fields == {"answer": "42"}
    assert (leased.ticket.number, leased.ticket.attempt, leased.ticket.retry_of) == (7, 2, 3)


async def test_evaluation_is_leased_before_training(learner: LearnerStream, worker: WorkerStream) -> None:
    learner.issue([make_ticket(0), make_ticket(1), make_ticket(5, purpose="eval")])
    leased = await worker.lease(max_tickets=2, block_ms=0)
    assert [(one.purpose, one.ticket.number) for one in leased] == [("eval", 5), ("train", 0)]


async def test_two_workers_never_lease_the_same_ticket_at_once(learner: LearnerStream, make_worker: MakeWorker) -> None:
    learner.issue([make_ticket(n) for n in range(40)])
    workers = [make_worker(f"w{n}", lease_s=30.0) for n in range(4)]
    taken = await asyncio.gather(*(all_of(worker, 10) for worker in workers))
    assert sorted(number for leased in taken for number in numbers(leased)) == list(range(40))


async def test_no_more_tickets_come_than_were_asked_for(learner: LearnerStream, worker: WorkerStream) -> None:
    learner.issue([make_ticket(n) for n in range(5)] + [make_ticket(n, purpose="eval") for n in range(5)])
    sizes = [len(await worker.lease(max_tickets=3, block_ms=0)) for _ in range(5)]
    assert sizes == [3, 3, 3, 1, 0]


async def test_a_waiting_worker_wakes_when_a_ticket_is_issued(learner: LearnerStream, worker: WorkerStream) -> None:
    await worker.run_info()
    waiting = asyncio.create_task(all_of(worker, 3, block_ms=5000))
    await asyncio.to_thread(learner.issue, [make_ticket(n) for n in range(3)])
    assert numbers(await waiting) == [0, 1, 2]


async def test_a_wait_without_tickets_ends_empty(learner: LearnerStream, worker: WorkerStream) -> None:
    assert await worker.lease(max_tickets=1, block_ms=30) == []


async def test_an_expired_lease_goes_to_another_worker(learner: LearnerStream, make_worker: MakeWorker) -> None:
    learner.issue([make_ticket(0)])
    began = time.monotonic()
    await make_worker("dies").lease(max_tickets=1, block_ms=0)
    assert await make_worker("patient").lease(max_tickets=1, block_ms=0) == []
    assert numbers(await all_of(make_worker("lives", lease_s=LEASE_S), 1)) == [0]
    assert time.monotonic() - began >= LEASE_S * 0.9


async def test_a_renewed_lease_does_not_expire_and_no_delivery_is_counted(
    learner: LearnerStream, make_worker: MakeWorker, client: redis.Redis, keys: Keys
) -> None:
    lease_s = 2.0  # longer than the test may be held up between two lines
    learner.issue([make_ticket(0)])
    owner, other = make_worker("owner", lease_s=lease_s), make_worker("other", lease_s=lease_s)
    leased = await owner.lease(max_tickets=1, block_ms=0)
    began = time.monotonic()

    async def a_lease_has_passed() -> bool:
        assert await owner.renew(leased) == []
        assert await other.lease(max_tickets=1, block_ms=0) == []
        return time.monotonic() - began > 1.2 * lease_s

    await wait_until_async(a_lease_has_passed, description="more than the length of a lease")
    assert delivery_counts(client, keys) == [1]


async def test_renewing_does_not_steal_back_what_another_claimed(
    learner: LearnerStream, make_worker: MakeWorker
) -> None:
    learner.issue([make_ticket(0), make_ticket(1)])
    slow, other = make_worker("slow"), make_worker("other", lease_s=LEASE_S)
    leased = await slow.lease(max_tickets=2, block_ms=0)
    await all_of(other, 2)
    assert await slow.renew(leased) == leased
    assert await slow.lease(max_tickets=2, block_ms=0) == []


async def test_a_worker_is_not_handed_what_it_holds_when_its_own_lease_ran_out(
    learner: LearnerStream, make_worker: MakeWorker, client: redis.Redis, keys: Keys
) -> None:
    worker = make_worker(lease_s=2.0)  # it forgets after three of them
    learner.issue([make_ticket(0)])
    leased = await worker.lease(max_tickets=1, block_ms=0)

    async def reclaimed_by_itself() -> bool:
        assert await worker.lease(max_tickets=1, block_ms=10) == []
        return delivery_counts(client, keys) > [1]

    await wait_until_async(reclaimed_by_itself, description="the worker reclaims its own lease")
    assert await worker.renew(leased) == []


async def test_tickets_handed_back_go_to_others_at_once(learner: LearnerStream, make_worker: MakeWorker) -> None:
    learner.issue([make_ticket(n) for n in range(3)])
    leaving, other = make_worker("leaving"), make_worker("other")
    leased = await leaving.lease(max_tickets=3, block_ms=0)
    await leaving.hand_back(leased[1:])
    assert numbers(await other.lease(max_tickets=3, block_ms=0)) == [1, 2]


async def test_handing_back_leaves_alone_what_another_claimed(learner: LearnerStream, make_worker: MakeWorker) -> None:
    learner.issue([make_ticket(0)])
    slow, owner, third = make_worker("slow"), make_worker("owner", lease_s=LEASE_S), make_worker("third")
    leased = await slow.lease(max_tickets=1, block_ms=0)
    await all_of(owner, 1)
    await slow.hand_back(leased)
    assert await third.lease(max_tickets=1, block_ms=0) == []


async def test_leaving_hands_back_everything_and_forgets_the_name(
    learner: LearnerStream, make_worker: MakeWorker, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(n) for n in range(3)])
    leaving, other = make_worker("leaving"), make_worker("other")
    await leaving.lease(max_tickets=2, block_ms=0)
    await leaving.leave()
    names = {consumer["name"] for consumer in client.xinfo_consumers(keys.tickets("train"), WORKERS)}
    assert b"leaving" not in names
    assert sorted(numbers(await all_of(other, 3))) == [0, 1, 2]


async def test_a_worker_started_again_under_its_name_gets_its_leases_back(
    learner: LearnerStream, make_worker: MakeWorker
) -> None:
    learner.issue([make_ticket(n) for n in range(5)])
    await make_worker("same").lease(max_tickets=4, block_ms=0)
    again = make_worker("same")
    assert numbers(await again.lease(max_tickets=3, block_ms=0)) == [0, 1, 2]
    assert numbers(await all_of(again, 2)) == [3, 4]


async def test_how_often_a_ticket_was_leased_counts_neither_hand_backs_nor_lost_replies(
    learner: LearnerStream, make_worker: MakeWorker, client: redis.Redis, keys: Keys
) -> None:
    """Monitors tell by it which tickets kill their workers."""
    learner.issue([make_ticket(0)])
    for name in ("busy", "leaving", "another"):
        worker = make_worker(name)
        leased = await worker.lease(max_tickets=1, block_ms=0)
        assert numbers(leased) == [0]
        await (worker.leave() if name == "leaving" else worker.hand_back(leased))
    for _ in range(3):  # each looks for what a reply that was lost may have given to its name
        assert numbers(await make_worker("again").lease(max_tickets=1, block_ms=0)) == [0]

    assert delivery_counts(client, keys) == [1]
    await all_of(make_worker("heir", lease_s=LEASE_S), 1)
    assert delivery_counts(client, keys) == [2]


async def test_what_was_handed_back_is_leased_by_nobody(
    learner: LearnerStream, make_worker: MakeWorker, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(n) for n in range(3)])
    busy, leaving = make_worker("busy"), make_worker("leaving")
    handed_back = await leaving.lease(max_tickets=1, block_ms=0)
    await busy.lease(max_tickets=1, block_ms=0)
    await leaving.lease(max_tickets=1, block_ms=0)

    await leaving.hand_back(handed_back)
    await leaving.leave()

    seen = snapshot(client, keys).streams["train"]
    assert (seen.num_tickets, seen.num_leased, seen.leased_by) == (3, 1, {"busy": 1})
    assert seen.oldest_lease is not None
    assert (seen.oldest_lease.worker, seen.oldest_lease.times_leased) == ("busy", 1)


async def test_a_deleted_ticket_that_was_pending_is_forgotten(
    learner: LearnerStream, worker: WorkerStream, make_worker: MakeWorker, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(0), make_ticket(1)])
    leased = await worker.lease(max_tickets=1, block_ms=0)
    client.xdel(keys.tickets("train"), leased[0].entry_id)  # by a stranger: still pending
    other = make_worker("other", lease_s=LEASE_S)

    async def forgotten() -> bool:
        assert 0 not in numbers(await other.lease(max_tickets=4, block_ms=10))
        pending = client.xpending_range(keys.tickets("train"), WORKERS, min="-", max="+", count=10)
        return leased[0].entry_id.encode() not in [entry["message_id"] for entry in pending]

    await wait_until_async(forgotten, description="the deleted entry left the pending list")


async def test_an_unreadable_ticket_is_left_for_others_and_the_rest_arrives(
    learner: LearnerStream, worker: WorkerStream, client: redis.Redis, keys: Keys
) -> None:
    stream = keys.tickets("train")
    client.xadd(stream, {"n": "0", "u": "uid", "b": b"\xff not a ticket"})
    client.xadd(stream, {"nonsense": "1"})
    learner.issue([make_ticket(2)])
    assert numbers(await worker.lease(max_tickets=4, block_ms=0)) == [2]
    assert client.xlen(stream) == 3


async def test_a_waiting_worker_takes_no_more_than_it_asked_for_and_evaluation_first(
    learner: LearnerStream, make_worker: MakeWorker
) -> None:
    waiting, other = make_worker("waiting"), make_worker("other")
    assert await waiting.lease(max_tickets=2, block_ms=1) == []
    learner.issue([make_ticket(n) for n in range(3)])
    learner.issue([make_ticket(n, purpose="eval") for n in range(2)])
    leased = await waiting.lease(max_tickets=2, block_ms=5000)
    assert [(one.purpose, one.ticket.number) for one in leased] == [("eval", 0), ("eval", 1)]
    rest = await other.lease(max_tickets=9, block_ms=0)
    assert [(one.purpose, one.ticket.number) for one in rest] == [("train", n) for n in range(3)]
    assert await waiting.renew(leased) == []


async def test_a_worker_that_waits_all_the_time_takes_up_an_expired_lease_in_a_small_part_of_its_length(
    learner: LearnerStream, make_worker: MakeWorker
) -> None:
    """However long each of its waits may be."""
    lease_s = 1.0
    doomed, heir = make_worker("doomed", lease_s=lease_s), make_worker("heir", lease_s=lease_s)
    learner.issue([make_ticket(0)])
    [held] = await doomed.lease(max_tickets=1, block_ms=0)
    began = time.monotonic()
    await doomed.renew([held])
    leased: list[Leased] = []
    num_looks = 0
    while not leased and time.monotonic() < began + 60 * lease_s:
        leased = await heir.lease(max_tickets=1, block_ms=5000)
        num_looks += 1
    assert [one.entry_id for one in leased] == [held.entry_id]
    assert time.monotonic() - began > 0.95 * lease_s
    assert num_looks > 3, "one that waits as long as it may looks twice"


async def test_tickets_of_one_kind_come_without_a_pause_while_there_is_no_stream_of_the_other(
    learner: LearnerStream, make_worker: MakeWorker, client: redis.Redis, keys: Keys
) -> None:
    learner.issue([make_ticket(n, purpose="eval") for n in range(12)])
    client.delete(keys.tickets("train"))  # validation may come before the first training ticket
    worker = make_worker()
    came = [numbers(await worker.lease(max_tickets=1, block_ms=20)) for _ in range(12)]
    assert came.count([]) <= 1  # the one that finds it out


async def test_training_tickets_that_came_beside_evaluation_are_not_left_lying(
    learner: LearnerStream, make_worker: MakeWorker
) -> None:
    learner.issue([make_ticket(n) for n in range(6)])
    learner.issue([make_ticket(n, purpose="eval") for n in range(6)])
    worker = make_worker()
    came = [numbers(await worker.lease(max_tickets=1, block_ms=20)) for _ in range(12)]
    assert came == [[n] for n in (*range(6), *range(6))]


async def test_many_tickets_handed_back_are_taken_up_one_after_the_other_without_a_pause(
    learner: LearnerStream, make_worker: MakeWorker
) -> None:
    learner.issue([make_ticket(n) for n in range(6)])
    leaving, staying = make_worker("leaving"), make_worker("staying")
    await leaving.hand_back(await leaving.lease(max_tickets=6, block_ms=0))
    came = [numbers(await staying.lease(max_tickets=1, block_ms=20)) for _ in range(6)]
    assert sorted(number for numbers_ in came for number in numbers_) == list(range(6))
