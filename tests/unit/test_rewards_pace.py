"""The pace of requests that a service may be asked at: one behind the other, also after a pause of the loop."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from streamrl.workers.rewards.replicas import RequestPace


async def test_turns_come_one_behind_the_other() -> None:
    pace, loop = RequestPace(1000.0), asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(pace.turn(object) for _ in range(50)))
    assert loop.time() - began >= 0.049


async def test_a_turn_that_nobody_takes_is_left_to_the_next() -> None:
    pace, answers = RequestPace(0.001), iter([None, "taken"])
    assert await asyncio.wait_for(pace.turn(lambda: next(answers)), 60) is None
    assert await asyncio.wait_for(pace.turn(lambda: next(answers)), 60) == "taken"


async def test_requests_that_waited_for_a_busy_loop_do_not_go_out_together() -> None:
    pace, begun = RequestPace(20.0), list[float]()

    async def ask() -> None:
        await pace.turn(object)
        begun.append(time.monotonic())

    asking = [asyncio.create_task(ask()) for _ in range(6)]
    await asyncio.sleep(0)
    time.sleep(0.4)  # noqa: ASYNC251 - a loop that is busy for so long
    await asyncio.gather(*asking)

    assert min(after - before for before, after in pairwise(begun)) > 0.9 / 20.0
