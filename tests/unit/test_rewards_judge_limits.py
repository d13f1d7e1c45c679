"""Limits of a judge behind a URL: of requests, of time, of tokens; and who is told to come back later."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import httpx
import pytest

from streamrl.errors import RewardError, RewardOutage, TransportError
from streamrl.permissions import Permissions
from streamrl.workers.rewards.judge import JudgeReward, build_judge_reward
from tests.http_reward_world import until
from tests.judging_world import Asked, Reply, fair, judge_of, judges_serving, source_of, worth
from tests.tiny_rewards import make_item

LIMIT_S = 60.0


async def test_who_is_told_to_come_back_later_does_and_it_costs_no_attempt() -> None:
    later = {"retry-after": "1"}
    replies = [
        Reply(status=429, headers=later, body=b"slow down"),
        Reply(status=429, headers=later, body=b"slow down" * 20_000),
        Reply(status=429, headers={**later, "content-encoding": "gzip"}, body=gzip.compress(b"slow down")),
    ]

    def limited(asked: Asked) -> Reply:
        return replies[asked.number] if asked.number < 3 else fair(asked)

    async with judges_serving(limited) as server:
        reward = judge_of(server.url, attempts=1)
        assert await asyncio.wait_for(reward.score(make_item("42")), LIMIT_S) == worth("42")
        await reward.close()
    times = [asked.at for asked in server.asked]
    assert len(times) == 4
    assert all(later - earlier >= 0.99 for earlier, later in pairwise(times))


async def test_who_waits_for_a_turn_when_another_is_told_to_come_back_later_waits_as_long() -> None:
    times: list[float] = []

    def limited(request: httpx.Request) -> httpx.Response:
        times.append(time.monotonic())
        if len(times) == 1:
            return httpx.Response(429, headers={"retry-after": "1"})
        return httpx.Response(200, json={"choices": [{"message": {"content": '{"score": 10}'}}]})

    reward = build_judge_reward(
        "mine",
        source_of("http://judge:1", max_requests_per_s=20.0, attempts=1),
        Permissions(hosts=("judge",)),
        transport=httpx.MockTransport(limited),  # answers within the turn that asks it, on a busy machine, too
    )
    assert isinstance(reward, JudgeReward)
    scores = await asyncio.wait_for(asyncio.gather(*(reward.score(make_item(str(i))) for i in range(8))), LIMIT_S)
    await reward.close()
    assert scores == [1.0] * 8
    assert times[1] - times[0] >= 0.99
    assert times[-1] - times[0] >= 0.99 + 6 / 20, "nor do they come all at once then"


@pytest.mark.parametrize(
    "when", ["Mon, 99999999999 Jan 2020 00:00:00 GMT", "soon", "-1", "Wed, 21 Oct 2015 07:28:00 GMT"]
)
async def test_who_says_nonsense_of_when_to_come_back_is_asked_again_all_the_same(when: str) -> None:
    def limited(asked: Asked) -> Reply:
        return Reply(status=429, headers={"retry-after": when}) if asked.number < 2 else fair(asked)

    async with judges_serving(limited) as server:
        reward = judge_of(server.url)
        assert await asyncio.wait_for(reward.score(make_item("42")), LIMIT_S) == worth("42")
        await reward.close()


async def test_a_limit_that_lasts_gives_the_ticket_back_and_shows() -> None:
    async with judges_serving(
        lambda asked: Reply(status=429, headers={"retry-after": "3000"}, body=b"quota")
    ) as server:
        reward = judge_of(server.url, outage_s=0.3)
        score = asyncio.ensure_future(reward.score(make_item()))
        with pytest.raises(RewardOutage, match=r"no replica answered for 0\.3 s: .*answered 429: quota"):
            await asyncio.wait_for(score, LIMIT_S)
        assert "rate-limited for 3" in reward.health().state
        await reward.close()
    assert len(server.asked) == 1


async def test_a_judge_that_is_gone_is_an_outage_and_the_score_comes_when_it_is_back() -> None:
    async with judges_serving() as server:
        url = server.url
    reward = judge_of(url)
    score = asyncio.ensure_future(reward.score(make_item()))
    outage = await until(lambda: reward.health().outage, "the outage shows")
    assert "judge 'judge0'" in outage
    assert not score.done()
    await reward.close()
    with pytest.raises(RewardError):
        await score


async def test_no_more_requests_a_second_than_are_allowed() -> None:
    async with judges_serving() as server:
        reward = judge_of(server.url, max_requests_per_s=50.0)
        began = time.monotonic()  # before the first, which may come late on a busy machine
        await asyncio.gather(*(reward.score(make_item(str(i))) for i in range(25)))
        await reward.close()
    assert max(asked.at for asked in server.asked) - began >= 24 / 50 - 0.01


async def test_a_budget_that_is_spent_is_an_outage_that_names_itself() -> None:
    async with judges_serving() as server:
        reward = judge_of(server.url, token_budget=250, max_concurrency=1)
        for number in range(3):
            await reward.score(make_item(str(number)))
        outage = reward.health().outage
        assert outage == (
            "rewards.mine.token_budget = 250: its judges have used 300 tokens; raise it, "
            "or leave it out, and resume the run"
        )
        assert reward.health().num_tokens == 300
        with pytest.raises(RewardOutage, match="token_budget"):
            await reward.score(make_item("another"))
        assert await reward.score(make_item("1")) == worth("1"), "what is known costs nothing"
        await reward.close()
    assert len(server.asked) == 3


async def test_a_budget_is_that_of_all_workers_of_the_run() -> None:
    spent: Counter[str] = Counter()

    async def spend(what: str, num: int) -> int:
        spent[what] += num
        return spent[what]

    async with judges_serving() as server:
        one, other, late = (judge_of(server.url, spend=spend, token_budget=250) for _ in range(3))
        for number, reward in enumerate((one, other, one)):
            await reward.start()
            await reward.score(make_item(str(number)))
        await late.start()
        assert "300 tokens" in (one.health().outage or "")
        assert "300 tokens" in (late.health().outage or ""), "it hears of the others before it asks"
        assert [reward.health().num_tokens for reward in (one, other, late)] == [200, 100, 0]
        assert spent == {"rewards/mine/tokens": 300}
        for reward in (one, other, late):
            await reward.close()


async def test_what_could_not_be_counted_costs_no_verdict_and_is_counted_later() -> None:
    told: list[int] = []

    async def spend(what: str, num: int) -> int:
        told.append(num)
        if len(told) == 2:
            raise TransportError("Redis is away")
        return sum(told)

    async with judges_serving() as server:
        reward = judge_of(server.url, spend=spend, token_budget=1000)
        await reward.start()
        assert await reward.score(make_item("1")) == worth("1")
        await reward.score(make_item("2"))
        await reward.close()
    assert told == [0, 100, 200]


@pytest.mark.parametrize("usage", [None, {}, {"total_tokens": -3}, {"total_tokens": "many"}, {"total_tokens": 10**30}])
async def test_a_service_that_tells_no_usage_that_can_be_is_counted_by_bytes(usage: Any) -> None:
    def silent(asked: Asked) -> Reply:
        said = {"choices": [{"message": {"content": '{"score": 3}'}}], "usage": usage}
        return Reply(body=json.dumps(said).encode())

    async with judges_serving(silent) as server:
        reward = judge_of(server.url, token_budget=1 << 30)
        await reward.score(make_item())
        assert reward.health().outage is None
        counted = reward.health().num_tokens
        await reward.close()
    assert counted == -(-len((server.asked[0].text + '{"score": 3}').encode()) // 4)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, "the source's max_tokens"),
        ({"max_tokens": 7}, "this judge's options.max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 7}, "this judge's options.max_completion_tokens"),
        ({"max_tokens": None}, "the limit of its service"),
    ],
)
async def test_an_answer_that_was_cut_off_names_the_limit_that_is_in_force(options: dict[str, Any], limit: str) -> None:
    async with judges_serving(lambda asked: Reply(content='{"sc', ended="length")) as server:
        judges = {"one": {"url": server.url, "model": "wise", "options": options}}
        reward = judge_of(judges=judges, attempts=1)
        with pytest.raises(RewardError, match=f"cut off before a verdict: raise {limit} "):
            await reward.score(make_item())
        await reward.close()


async def test_an_answer_may_be_as_long_as_the_limit_that_is_in_force_allows() -> None:
    long = json.dumps({"reasons": "x" * 200_000, "score": 10})
    async with judges_serving(lambda asked: Reply(content=long)) as server:
        options = {"max_tokens": None, "max_completion_tokens": 10_000}
        judges = {"one": {"url": server.url, "model": "wise", "options": options}}
        reward = judge_of(judges=judges, attempts=1, explain=True)
        assert await reward.score(make_item()) == 1.0
        await reward.close()
