"""Tickets whose samples are episodes of several turns: how a worker holds, counts and watches what is under way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from streamrl.protocol.wire.ticket import Ticket
from streamrl.workers.engines.base import Engine, SampleRequest
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.sessions.trace import Played, Trace
from tests.worker_world import WorkerWorld, worker_config


class PlayerDouble:
    """Two turns; between them a ticket's row may say that its environment is waited for, until it answers."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.num_waiting = 0

    async def play(self, ticket: Ticket, engine: Engine, request: SampleRequest) -> Played:
        trace, context = Trace(request.prompt_ids), request.prompt_ids
        for turn in range(2):
            asked = replace(request, request_id=f"{request.request_id}-{turn}", prompt_ids=context)
            generated = await engine.generate(asked)
            trace.take(context, generated, given="")
            context = np.concatenate([context, generated.token_ids])
            if turn == 0 and ticket.fields.get("waits"):
                self.num_waiting += 1
                await self.answers.wait()
        return trace.played("stop", 1.0)

    def outage(self) -> None:
        pass


async def test_short_episodes_are_delivered_while_long_ones_go_on() -> None:
    player = PlayerDouble()
    world = WorkerWorld(player=player, max_groups_in_flight=4)
    for number in range(12):
        world.put(number, num_samples=2, fields={"waits": number in (0, 1, 4)})
    world.start()

    done = {group.header.ticket for group in await world.delivered(9)}
    assert done == set(range(12)) - {0, 1, 4}
    assert player.num_waiting == 6
    player.answers.set()
    await world.delivered(12)
    await world.finish()


async def test_episodes_that_wait_for_their_environment_keep_places_and_leases_and_are_no_stall_of_the_engine() -> None:
    player = PlayerDouble()
    world = WorkerWorld(player=player, max_groups_in_flight=2, lease_s=0.1, stall_s=0.2)
    for number in range(5):
        world.put(number, num_samples=4, fields={"waits": True})
    world.start()

    await world.until(lambda: player.num_waiting == 8, "two tickets wait for their environment")
    await world.until(lambda: world.tickets.renewals > 32, "the leases are renewed for far longer than stall_s")
    assert (len(world.tickets.waiting), len(world.engine.requests)) == (3, 8), "no more than may be in flight"
    facts = world.progress.report().detail
    assert (facts["rewards/environment/under_way"], facts["in_flight"]) == (8, 0)
    player.answers.set()
    await world.delivered(5)
    await world.finish()


async def test_later_turns_are_counted_by_the_engine_as_first_ones_are() -> None:
    engine = EngineDouble(hold=True, capacity=4)
    world = WorkerWorld(engine=engine, player=PlayerDouble(), max_groups_in_flight=32)
    for number in range(8):
        world.put(number, num_samples=4)
    world.start()
    await world.until(lambda: len(engine.requests) >= 8, "the engine is full, and a ticket waits")
    engine.release()
    await world.delivered(8)
    assert len(engine.requests) == 2 * 8 * 4
    await world.finish()


async def test_none_is_under_way_any_more_where_the_worker_leaves_for_other_settings() -> None:
    """The monitor would call the minutes in which the next engine starts a slow environment."""
    player = PlayerDouble()
    world = WorkerWorld(player=player)
    world.put(1, num_samples=2, fields={"waits": True})
    task = world.start()
    await world.until(lambda: player.num_waiting == 2, "both samples wait for their environment")
    world.tickets.info = replace(world.info, config_json=worker_config(min_survivors=3).model_dump_json())
    await asyncio.wait_for(task, 60)
    facts = world.progress.report().detail
    assert (facts["rewards/environment/under_way"], facts["in_flight"]) == (0, 0)
