"""The reward client and services that are out, or cannot score some samples: who waits, who fails, and what is told."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from streamrl.errors import RewardError, RewardOutage
from streamrl.workers.rewards import http_request
from streamrl.workers.rewards.http_client import HttpReward
from streamrl.workers.rewards.http_request import TryAgain, post
from tests.http_reward_world import connect, lengths, until
from tests.tiny_rewards import make_item


def replicated(answer: Callable[[httpx.Request], Any], **settings: Any) -> HttpReward:
    return connect(answer, replicas=("http://reward:2", "http://reward:3/rm/score"), attempts=3, **settings)


async def test_a_replica_that_fails_is_left_out_and_no_sample_notices() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(500) if request.url.port == 1 else lengths(request)

    reward = replicated(answer, first_pause_s=60.0)
    for length in range(60):
        assert await reward.score(make_item("x" * length, prompt="")) == length
    assert reward.health().state == "2 of 3 replicas well; http://reward:1/score: answered 500: "
    assert reward.health().outage is None
    await reward.close()
    assert set(asked) == {"http://reward:1/score", "http://reward:2/score", "http://reward:3/rm/score"}
    assert asked.count("http://reward:1/score") == 3


async def test_an_outage_of_all_replicas_costs_no_attempt_and_shows() -> None:
    down, num_refused = True, 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_refused
        if down:
            num_refused += 1
            raise httpx.ConnectError("refused")
        return lengths(request)

    reward = replicated(answer)
    scores = [asyncio.create_task(reward.score(make_item("x" * length, prompt=""))) for length in range(300)]
    # An outage shows between trials, not while the next one is due: what was seen once may be gone on the next look.
    outage = await until(lambda: reward.health().outage, "the outage shows")
    assert "http://reward:2/score: ConnectError: refused" in outage
    num_requests, attempts = 5, 3
    await until(lambda: num_refused > 2 * num_requests * attempts, "more was refused than the samples have attempts")
    assert not any(score.done() for score in scores)
    down = False
    assert await asyncio.wait_for(asyncio.gather(*scores), 10) == list(range(300))
    assert reward.health().outage is None
    await reward.close()


GATEWAYS = [502, 503, 504, 520, 524, 527, 529, 530]  # which find nobody behind them, or who is overloaded
PAGES = {
    "short": ({}, b"who are you", "who are you"),
    "of 6 KB": ({}, b"who are you" + b"!" * 6000, f"who are you{'!' * 189}"),
    "compressed": ({"content-encoding": "gzip"}, gzip.compress(b"who are you"), "a compressed body"),
}


@pytest.mark.parametrize(
    ("status", "page"),
    [(status, "short") for status in (302, 401, 403, 404, 405, *GATEWAYS)]
    + [(status, page) for status in (401, 503) for page in PAGES if page != "short"],
)
async def test_a_wrong_address_or_token_is_an_outage_that_names_itself_and_costs_no_attempt(
    status: int, page: str
) -> None:
    wrong, num_asked = True, 0
    headers, body, shown = PAGES[page]

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        num_asked += 1
        return httpx.Response(status, headers=headers, content=body) if wrong else lengths(request)

    reward = connect(answer, attempts=1)
    scores = [asyncio.create_task(reward.score(make_item("x" * length, prompt=""))) for length in range(100)]
    outage = await until(lambda: reward.health().outage, "the outage shows")
    assert outage == f"http://reward:1/score: answered {status}: {shown}"
    assert reward.health().state == f"0 of 1 replicas well; {outage}"
    await until(lambda: num_asked > 10, "it was asked more often than the samples have attempts")
    assert not any(score.done() for score in scores)
    wrong = False
    assert await asyncio.wait_for(asyncio.gather(*scores), 10) == list(range(100))
    await reward.close()


@pytest.mark.parametrize("rest", [b"", None], ids=["cut short", "hanging"])
async def test_an_errors_page_that_does_not_arrive_whole_leaves_the_status_as_it_is(
    rest: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_request, "_PAGE_S", 0.1)

    answered = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 429 Busy\r\nretry-after: 30\r\ncontent-length: 100\r\n\r\nnot now")
        if rest is None:
            await reader.read()  # until the client has given up
        writer.close()
        await writer.wait_closed()
        answered.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with httpx.AsyncClient(trust_env=False, timeout=20.0) as client:
        with pytest.raises(TryAgain, match="answered 429: not now") as found:
            await post(client, url, {}, timeout_s=20.0, max_bytes=100)
    assert found.value.rest_s == 30.0
    await answered.wait()
    server.close()
    await server.wait_closed()


def picky(bad: httpx.Response) -> Callable[[httpx.Request], httpx.Response]:
    """A healthy service that has no score for requests with the row `bad`."""
    return lambda request: bad if "bad" in json.loads(request.content)["texts"] else lengths(request)


NO_SCORES = [
    httpx.Response(500, text="no finite number"),
    httpx.Response(504, text="too slow"),
    httpx.Response(200, text='{"rewards": [1e30]}'),
    httpx.Response(403, text="go away"),
]


@pytest.mark.parametrize("no_score", NO_SCORES)
async def test_a_sample_that_a_healthy_service_cannot_score_fails_alone_and_soon(no_score: httpx.Response) -> None:
    reward = connect(picky(no_score), attempts=5, outage_s=3600.0)
    assert await reward.score(make_item("four", prompt="")) == 4.0
    asked = [reward.score(make_item(text, prompt="")) for text in ("one", "bad", "three")]
    one, bad, three = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
    assert (one, three) == (3.0, 5.0)
    assert isinstance(bad, RewardError)
    assert "(5 attempts)" in str(bad)
    await reward.close()


@pytest.mark.parametrize("no_score", NO_SCORES)
async def test_its_neighbours_are_scored_though_nothing_was_ever_scored_before(no_score: httpx.Response) -> None:
    reward = connect(picky(no_score), attempts=5, outage_s=3600.0)
    asked = [reward.score(make_item(text, prompt="")) for text in ("one", "bad", "three")]
    one, bad, three = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
    assert (one, three) == (3.0, 5.0)
    assert isinstance(bad, RewardError)
    await reward.close()


async def test_a_service_that_answers_and_never_scored_anything_holds_no_sample_for_an_outage() -> None:
    reward = connect(lambda request: httpx.Response(500, text="a bug"), attempts=5, outage_s=3600.0)
    with pytest.raises(RewardError, match=r"answered 500: a bug \(5 attempts\)"):
        await asyncio.wait_for(reward.score(make_item()), 10)
    await reward.close()


async def test_an_outage_of_errors_costs_no_attempt_where_it_scored_before() -> None:
    down, num_asked = False, 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        num_asked += 1
        return httpx.Response(500) if down else lengths(request)

    reward = connect(answer, attempts=5)
    assert await reward.score(make_item("four", prompt="")) == 4.0
    down, num_asked = True, 0
    score = asyncio.create_task(reward.score(make_item("three", prompt="")))
    await until(lambda: num_asked > 8, "it was asked more often than the sample has attempts")
    assert not score.done()
    down = False
    assert await asyncio.wait_for(score, 10) == 5.0
    await reward.close()


async def test_a_row_that_is_scored_no_longer_does_not_keep_a_replica_out() -> None:
    down, refused = False, "old"

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(500) if down or refused in json.loads(request.content)["texts"] else lengths(request)

    reward, refused = connect(answer, attempts=5), ""
    assert await reward.score(make_item("old", prompt="")) == 3.0
    down, refused = True, "old"
    score = asyncio.create_task(reward.score(make_item("three", prompt="")))
    await until(lambda: reward.health().outage, "the outage shows")
    down = False
    assert await asyncio.wait_for(score, 10) == 5.0
    await reward.close()


async def test_an_outage_that_does_not_end_is_told_as_one() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    reward = connect(answer, attempts=100, outage_s=0.05)
    with pytest.raises(RewardOutage, match=r"no replica answered for 0\.05 s: http://reward:1/score: ConnectError"):
        await reward.score(make_item())
    await reward.close()


async def test_an_address_that_only_the_client_knows_to_be_none_is_an_outage_that_names_itself() -> None:
    reward = connect(lengths, url="http://reward:1/" + "x" * 70_000, outage_s=0.05)
    with pytest.raises(RewardOutage, match=r"InvalidURL: URL too long"):
        await reward.score(make_item())
    await reward.close()


async def test_an_error_that_nobody_foresaw_is_named_to_its_sample_and_logged() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise ZeroDivisionError("by nothing")

    reward = connect(answer)
    with capture_logs() as logs, pytest.raises(RewardError, match=r"ZeroDivisionError: by nothing"):
        await reward.score(make_item())
    await reward.close()
    assert [(line["event"], line["exc_info"]) for line in logs] == [("reward_request_failed", True)]


async def test_who_shares_a_request_with_what_is_refused_does_not_sit_out_the_next_outage_after_it() -> None:
    requests: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(len(json.loads(request.content)["texts"]))
        if requests[-1] > 1:
            return httpx.Response(422)
        raise httpx.ConnectError("refused")

    reward = connect(answer, outage_s=0.05)
    asked = (reward.score(make_item("x" * length, prompt="")) for length in range(1, 65))
    outcomes = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 2.0)
    await reward.close()
    assert {type(outcome) for outcome in outcomes} == {RewardOutage}
    assert requests.count(64) == 1
