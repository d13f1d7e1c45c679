"""Environments as services: who plays, who waits and who fails while replicas come and go."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError, RewardOutage, SampleError
from streamrl.permissions import Permissions
from streamrl.workers.environments.base import MAX_GIVEN_CHARS, Answer, EnvironmentDouble, Episode
from streamrl.workers.environments.remote import ATTEMPTS, CLOSE_S, build_remote
from tests.helpers import wait_until_async
from tests.http_reward_world import until
from tests.remote_environment_world import ONE, TWO, HangsAtTheEnd, Reply, Services, played_by


async def test_a_rollout_stays_with_the_replica_that_began_it_and_is_closed_there() -> None:
    services = Services("one", "two")
    async with played_by(services, ONE, TWO) as remote:
        rollouts = [await remote.begin({"name": str(i)}) for i in range(8)]
        assert {one.opening for one in rollouts} == {"hi"}
        told = await asyncio.gather(*(one.step("x") for one in rollouts))
        assert told == [Answer(observation=f"{i}: x", reward=0.5) for i in range(8)]
        assert (await rollouts[0].step("bye")) == Answer(observation="0: bye", reward=1.0, done=True)
        assert all(services.num_open()), "both have some"
        for one in rollouts[1:]:
            await one.close()
        await until(lambda: sum(services.num_open()) == 1, "all but one are closed")
        await rollouts[0].close()
    assert services.num_open() == [0, 0], "the last one as the worker leaves"


@pytest.mark.parametrize("written", ["in UTF-8", "in escapes"])
async def test_the_longest_text_that_a_local_environment_may_give_arrives_whatever_its_characters(written: str) -> None:
    services, text = Services("one"), "\N{GRINNING FACE}" * MAX_GIVEN_CHARS
    services.environments["one"] = EnvironmentDouble(lambda _row, said: Answer(observation=text + said[-1]))
    services.begin_anew("one")
    if written == "in escapes":  # as many JSON writers do
        services.meddle = lambda _host, _path, answer: httpx.Response(200, content=json.dumps(answer.json()).encode())
    async with played_by(services, ONE) as remote:
        rollout = await remote.begin({"name": "a"})
        assert await rollout.step("") == Answer(observation=text)
        with pytest.raises(SampleError, match=rf"'observation' has {MAX_GIVEN_CHARS + 1} characters; at most"):
            await rollout.step("x")


async def test_a_service_that_hangs_does_not_hold_a_worker_that_leaves() -> None:
    services, loop = HangsAtTheEnd("one"), asyncio.get_running_loop()
    async with played_by(services, ONE) as remote:
        rollouts = [await remote.begin({"name": str(i)}) for i in range(3)]
        for one in rollouts:
            await one.close()
        began = loop.time()
    assert loop.time() - began < CLOSE_S
    assert services.num_cancelled == 3


async def test_a_step_whose_answer_is_lost_is_asked_for_again_and_played_once() -> None:
    services, lost = Services("one"), iter([httpx.ReadError("cut"), httpx.Response(200, content=b"[]")])

    def lose(host: str, path: str, answer: httpx.Response) -> Reply:
        return next(lost, answer) if path == "/step" else answer

    services.meddle = lose
    async with played_by(services, ONE) as remote:
        rollout = await remote.begin({"name": "a"})
        assert await rollout.step("x") == Answer(observation="a: x", reward=0.5)
        assert await rollout.step("y") == Answer(observation="a: y", reward=1.0), "the second turn, and not the fourth"
    assert services.asked.count(("one", "/step")) == 4


async def test_a_replica_that_is_asked_too_often_is_given_its_rest_and_the_rollout_goes_on() -> None:
    services, busy = Services("one"), iter([httpx.Response(429, headers={"retry-after": "0"})] * (2 * ATTEMPTS))
    services.meddle = lambda _host, path, answer: next(busy, answer) if path == "/step" else answer
    async with played_by(services, ONE) as remote:
        rollout = await remote.begin({"name": "a"})
        assert await rollout.step("x") == Answer(observation="a: x", reward=0.5)


async def test_a_replica_that_rests_for_longer_than_an_outage_may_last_loses_its_rollout() -> None:
    services = Services("one", "two")
    rests = httpx.Response(429, headers={"retry-after": "3000"}, content=b"later")
    services.meddle = lambda _host, path, answer: rests if path == "/step" else answer
    async with played_by(services, ONE, TWO, outage_s=0.2) as remote:
        rollout = await remote.begin({"name": "a"})
        with pytest.raises(SampleError, match=r"lost with its replica: .*answered 429: later"):
            await rollout.step("x")


async def test_what_the_environment_refuses_fails_this_sample_and_is_asked_once() -> None:
    services = Services("one")
    services.meddle = lambda host, path, answer: httpx.Response(422, json={"error": "KeyError: 'answer'"})
    async with played_by(services, ONE) as remote:
        with pytest.raises(SampleError, match=r"failed in reset: .*KeyError: 'answer'"):
            await remote.begin({"name": "a"})
    assert services.asked == [("one", "/reset")]


@pytest.mark.parametrize(
    "answer",
    [
        {"id": "a", "observation": 7},
        {"observation": ""},
        {"id": "a" * (1 << 21)},
        "no JSON",
        None,
    ],
)
async def test_nonsense_is_no_rollout(answer: object) -> None:
    services = Services("one")
    reply = httpx.Response(200, content=answer if isinstance(answer, str) else json.dumps(answer))
    services.meddle = lambda host, path, _: reply
    async with played_by(services, ONE, outage_s=2.0) as remote:
        with pytest.raises((SampleError, RewardOutage)):
            await remote.begin({"name": "a"})


@pytest.mark.parametrize("told", [{"reward": "1"}, {"reward": None}, {"reward": 1e400}, {"reward": 1, "done": 1}])
async def test_a_step_that_tells_nonsense_fails_its_sample(told: dict[str, Any]) -> None:
    services = Services("one")
    reply = httpx.Response(200, content=json.dumps({"observation": "x", "done": False, **told}))
    services.meddle = lambda host, path, answer: reply if path == "/step" else answer
    async with played_by(services, ONE) as remote:
        rollout = await remote.begin({"name": "a"})
        with pytest.raises(SampleError, match=r"failed in step: http://one:1: the answer has .* \(5 attempts\)"):
            await rollout.step("x")
    assert services.asked.count(("one", "/step")) == ATTEMPTS


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (httpx.Response(500, content=b"KeyError"), "answered 500: KeyError"),
        (httpx.Response(200, content=b"[]"), "the answer is not a JSON object"),
        (httpx.ReadTimeout("too late"), "ReadTimeout: too late"),
    ],
)
@pytest.mark.parametrize("urls", [(ONE,), (ONE, TWO)])
async def test_a_row_that_the_service_cannot_answer_fails_where_nothing_else_is_asked(
    urls: tuple[str, ...], reply: Reply, why: str
) -> None:
    """It isn't handed back: the next worker would get the same answer."""
    services = Services("one", "two")
    services.meddle = lambda host, path, answer: reply if path == "/step" else answer
    async with played_by(services, *urls) as remote:
        for _ in range(6):  # so many that in the end no replica is well
            rollout = await remote.begin({"name": "a"})
            with pytest.raises(SampleError, match=rf"failed in step: http://.*: {why}.* \(5 attempts\)"):
                await rollout.step("x")


