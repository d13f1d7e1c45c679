"""The reward client against servers of every kind of badness, without a socket."""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamrl.config import schema
from streamrl.errors import ConfigError, RewardError, RewardOutage
from tests.helpers import wait_until
from tests.tiny_rewards import make_item
from workers.permissions import Permissions
from workers.rewards.http_client import HttpReward, build_http_reward


def connect(answer: Callable[[httpx.Request], Any], *, first_pause_s: float = 0.001, **settings: Any) -> HttpReward:
    source = schema.HttpReward(type="http", url="http://reward:1", **{"attempts": 1, "timeout_s": 5.0, **settings})
    transport = httpx.MockTransport(answer)
    return build_http_reward(
        "mine", source, Permissions(hosts=("reward",)), None, transport=transport, first_pause_s=first_pause_s
    )


def lengths(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"rewards": [len(text) for text in json.loads(request.content)["texts"]]})


async def test_samples_of_the_same_moment_share_requests_of_bounded_size() -> None:
    requests: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(len(json.loads(request.content)["texts"]))
        return lengths(request)

    reward = connect(answer)
    scores = await asyncio.gather(*(reward.score(make_item("x" * i, prompt="")) for i in range(150)))
    await reward.close()
    assert scores == [float(i) for i in range(150)]
    assert requests == [64, 64, 22]


async def test_no_more_requests_run_at_once_than_allowed() -> None:
    running = most = 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return lengths(request)

    reward = connect(answer, max_concurrency=3)
    await asyncio.gather(*(reward.score(make_item()) for _ in range(64 * 10)))
    await reward.close()
    assert most == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (httpx.Response(500, text="on\x1b[31m fire"), r"answered 500: on \[31m fire"),
        (httpx.Response(200, text="no json"), "answered no JSON"),
        (httpx.Response(200, text="[" * 4000), "answered no JSON"),
        (httpx.Response(200, json={"rewards": []}), "answered no list of 1 rewards"),
        (httpx.Response(200, json={"rewards": [1.0, 2.0]}), "answered no list of 1 rewards"),
        (httpx.Response(200, json={"scores": [1.0]}), "answered no list of 1 rewards"),
        (httpx.Response(200, json=[1.0]), "answered no list of 1 rewards"),
        (httpx.Response(200, text='{"rewards": [NaN]}'), "no finite numbers"),
        (httpx.Response(200, text='{"rewards": [1e999]}'), "no finite numbers"),
        (httpx.Response(200, json={"rewards": [None]}), "no finite numbers"),
        (httpx.Response(200, json={"rewards": [True]}), "no finite numbers"),
        (httpx.Response(200, json={"rewards": ["1.0"]}), "no finite numbers"),
        (httpx.Response(200, headers={"content-encoding": "gzip"}, content=gzip.compress(b"x")), "compressed"),
    ],
)
async def test_whatever_is_no_proper_answer_is_an_error_and_never_a_number(answer: httpx.Response, reason: str) -> None:
    reward = connect(lambda request: answer)
    with pytest.raises(RewardError, match=reason):
        await reward.score(make_item())
    await reward.close()


async def test_an_answer_without_end_is_cut_off() -> None:
    num_read = 0

    async def flood() -> AsyncIterator[bytes]:
        nonlocal num_read
        while True:
            num_read += 1
            yield b"x" * 1024

    reward = connect(lambda request: httpx.Response(200, content=flood()))
    with pytest.raises(RewardError, match="answered more than 4160 bytes"):
        await reward.score(make_item())
    await reward.close()
    assert num_read < 10


async def test_an_answer_that_drips_is_late_however_often_it_drips() -> None:
    async def drip() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.01)
            yield b" "

    reward = connect(lambda request: httpx.Response(200, content=drip()), timeout_s=0.2)
    with pytest.raises(RewardError, match=r"no answer within 0\.2 s"):
        await reward.score(make_item())
    await reward.close()


async def test_an_outage_is_tried_again_and_the_sample_gets_its_score() -> None:
    failures = iter(
        [httpx.ConnectError("refused"), httpx.Response(503), httpx.Response(200, text='{"rewards": [NaN]}'), None]
    )

    def answer(request: httpx.Request) -> httpx.Response:
        failure = next(failures)
        if isinstance(failure, Exception):
            raise failure
        return failure or lengths(request)

    reward = connect(answer, attempts=4)
    assert await reward.score(make_item("four", prompt="")) == 4.0
    await reward.close()


