"""The reward client against servers of every kind of badness, without a socket."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamrl.config import schema
from streamrl.config.load import load_config
from streamrl.config.places import granted
from streamrl.errors import ConfigError, RewardError, RewardOutage
from streamrl.permissions import Permissions
from streamrl.workers.environments.remote import build_remote
from streamrl.workers.rewards.http_client import build_http_reward, check_host
from streamrl.workers.rewards.judge import build_judge_reward
from tests.http_reward_world import connect, lengths, until
from tests.tiny_rewards import make_item


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
        (httpx.Response(200, text="no json"), "the answer is not JSON"),
        (httpx.Response(200, text="[" * 4000), "the answer is not JSON"),
        (httpx.Response(200, json={"rewards": []}), "malformed answer: no list of 1 rewards"),
        (httpx.Response(200, json={"rewards": [1.0, 2.0]}), "malformed answer: no list of 1 rewards"),
        (httpx.Response(200, json={"scores": [1.0]}), "malformed answer: no list of 1 rewards"),
        (httpx.Response(200, json=[1.0]), "malformed answer: no list of 1 rewards"),
        (httpx.Response(200, text='{"rewards": [NaN]}'), "not finite numbers"),
        (httpx.Response(200, text='{"rewards": [1e999]}'), "not finite numbers"),
        (httpx.Response(200, json={"rewards": [None]}), "not finite numbers"),
        (httpx.Response(200, json={"rewards": [True]}), "not finite numbers"),
        (httpx.Response(200, json={"rewards": ["1.0"]}), "not finite numbers"),
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
        return httpx.Response(422, text="too long" * 1000) if "bad" in texts else lengths(request)

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
        with pytest.raises(RewardError, match="the request was cancelled"):
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


async def test_a_token_that_comes_back_in_an_answer_stands_in_no_error(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("marked\n")
    reward = connect(
        lambda request: httpx.Response(200, json={"told": request.headers["authorization"]}),
        token_file=str(tmp_path / "token"),
    )
    with pytest.raises(RewardError, match=r'"told":"Bearer \[token\]"'):
        await reward.score(make_item())
    assert "marked" not in reward.health().state
    await reward.close()


async def test_nor_does_one_that_is_replaced_while_its_request_is_under_way(tmp_path: Path) -> None:
    token, numbers = tmp_path / "token", itertools.count()
    token.write_text("marked\n")

    def answer(request: httpx.Request) -> httpx.Response:
        token.write_text(f"marked{next(numbers)}\n")
        return httpx.Response(401, text=f"what is {request.headers['authorization']}?")

    reward = connect(answer, token_file=str(token), outage_s=0.05)
    with pytest.raises(RewardOutage, match=r"what is Bearer \[token\]\?") as failed:
        await reward.score(make_item())
    assert "marked" not in str(failed.value)
    await reward.close()


async def test_a_token_that_is_a_common_word_changes_no_score(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("rewards\n")
    reward = connect(lengths, token_file=str(tmp_path / "token"))
    assert await reward.score(make_item("four", prompt="")) == 4.0
    await reward.close()


@pytest.mark.parametrize("content", [None, b"", b"two\nlines", b"\xff\xfe", b"x" * 5000])
def test_a_file_that_holds_no_token_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match=r"rewards\.mine\.token_file"):
        connect(lengths, token_file=str(tmp_path / "token"))


# Replicas and outages


async def test_a_service_may_be_asked_in_another_form_at_its_own_path() -> None:
    seen: list[tuple[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, json={"rewards": [0.25]})

    reward = connect(answer, form="openrlhf")
    assert await reward.score(make_item("4", prompt="2+2=", answer="4")) == 0.25
    await reward.close()
    assert seen == [("/get_reward", {"query": ["2+2=4"], "prompts": ["2+2="], "labels": ["4"]})]


async def test_a_long_sequence_may_have_a_reward_for_each_of_its_tokens() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        [text] = json.loads(request.content)["input"]
        return httpx.Response(200, json={"data": [{"index": 0, "data": [[-0.12345678901234567]] * len(text)}]})

    reward = connect(answer, form="vllm-pooling")
    assert await reward.score(make_item("x" * 20_000, prompt="")) == -0.12345678901234567  # a token per character
    await reward.close()


def test_every_replica_needs_this_workers_permission() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.mine\.url: this worker may not send samples to 'elsewhere'"):
        connect(lengths, replicas=("http://elsewhere:1",))


@pytest.mark.parametrize("url", ["http://[::1]:8000", "https://[::1]/score", "http://Reward:8000"])
def test_a_configuration_permits_the_hosts_that_it_names(url: str) -> None:
    source = f"rewards={{mine: {{type: http, url: '{url}'}}}}"
    config = load_config("conf/reinforce.yaml", ["model.path=x", source, "reward_server=null"]).config
    check_host("rewards.mine.url", url, granted(config))
    with pytest.raises(ConfigError, match="may not send samples"):
        check_host("rewards.mine.url", url.replace("::1", "::2").replace("Reward", "other"), granted(config))


@pytest.mark.parametrize("url", ["http://10.0.0.256:8000", "http://reward:1\n", "http://re ward:1"])
def test_what_is_no_address_is_refused_for_every_kind_of_service(url: str) -> None:
    allowed = Permissions(hosts=("10.0.0.256", "reward", "re ward"))
    judge = schema.JudgeReward(type="judge", judges={"one": schema.Judge(url=url, model="m")}, rubric="It is right.")
    builders: list[Callable[[], object]] = [
        lambda: build_http_reward("mine", schema.HttpReward(type="http", url=url), allowed, None),
        lambda: build_judge_reward("mine", judge, allowed),
        lambda: build_remote(schema.Environment(urls=(url,)), allowed),
    ]
    for build in builders:
        with pytest.raises(ConfigError, match=r"is not the address of a service; expected http://host:port"):
            build()


@pytest.mark.parametrize("host", ["::1", "[::1]", "[::1]:8000"])
def test_a_host_by_its_number_may_be_permitted_in_any_form(host: str) -> None:
    check_host("rewards.mine.url", "http://[::1]:8000", Permissions(hosts=(host,)))
