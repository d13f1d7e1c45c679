"""Environments as services: who plays, who waits and who fails while replicas come and go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError, RewardOutage, SampleError
from streamrl.permissions import Permissions
from streamrl.workers.environments.base import MAX_GIVEN_CHARS, Answer, EnvironmentDouble, Episode
from streamrl.workers.environments.remote import ATTEMPTS, CLOSE_S, RemoteEnvironment, build_remote
from streamrl.workers.environments.server import EnvironmentApp
from tests.helpers import wait_until_async
from tests.http_reward_world import until

ONE, TWO = "http://one:1", "http://two:2"
Reply = httpx.Response | Exception


def echo(row: Mapping[str, Any], said: list[str]) -> Answer:
    return Answer(observation=f"{row['name']}: {said[-1]}", reward=len(said) / 2, done=said[-1] == "bye")


class Services:
    """Hosts with a server each, and what their networks do: `meddle` may answer, or lose an answer, in its stead."""

    def __init__(self, *hosts: str, token: str | None = None) -> None:
        self.token = token
        self.environments = {host: EnvironmentDouble(echo, opening="hi") for host in hosts}
        self.asked: list[tuple[str, str]] = []
        self.down: set[str] = set()
        self.meddle: Callable[[str, str, httpx.Response], Reply] = lambda host, path, answer: answer
        for host in hosts:
            self.begin_anew(host)

    def begin_anew(self, host: str) -> None:
        self.apps = {**getattr(self, "apps", {}), host: EnvironmentApp(self.environments[host], token=self.token)}

    def num_open(self) -> list[int]:
        return [environment.num_open for environment in self.environments.values()]

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        host, path = request.url.host, request.url.path
        self.asked.append((host, path))
        if host in self.down:
            raise httpx.ConnectError("refused")
        transport = httpx.ASGITransport(self.apps[host].asgi())
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            headers = {name: value for name, value in request.headers.items() if name == "authorization"}
            answer = await client.post(path, content=request.content, headers=headers)
        meddled = self.meddle(host, path, httpx.Response(answer.status_code, content=answer.content))
        if isinstance(meddled, Exception):
            raise meddled
        return meddled


class HangsAtTheEnd(Services):
    """Does not answer when a rollout is closed."""

    num_cancelled = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/close":
            return await super().__call__(request)
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


@asynccontextmanager
async def played_by(services: Services, *urls: str, **settings: Any) -> AsyncIterator[RemoteEnvironment]:
    chosen = schema.Environment(urls=urls, **{"timeout_s": 5.0, "outage_s": 60.0, **settings})
    remote = build_remote(
        chosen, Permissions(hosts=("one", "two")), transport=httpx.MockTransport(services), first_pause_s=0.001
    )
    try:
        yield remote
    finally:
        await remote.close()


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
