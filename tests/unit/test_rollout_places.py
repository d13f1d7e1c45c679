"""How many tickets a worker takes, and when its engine counts as stuck."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.errors import EngineError
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.rewards.base import RewardDouble
from tests.worker_world import WorkerWorld


async def test_no_more_tickets_are_taken_than_may_be_in_flight() -> None:
    world = WorkerWorld(engine=EngineDouble(hold=True), max_groups_in_flight=2, lease_s=0.1)
    for number in range(5):
        world.put(number, num_samples=4)
    world.start()
    await world.until(lambda: len(world.engine.requests) >= 8, "two tickets are in flight")
    await world.until(lambda: world.tickets.renewals > 8, "the worker has looked again")
    assert len(world.tickets.waiting) == 3

    world.engine.release()
    await world.delivered(5)
    await world.finish()


async def test_the_place_of_a_sample_that_is_done_does_not_wait_for_the_last_one_of_its_group() -> None:
    first_of_each = EngineDouble(hold=True, holds=lambda request: len(first_of_each.requests) % 4 == 1)
    world = WorkerWorld(engine=first_of_each, max_groups_in_flight=2)
    for number in range(12):
        world.put(number, num_samples=4)
    world.start()
    await world.until(lambda: len(world.engine.requests) == 4 * 8, "as many groups are begun as there are places")
    await world.until(lambda: world.engine.stats().in_flight == 8, "each waits for its last sample alone")
    assert len(world.tickets.waiting) == 4
    assert not world.tickets.delivered

    world.engine.release()
    await world.delivered(12)
    await world.finish()


async def test_samples_that_wait_for_their_scores_keep_their_places() -> None:
    slow = RewardDouble()
    slow.held = asyncio.Event()
    world = WorkerWorld(source=slow, max_groups_in_flight=2, lease_s=0.1)
    for number in range(5):
        world.put(number, num_samples=4)
    world.start()
    await world.until(lambda: len(slow.items) >= 8, "two tickets wait for their scores")
    await world.until(lambda: world.tickets.renewals > 8, "the worker has looked again")
    assert len(world.tickets.waiting) == 3

    slow.held.set()
    await world.delivered(5)
    await world.finish()


async def test_a_worker_takes_no_more_than_its_engine_can_soon_begin() -> None:
    world = WorkerWorld(engine=EngineDouble(hold=True, capacity=4), max_groups_in_flight=32)
    for number in range(20):
        world.put(number, num_samples=4)
    world.start()
    await world.until(lambda: len(world.engine.requests) >= 8, "the engine is full, and a ticket waits")
    await world.until(lambda: world.progress.report().detail.get("waiting") == 4, "the worker has looked again")
    assert len(world.engine.requests) == 8

    world.engine.release()
    await world.delivered(20)
    await world.finish()


async def test_a_worker_whose_cache_is_nearly_full_takes_nothing_more() -> None:
    world = WorkerWorld(engine=EngineDouble(hold=True), max_groups_in_flight=32)
    world.engine.kv_used = 0.9
    world.put(1)
    world.put(2)
    world.start()
    await world.until(lambda: world.progress.report().detail.get("in_flight") == 2, "the worker has looked again")
    assert [ticket.number for ticket in world.tickets.waiting] == [2]
    await world.finish()


async def test_workers_share_the_tickets_by_their_speed() -> None:
    fast = WorkerWorld(engine=EngineDouble(capacity=4, sample_s=0.005), max_groups_in_flight=32)
    slow = WorkerWorld(engine=EngineDouble(capacity=4, sample_s=0.04), max_groups_in_flight=32)
    slow.tickets.waiting = fast.tickets.waiting
    for number in range(60):
        fast.put(number, num_samples=4)
    for world in (fast, slow):
        world.start()
    await fast.until(
        lambda: len(fast.tickets.delivered) + len(slow.tickets.delivered) == 60, "all tickets are delivered"
    )
    for world in (fast, slow):
        await world.finish()
    assert 2 <= len(slow.tickets.delivered) <= 20


async def test_an_engine_that_answers_and_makes_no_token_is_given_up() -> None:
    world = WorkerWorld(engine=EngineDouble(hold=True), stall_s=0.1)
    world.put(1)
    with pytest.raises(EngineError, match=r"generated no token .* 2 samples were in flight \(worker\.stall_s = 0\.1\)"):
        await asyncio.wait_for(world.start(), 10)
    assert world.tickets.handed_back == [1]
