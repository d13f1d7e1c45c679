"""What a worker says of itself over HTTP: yes only where it is true, and the reasons where it is not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from streamrl import web
from streamrl.errors import ConfigError, ResourceError, RewardError
from streamrl.process import bind, parse_address
from streamrl.telemetry.progress import Progress, Wait
from streamrl.versions import make_version
from streamrl.workers.engines.base import EngineStats
from streamrl.workers.health import Health, WorkingParts
from streamrl.workers.http import make_app, serving
from streamrl.workers.rewards.base import RewardDouble, ScoreItem
from streamrl.workers.rewards.mixing import Rewards, Weighted
from streamrl.workers.rollout.roles import WorkDouble
from streamrl.workers.weights.roles import WeightsDouble
from tests.made_pages import for_prometheus, told_for_prometheus
from tests.worker_world import a_score_item


class World:
    """A worker at work, whose parts say what a test tells them to."""

    def __init__(self, judge: Callable[[ScoreItem], float] = lambda item: 1.0, *, patience_s: float = 0.0) -> None:
        self.now, self.clock_is_off_by_s = 1000.0, 0.0
        self.progress = Progress(part="worker/0", role="worker", clock=self.clock, timer=lambda: self.now)
        self.health = Health(self.progress, timer=lambda: self.now)
        self.work, self.weights = WorkDouble(), WeightsDouble()
        self.work.engine_stats = stats()
        self.work.counts.groups_delivered = 7
        self.weights.num_proved, self.weights.proved_version = 1, make_version(1, 0)
        self.source = RewardDouble(judge)
        weighted = Weighted(reward=self.source, weight=1.0, patience_s=patience_s)
        self.rewards = Rewards({"made_up": weighted}, clock=lambda: self.now)

    def clock(self) -> float:
        return self.now + self.clock_is_off_by_s

    def found_its_run(self) -> None:
        self.health.parts = WorkingParts(work=self.work, weights=self.weights, rewards=self.rewards, stall_s=120.0)
        self.progress.working("generate")

    async def get(self, path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=make_app(self.health))
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
            return await client.get(path)


def stats(**changes: Any) -> EngineStats:
    fields = {"in_flight": 4, "num_made": 0, "num_waiting": 1, "kv_used": 0.5}
    return EngineStats(**{**fields, **changes})


@pytest.fixture
def world() -> World:
    made = World()
    made.found_its_run()
    return made


async def test_a_worker_that_generates_is_alive_and_ready(world: World) -> None:
    assert (await world.get("/livez")).status_code == 200
    ready = await world.get("/readyz")
    assert (ready.status_code, ready.json()["reasons"]) == (200, [])


async def test_a_worker_that_starts_is_alive_and_not_ready() -> None:
    world = World()
    assert (await world.get("/livez")).status_code == 200
    ready = await world.get("/readyz")
    assert (ready.status_code, ready.json()["reasons"]) == (503, ["starting: start"])


async def test_without_an_engine_or_a_proved_version_nothing_is_ready(world: World) -> None:
    world.weights.proved_version = 0
    world.progress.note(rejected="the canary is off")
    assert "the canary is off" in (await world.get("/readyz")).json()["reasons"][0]
    world.work.engine_stats = None
    assert "no engine is running" in (await world.get("/readyz")).json()["reasons"][0]
    assert (await world.get("/livez")).status_code == 200


async def test_an_engine_that_makes_no_token_is_first_not_ready_and_then_not_alive(world: World) -> None:
    world.now += 130.0
    assert (await world.get("/readyz")).status_code == 503
    assert (await world.get("/livez")).status_code == 200
    world.now += 300.0
    assert "no progress for 430 s" in (await world.get("/livez")).json()["reasons"][0]

    world.work.engine_stats = stats(num_made=1)
    assert (await world.get("/livez")).status_code == 200
    assert (await world.get("/readyz")).status_code == 200


async def test_a_clock_that_is_set_ends_no_worker(world: World) -> None:
    world.now += 130.0
    world.clock_is_off_by_s = 3600.0
    assert (await world.get("/livez")).status_code == 200
    world.now += 300.0
    world.clock_is_off_by_s = -3600.0
    assert "no progress for 430 s" in (await world.get("/livez")).json()["reasons"][0]


async def test_an_engine_that_loads_or_returns_weights_is_alive_however_long_it_makes_no_token(world: World) -> None:
    world.now += 430.0
    world.work.engine_stats = stats(is_busy=True)
    assert (await world.get("/livez")).status_code == 200
    world.work.engine_stats = stats()
    assert (await world.get("/livez")).status_code == 200
    world.now += 430.0
    assert (await world.get("/livez")).status_code == 503


async def test_a_worker_without_tickets_is_ready_however_long_it_waits(world: World) -> None:
    world.work.engine_stats = stats(in_flight=0)
    with world.progress.waiting(Wait.TICKETS):
        world.now += 10_000.0
        assert (await world.get("/livez")).status_code == 200
        assert (await world.get("/readyz")).status_code == 200


async def test_a_reward_source_out_of_reach_is_a_reason_until_a_score_comes() -> None:
    refusing = True

    def judge(item: ScoreItem) -> float:
        if refusing:
            raise RewardError("connection refused")
        return 1.0

    world = World(judge)
    world.found_its_run()
    with pytest.raises(RewardError):
        await world.rewards.score(a_score_item())
    assert "connection refused" in (await world.get("/readyz")).json()["reasons"][0]
    refusing = False
    await world.rewards.score(a_score_item())
    assert (await world.get("/readyz")).status_code == 200


async def test_a_source_that_says_it_is_out_is_a_reason_before_any_sample_needs_it(world: World) -> None:
    world.source.outage = "down for 12 s"
    assert (await world.get("/readyz")).json()["reasons"] == ["rewards: reward 'made_up': down for 12 s"]


async def test_a_score_that_does_not_come_is_a_reason(world: World) -> None:
    world.source.held = asyncio.Event()
    task = asyncio.create_task(world.rewards.score(a_score_item()))
    await asyncio.sleep(0)
    world.now += 61.0
    world.work.engine_stats = stats(in_flight=0)
    assert (await world.get("/readyz")).json()["reasons"] == ["rewards: a sample has waited 61 s for its score"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert world.rewards.num_pending == 0


async def test_a_worker_whose_samples_wait_for_a_slow_judge_is_alive_as_long_as_scores_come(world: World) -> None:
    world.work.engine_stats = stats(in_flight=0)
    async with waiting_for_a_score(world):
        for _ in range(5):
            world.now += 300.0
            await world.rewards.score(a_score_item())
            assert (await world.get("/livez")).status_code == 200
        world.now += 400.0
        assert "no progress for 400 s" in (await world.get("/livez")).json()["reasons"][0]


async def test_a_worker_is_not_ended_while_a_source_may_still_rest_as_long_as_its_settings_say() -> None:
    world = World(patience_s=630.0)
    world.found_its_run()
    world.work.engine_stats = stats(in_flight=0)
    async with waiting_for_a_score(world):
        world.now += 1000.0
        assert (await world.get("/livez")).status_code == 200
        assert (await world.get("/readyz")).status_code == 503
        world.now += 1000.0
        assert (await world.get("/livez")).status_code == 503


@contextlib.asynccontextmanager
async def waiting_for_a_score(world: World) -> AsyncIterator[None]:
    """Inside, one sample does, and those after it do not."""
    world.source.held = asyncio.Event()
    task = asyncio.create_task(world.rewards.score(a_score_item()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert world.source.items
    world.source.held = None
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_metrics_are_those_of_the_moment(world: World) -> None:
    text = (await world.get("/metrics")).text
    assert "streamrl_worker_groups_delivered_total 7.0" in text
    assert "streamrl_worker_kv_cache_used 0.5" in text
    assert "streamrl_worker_ready 1.0" in text
    assert int(text.partition("\nstreamrl_worker_tasks ")[2].split(".")[0]) == len(asyncio.all_tasks())
    world.work.counts.groups_delivered = 8
    assert "streamrl_worker_groups_delivered_total 8.0" in (await world.get("/metrics")).text


async def test_the_page_names_the_metrics_that_a_worker_serves(world: World) -> None:
    assert for_prometheus((await world.get("/metrics")).text) == told_for_prometheus("worker")


async def test_several_workers_of_a_machine_listen_side_by_side_and_a_taken_port_is_said(world: World) -> None:
    async with serving(world.health, ("127.0.0.1", 0)) as one, serving(world.health, ("127.0.0.1", 0)) as other:
        assert one != other
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://{one}/livez")).status_code == 200
            assert (await client.get(f"http://{other}/readyz")).json()["part"] == "worker/0"
        with pytest.raises(ResourceError, match=r"--http: cannot take port .* or 0 for any free one"):
            async with serving(world.health, parse_address(one, what="--http")):
                pass


async def test_who_cannot_listen_says_so_and_does_not_wait_for_ever() -> None:
    """Two may be bound to one port as long as neither listens."""
    one = bind("127.0.0.1", 0, what="the test")
    other = bind(*one.getsockname(), what="the test")
    async with asyncio.timeout(30), web.serving(Starlette(), one):
        with pytest.raises(ResourceError, match=r"cannot listen at 127\.0\.0\.1:\d+: Address already in use"):
            async with web.serving(Starlette(), other):
                pass


@pytest.mark.parametrize("text", ["9400", "host:", ":9400", "host:port", "host:70000"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be HOST:PORT"):
        parse_address(text, what="--http")


def test_a_host_with_colons_stands_in_brackets() -> None:
    assert parse_address("[::1]:9400", what="--http") == ("::1", 9400)
