"""Environments as services that are away: who waits, and whose tickets go back."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from streamrl.errors import RewardOutage, SampleError
from streamrl.workers.environments.base import Answer
from streamrl.workers.environments.remote import ATTEMPTS, RemoteEnvironment
from tests.helpers import wait_until_async
from tests.http_reward_world import until
from tests.remote_environment_world import ONE, TWO, Services, played_by


async def test_while_no_replica_is_there_rollouts_wait_and_none_fails() -> None:
    services = Services("one", "two")
    services.down = {"one", "two"}
    async with played_by(services, ONE, TWO) as remote:
        waiting = [asyncio.create_task(remote.begin({"name": str(i)})) for i in range(20)]

        async def is_out() -> bool:
            return remote.outage() is not None

        await wait_until_async(is_out, description="the outage shows")
        assert not any(task.done() for task in waiting)
        services.down = {"two"}
        rollouts = await asyncio.gather(*waiting)
        assert [(await one.step("x")).observation for one in rollouts] == [f"{i}: x" for i in range(20)]
        assert remote.outage() is None


async def test_an_outage_that_lasts_gives_tickets_back() -> None:
    services = Services("one")
    services.down = {"one"}
    async with played_by(services, ONE, outage_s=0.2) as remote:
        with pytest.raises(RewardOutage, match=r"answered for 0.2 s: http://one:1: ConnectError: refused"):
            await remote.begin({"name": "a"})


@pytest.mark.parametrize("num_before", [0, 1])
async def test_restarts_of_a_service_that_plays_in_between_fail_nothing(num_before: int) -> None:
    """However long it is since the first one, and even if all rollouts are cut off: no answer was `done`."""
    services, loop = Services("one"), asyncio.get_running_loop()
    async with played_by(services, ONE, outage_s=0.3) as remote:
        for _ in range(2):
            lost = await remote.begin({"name": "a"})
            for _ in range(num_before):
                await lost.step("x")
            services.begin_anew("one")
            with pytest.raises(RewardOutage, match="answered 410"):
                await lost.step("x")
            await lost.close()
            cut_off = await remote.begin({"name": "a"})
            assert not (await cut_off.step("x")).done
            await cut_off.close()
            until_s = loop.time() + 0.3
            await until(lambda until_s=until_s: loop.time() > until_s, "longer ago than an outage may last")


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_gateway_before_a_service_that_is_away_is_an_outage_too(status: int) -> None:
    services, away = Services("one", "two"), [True]
    services.meddle = lambda host, path, answer: httpx.Response(status) if away[0] else answer
    async with played_by(services, ONE, TWO) as remote:
        waiting = [asyncio.create_task(remote.begin({"name": str(i)})) for i in range(2)]

        async def is_asked_often() -> bool:
            return len(services.asked) > 2 * ATTEMPTS

        await wait_until_async(is_asked_often, description="more questions than all rollouts have attempts")
        assert not any(task.done() for task in waiting)
        away[0] = False
        rollouts = await asyncio.gather(*waiting)
        assert [(await one.step("x")).observation for one in rollouts] == [f"{i}: x" for i in range(2)]


async def test_a_gateway_before_a_service_that_stays_away_gives_tickets_back() -> None:
    services = Services("one")
    services.meddle = lambda host, path, answer: httpx.Response(503, text="no backend")
    async with played_by(services, ONE, outage_s=0.5) as remote:
        with pytest.raises(RewardOutage, match=r"answered for 0.5 s: http://one:1: answered 503: no backend"):
            await remote.begin({"name": "a"})


async def test_a_replica_that_dies_costs_its_own_rollouts_alone() -> None:
    services = Services("one", "two")
    async with played_by(services, ONE, TWO) as remote:
        rollouts = [await remote.begin({"name": str(i)}) for i in range(8)]
        services.down = {"one"}
        told = await asyncio.gather(*(one.step("x") for one in rollouts), return_exceptions=True)
        num_of_one = sum(isinstance(one, SampleError) for one in told)
        assert num_of_one == services.environments["one"].num_open
        assert sum(isinstance(one, Answer) for one in told) == 8 - num_of_one > 0
        assert (await (await remote.begin({"name": "new"})).step("x")).observation == "new: x"
        services.down = set()

        async def is_asked_again() -> bool:
            await remote.begin({"name": "new"})
            return services.environments["one"].num_open > num_of_one

        await wait_until_async(is_asked_again, description="the first one has rollouts again")


@pytest.mark.parametrize("comes_back", [True, False])
async def test_where_the_only_replica_is_lost_the_ticket_goes_back(comes_back: bool) -> None:
    services = Services("one")
    async with played_by(services, ONE) as remote:
        rollout = await remote.begin({"name": "a"})
        services.begin_anew("one")
        if not comes_back:
            services.down = {"one"}
        with pytest.raises(RewardOutage, match="lost with its replica: http://one:1"):
            await rollout.step("x")


@pytest.mark.parametrize("num_before", [0, 1])
async def test_a_service_that_keeps_losing_rollouts_fails_them_in_the_end(num_before: int) -> None:
    services = Services("one")

    async def play(remote: RemoteEnvironment) -> type[Exception]:
        rollout = await remote.begin({"name": "a"})
        for _ in range(num_before):
            await rollout.step("x")
        services.begin_anew("one")
        with pytest.raises((RewardOutage, SampleError)) as raised:
            await rollout.step("x")
        await rollout.close()
        return raised.type

    async with played_by(services, ONE, outage_s=0.3) as remote:
        assert await play(remote) is RewardOutage

        async def fails() -> bool:
            return await play(remote) is SampleError

        await wait_until_async(fails, description="nothing has come to an end for so long that samples fail")
