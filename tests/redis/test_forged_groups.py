"""Who may end a ticket, tried by the users of each role on a real server: the holder of its lease, and nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import redis

from streamrl.config import schema
from streamrl.protocol.transport.acl import Role
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.keys import WORKERS, Keys
from streamrl.protocol.transport.types import Leased
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.wire.ticket import Ticket
from tests.feed_world import encode_answer, encode_failure
from tests.redis.run_world import RunWorld

FORGERIES: Mapping[str, Callable[[Ticket], tuple[bytes, bytes]]] = {
    "no header": lambda ticket: (b"rubbish", b"rubbish"),
    "another model": lambda ticket: encode_answer(ticket, fingerprint="another"),
    "a failure": lambda ticket: encode_failure(ticket),
    "a sound answer": lambda ticket: encode_answer(ticket),
}


@pytest.fixture
async def world(
    tmp_path: Path, redis_url: str, keys: Keys, role_urls: Mapping[Role, str], redis_settings: schema.Redis
) -> AsyncIterator[RunWorld]:
    """Each part as the user of its role, but the judge."""
    with connect(role_urls["learner"], redis_settings) as learner:
        async with connect_async(role_urls["worker"], redis_settings) as worker:
            yield RunWorld(
                tmp_path, client=learner, async_client=worker, keys=keys, url=redis_url,
                worker={"max_attempts": 1},
            )  # fmt: skip


@pytest.fixture
async def leased(world: RunWorld) -> list[Leased]:
    """All tickets that wait, with an honest worker."""
    world.learner.plan()
    await world.worker.run_info()
    return await world.worker.lease(max_tickets=100, block_ms=0)


def entry_of(one: Leased, answer: tuple[bytes, bytes]) -> dict[str, str | int | bytes]:
    """As a raw write by somebody who has read the ticket."""
    ticket = one.ticket
    return {"n": ticket.number, "u": ticket.run_uid, "d": ticket.identity, "h": answer[0], "b": answer[1]}


async def every_ticket_is_answered_as_if_nothing_was(world: RunWorld, leased: list[Leased], *, forged: int) -> None:
    for _ in range(forged):  # read a few at a time
        assert world.learner.plan() is None
    assert world.learner.feed.metrics()["stream/ignored/not_leased"] == forged
    for each in leased:
        assert await world.worker.deliver(each, *encode_answer(each.ticket))
    trained = await world.train_steps(100)
    assert trained == list(range(len(world.prompts.rows)))
    world.learner.commit()
    audit = world.audit()
    assert (audit.clean, audit.trained, audit.dead, audit.dropped) == (True, len(trained), 0, {}), audit.to_json()


@pytest.mark.parametrize("kind", FORGERIES)
async def test_what_a_worker_puts_into_the_stream_by_itself_ends_no_ticket(
    world: RunWorld, leased: list[Leased], keys: Keys, role_urls: Mapping[Role, str], kind: str
) -> None:
    with connect(role_urls["worker"], schema.Redis()) as forger:
        for each in leased:
            forger.xadd(keys.groups("train"), entry_of(each, FORGERIES[kind](each.ticket)))
    await every_ticket_is_answered_as_if_nothing_was(world, leased, forged=len(leased))


@pytest.mark.parametrize("kind", [kind for kind in FORGERIES if kind != "a sound answer"])
async def test_nor_does_it_where_it_imitates_a_delivery(
    world: RunWorld, leased: list[Leased], keys: Keys, role_urls: Mapping[Role, str], kind: str
) -> None:
    with connect(role_urls["worker"], schema.Redis()) as forger:
        for each in leased:
            entry = {**entry_of(each, FORGERIES[kind](each.ticket)), "t": each.entry_id}
            forger.xadd(keys.groups("train"), entry)
    await every_ticket_is_answered_as_if_nothing_was(world, leased, forged=len(leased))


@pytest.mark.parametrize("kind", FORGERIES)
async def test_a_worker_delivers_nothing_for_tickets_that_another_holds(
    world: RunWorld, leased: list[Leased], client: redis.Redis, keys: Keys, kind: str
) -> None:
    other = WorkerStream(world.worker._client, keys, worker="other", lease_s=30.0, give_up_after_s=5.0)
    await other.run_info()
    for each in leased:
        assert not await other.deliver(each, *FORGERIES[kind](each.ticket))
    assert client.hget(keys.counters, "refused:train") == str(len(leased)).encode()
    assert client.xlen(keys.groups("train")) == 0


@pytest.mark.parametrize("role", ["monitor", "operator", "learner"])
async def test_no_other_role_puts_a_group_into_the_stream(
    world: RunWorld, leased: list[Leased], keys: Keys, role_urls: Mapping[Role, str], role: Role, is_redis_7: bool
) -> None:
    if not is_redis_7 and role == "learner":
        pytest.skip("before Redis 7 a learner may, as `WEAKER_BEFORE_7` says")
    with connect(role_urls[role], schema.Redis()) as forger, pytest.raises(redis.exceptions.NoPermissionError):
        forger.xadd(keys.groups("train"), entry_of(leased[0], encode_answer(leased[0].ticket)))


async def test_a_worker_may_take_a_lease_by_force_and_answers_its_ticket_then(
    world: RunWorld, leased: list[Leased], keys: Keys, role_urls: Mapping[Role, str]
) -> None:
    """What no rule can prevent, for leases that ran out are taken over in just this way: docs/architecture.md."""
    first = leased[0]
    with connect(role_urls["worker"], schema.Redis()) as forger:
        forger.xclaim(keys.tickets("train"), WORKERS, "other", 0, [first.entry_id])
    other = WorkerStream(world.worker._client, keys, worker="other", lease_s=30.0, give_up_after_s=5.0)
    await other.run_info()
    assert await other.deliver(first, *encode_failure(first.ticket))
    assert not await world.worker.deliver(first, *encode_answer(first.ticket))
    world.learner.plan()
    assert world.learner.feed.metrics()["stream/dead"] == 1
