"""The worker's loop while rewards are out: nobody fails for it, and little is generated in vain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import httpx

from streamrl.config import schema
from streamrl.errors import RewardOutage
from streamrl.permissions import Permissions
from streamrl.protocol.transport.types import Leased
from streamrl.protocol.wire.ticket import Ticket
from streamrl.workers.engines.base import Engine, EngineStats, SampleRequest
from streamrl.workers.engines.double import EngineDouble
from streamrl.workers.rewards.base import RewardDouble, ScoreItem
from streamrl.workers.rewards.http_client import build_http_reward
from streamrl.workers.rewards.teaching import TeacherDouble
from streamrl.workers.sessions.trace import Played
from tests.worker_world import WorkerWorld


class Looks(EngineDouble):
    """Counts how often the worker looks whether there is room for a ticket."""

    def __init__(self) -> None:
        super().__init__()
        self.num_looks = 0

    def stats(self) -> EngineStats:
        self.num_looks += 1
        return super().stats()


def put_back(world: WorkerWorld) -> None:
    """What is handed back is leased again, the oldest first, as it is on Redis."""

    async def hand_back(leased: Sequence[Leased]) -> None:
        world.tickets.handed_back += [one.ticket.number for one in leased]
        world.tickets.waiting[:0] = [one.ticket for one in leased]

    world.tickets.hand_back = hand_back  # type: ignore[method-assign]


async def test_no_ticket_is_taken_and_the_wait_shows() -> None:
    world = WorkerWorld()
    world.reward.outage = "http://reward:1/score: refused"
    world.put(1)
    world.start()
    await world.until(lambda: world.progress.report().doing == "rewards", "the worker waits for rewards")
    assert world.tickets.waiting

    world.reward.outage = None
    await world.delivered(1)
    await world.until(lambda: "rewards/made_up/state" in world.progress.report().detail, "the sources show")
    await world.finish()


class Nobody:
    """Plays nothing, and says so."""

    out: str | None = "http://games:1: refused"

    def outage(self) -> str | None:
        return self.out

    async def play(self, ticket: Ticket, engine: Engine, request: SampleRequest) -> Played:
        raise RewardOutage("its only replica is gone")


async def test_while_the_environment_is_out_no_ticket_is_taken_and_a_rollout_that_it_lost_is_no_failure() -> None:
    nobody = Nobody()
    world = WorkerWorld(player=nobody)
    put_back(world)
    world.put(1)
    world.start()
    await world.until(lambda: world.progress.report().doing == "rewards", "the worker waits")
    told = await world.until(
        lambda: world.progress.report().detail.get("rewards/environment/state"), "who is out shows"
    )
    assert told == nobody.out
    assert world.tickets.waiting

    nobody.out = None
    await world.until(lambda: len(world.tickets.handed_back) >= 2, "the ticket is taken, and goes back, twice")
    assert set(world.tickets.handed_back) == {1}
    assert not world.tickets.delivered
    await world.finish()


async def test_a_ticket_whose_samples_nobody_scores_is_handed_back_and_is_no_failure() -> None:
    out = True

    def judge(item: ScoreItem) -> float:
        if out:
            raise RewardOutage("no replica answered for 600 s")
        return 1.0

    world = WorkerWorld(judge=judge)
    put_back(world)
    world.put(1)
    world.start()
    await world.until(lambda: world.tickets.handed_back, "the ticket is handed back")
    assert not world.tickets.delivered
    out = False
    (group,) = await world.delivered(1)
    await world.finish()
    assert (group.header.failed, group.header.num_failed_samples) == (False, 0)
    assert (world.rollout.counts.groups_failed, world.rollout.counts.samples_failed) == (0, 0)


async def test_what_is_handed_back_is_not_tried_again_before_somebody_can_be_asked() -> None:
    def judge(item: ScoreItem) -> float:
        world.reward.outage = "down"
        raise RewardOutage("no replica answered for 600 s")

    world = WorkerWorld(judge=judge)
    put_back(world)
    world.put(1)
    world.start()
    await world.until(lambda: world.progress.report().doing == "rewards", "the worker waits for rewards")
    await world.finish()
    assert world.tickets.handed_back == [1]


async def test_after_an_outage_one_ticket_is_tried_until_a_score_has_come() -> None:
    gate, engine = RewardDouble(), Looks()
    gate.outage, gate.held = "down", asyncio.Event()
    world = WorkerWorld(engine=engine, source=gate)
    for number in range(10):
        world.put(number)
    world.start()
    await world.until(lambda: world.progress.report().doing == "rewards", "the worker waits for rewards")

    gate.outage = None
    await world.until(lambda: engine.requests, "a ticket is tried")
    num_looks = engine.num_looks
    await world.until(lambda: engine.num_looks > num_looks + 10, "it has looked for room again and again")
    assert len(world.tickets.waiting) == 9

    gate.held.set()
    await world.delivered(10)
    await world.finish()


async def test_an_outage_that_lasts_fails_no_ticket_and_is_tried_with_one_at_a_time() -> None:
    down, num_asked = True, 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        num_asked += 1
        if down:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"rewards": [1.0] * len(json.loads(request.content)["texts"])})

    settings = schema.HttpReward(type="http", url="http://reward:1", outage_s=0.1)
    source = build_http_reward(
        "made_up",
        settings,
        Permissions(hosts=("reward",)),
        None,
        transport=httpx.MockTransport(answer),
        first_pause_s=0.0005,
    )
    world = WorkerWorld(source=source)
    put_back(world)
    for number in range(20):
        world.put(number)
    world.start()
    await world.until(lambda: world.tickets.handed_back and len(world.tickets.waiting) == 20, "all were handed back")
    first = len(world.tickets.handed_back)
    num_requests = len(world.engine.requests)
    await world.until(lambda: len(world.tickets.handed_back) >= first + 3, "others are tried")
    num_generated = len(world.engine.requests) - num_requests
    assert num_generated <= 4 * 2  # a ticket has two samples, and one may have been under way
    assert not world.tickets.delivered

    down = False
    groups = await world.delivered(20)
    await world.finish()
    await source.close()
    assert not any(group.header.failed for group in groups)


async def test_a_ticket_that_is_handed_back_is_not_renewed_any_more() -> None:
    handing_back, may_go_on = asyncio.Event(), asyncio.Event()

    def judge(item: ScoreItem) -> float:
        raise RewardOutage("out")

    world = WorkerWorld(judge=judge, lease_s=0.02)

    async def hand_back(leased: Sequence[Leased]) -> None:
        handing_back.set()
        await may_go_on.wait()

    renewed: list[int] = []

    async def renew(leased: Sequence[Leased]) -> list[Leased]:
        renewed.append(len(leased))
        return []

    world.tickets.hand_back = hand_back  # type: ignore[method-assign]
    world.tickets.renew = renew  # type: ignore[method-assign]
    world.put(1)
    world.start()
    await asyncio.wait_for(handing_back.wait(), 10)
    renewed.clear()
    await world.until(lambda: len(renewed) > 3, "leases are renewed")
    num_renewed = sum(renewed)
    may_go_on.set()
    await world.finish()
    assert num_renewed == 0


async def test_each_sample_brings_what_the_teacher_gave_its_tokens_and_a_held_out_one_asks_nobody() -> None:
    teacher = TeacherDouble(-0.5)
    world = WorkerWorld(teacher=teacher)
    world.put(1)
    world.put(2, purpose="eval")
    world.start()
    groups = await world.delivered(2)
    await world.finish()

    trained, held_out = sorted(groups, key=lambda group: group.header.ticket)
    asked = [(list(trained.prompt_ids), sample.token_ids.tolist()) for sample in trained.samples]
    assert sorted(teacher.requests) == sorted(asked)
    for sample in trained.samples:
        assert sample.teacher_logprobs is not None
        assert sample.teacher_logprobs.tolist() == [-0.5] * len(sample.token_ids)
    assert [sample.teacher_logprobs for sample in held_out.samples] == [None, None]


async def test_while_the_teacher_is_out_no_ticket_is_taken_and_the_wait_shows() -> None:
    teacher = TeacherDouble()
    teacher.out = "teacher: http://teacher:1: refused"
    world = WorkerWorld(teacher=teacher)
    world.put(1)
    world.start()
    await world.until(lambda: world.progress.report().doing == "rewards", "the worker waits")
    told = await world.until(lambda: world.progress.report().detail.get("rewards/teacher/state"), "who is out shows")
    assert told == teacher.out
    assert world.tickets.waiting

    teacher.out = ""
    await world.delivered(1)
    await world.finish()