async def test_a_service_that_answers_nobody_is_away_and_blames_no_row() -> None:
    """Also where only one rollout is left that asks."""
    services, hangs = Services("one"), [False]
    services.meddle = lambda host, path, answer: httpx.ReadTimeout("too late") if hangs[0] else answer
    async with played_by(services, ONE) as remote:
        rollouts = [await remote.begin({"name": str(i)}) for i in range(8)]
        hangs[0] = True
        outcomes = await asyncio.gather(*(one.step("x") for one in rollouts), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [RewardOutage] * 8
        num_before, waiting = len(services.asked), asyncio.create_task(remote.begin({"name": "last"}))

        async def is_asked_often() -> bool:
            return len(services.asked) - num_before > 2 * ATTEMPTS or waiting.done()

        await wait_until_async(is_asked_often, description="more questions than the rollout has attempts")
        assert not waiting.done()
        hangs[0] = False
        assert (await (await waiting).step("x")).observation == "last: x"


class Gateway(Services):
    """Refuses the completion "bad", after a step of another rollout if there is one."""

    other: Episode | None = None
    refusal: Reply = httpx.Response(503)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if b'"bad"' not in request.content:
            return await super().__call__(request)
        if self.other is not None:
            await self.other.step("well")
        if isinstance(self.refusal, Exception):
            raise self.refusal
        return self.refusal


@pytest.mark.parametrize(("others_play", "raised"), [(False, RewardOutage), (True, SampleError)])
async def test_a_gateway_before_the_only_replica_blames_a_row_only_if_others_get_answers(
    others_play: bool, raised: type[Exception]
) -> None:
    services = Gateway("one")
    async with played_by(services, ONE) as remote:
        rollout = await remote.begin({"name": "a"})
        services.other = await remote.begin({"name": "b"}) if others_play else None
        with pytest.raises(raised, match="http://one:1: answered 503"):
            await rollout.step("bad")


async def test_rows_that_are_late_together_are_blamed_if_others_get_answers() -> None:
    services = Gateway("one")
    services.refusal = httpx.ReadTimeout("too late")
    async with played_by(services, ONE) as remote:
        rollouts = [await remote.begin({"name": str(i)}) for i in range(4)]
        services.other = await remote.begin({"name": "b"})
        outcomes = await asyncio.gather(*(one.step("bad") for one in rollouts), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [SampleError] * 4


async def test_a_worker_asks_those_hosts_alone_that_it_may() -> None:
    with pytest.raises(ConfigError, match=r"environment.urls: .*--allow-host elsewhere"):
        build_remote(schema.Environment(urls=("http://elsewhere:1",)), Permissions(hosts=("one",)))


async def test_a_server_with_a_token_answers_nobody_else(tmp_path: Any) -> None:
    (tmp_path / "token").write_text("secret-token")
    services = Services("one", token="secret-token")
    async with played_by(services, ONE, token_file=str(tmp_path / "token")) as remote:
        assert (await remote.begin({"name": "a"})).opening == "hi"
    async with played_by(services, ONE, outage_s=0.2) as remote:
        with pytest.raises(RewardOutage, match="answered 401"):
            await remote.begin({"name": "a"})