async def test_what_the_server_refuses_is_asked_once_and_hurts_no_neighbour() -> None:
    requests: list[list[str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        texts = json.loads(request.content)["texts"]
        requests.append(texts)
        return httpx.Response(422, text="too long") if "bad" in texts else lengths(request)

    reward = connect(answer, attempts=5)
    scores = await asyncio.gather(
        *(reward.score(make_item(text, prompt="")) for text in ("one", "bad", "three")), return_exceptions=True
    )
    await reward.close()
    assert (scores[0], scores[2]) == (3.0, 5.0)
    assert isinstance(scores[1], RewardError)
    assert requests == [["one", "bad", "three"], ["one"], ["bad"], ["three"]]


async def test_closing_fails_what_is_still_asked() -> None:
    asked = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("never")

    reward = connect(answer, max_concurrency=1)
    waiting = [asyncio.create_task(reward.score(make_item())) for _ in range(100)]  # more than one request holds
    await asyncio.wait_for(asked.wait(), 5)
    await reward.close()
    for one in waiting:
        with pytest.raises(RewardError, match="given up"):
            await asyncio.wait_for(one, 5)


async def test_the_token_comes_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return lengths(request)

    reward = connect(answer, token_file=str(tmp_path / "token"))
    await reward.score(make_item())
    await reward.close()
    assert seen == ["Bearer secret"]


async def test_a_token_that_is_put_right_needs_no_new_worker(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return lengths(request) if seen[-1] == "Bearer new" else httpx.Response(401)

    reward = connect(answer, token_file=str(token))
    score = asyncio.create_task(reward.score(make_item("four", prompt="")))
    await until(lambda: len(seen) > 3, "the old token is refused")
    token.unlink()
    num_seen = len(seen)
    await until(lambda: len(seen) > num_seen, "it is asked again without the file")
    token.write_text("new\n")
    assert await asyncio.wait_for(score, 10) == 4.0
    await reward.close()


@pytest.mark.parametrize("content", [None, b"", b"two\nlines", b"\xff\xfe", b"x" * 5000])
def test_a_file_that_holds_no_token_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match=r"rewards\.mine\.token_file"):
        connect(lengths, token_file=str(tmp_path / "token"))


# Replicas and outages


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


@pytest.mark.parametrize("status", [302, 401, 403, 404, 405])
async def test_a_wrong_address_or_token_is_an_outage_that_names_itself_and_costs_no_attempt(status: int) -> None:
    wrong, num_asked = True, 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        num_asked += 1
        return httpx.Response(status, text="who are you") if wrong else lengths(request)

    reward = connect(answer, attempts=1)
    scores = [asyncio.create_task(reward.score(make_item("x" * length, prompt=""))) for length in range(100)]
    outage = await until(lambda: reward.health().outage, "the outage shows")
    assert outage == f"http://reward:1/score: answered {status}: who are you"
    assert reward.health().state == f"0 of 1 replicas well; {outage}"
    await until(lambda: num_asked > 10, "it was asked more often than the samples have attempts")
    assert not any(score.done() for score in scores)
    wrong = False
    assert await asyncio.wait_for(asyncio.gather(*scores), 10) == list(range(100))
    await reward.close()


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


async def until(predicate: Callable[[], Any], description: str) -> Any:
    """`wait_until`, with the loop running on."""
    return await asyncio.to_thread(functools.partial(wait_until, predicate, description=description))


async def test_an_outage_that_does_not_end_is_told_as_one() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    reward = connect(answer, attempts=100, outage_s=0.05)
    with pytest.raises(RewardOutage, match=r"no replica gave a score for 0\.05 s: http://reward:1/score: ConnectError"):
        await reward.score(make_item())
    await reward.close()


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


async def test_a_service_may_be_asked_in_another_form_at_its_own_path() -> None:
    seen: list[tuple[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, json={"rewards": [0.25]})

    reward = connect(answer, form="openrlhf")
    assert await reward.score(make_item("4", prompt="2+2=", answer="4")) == 0.25
    await reward.close()
    assert seen == [("/get_reward", {"query": ["2+2=4"], "prompts": ["2+2="], "labels": ["4"]})]


def test_every_replica_needs_this_workers_permission() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.mine\.url: this worker may not send samples to 'elsewhere'"):
        connect(lengths, replicas=("http://elsewhere:1",))
