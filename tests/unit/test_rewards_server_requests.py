"""What the reward server answers to good and bad requests; the application is called without a socket."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from streamrl.web_requests import MAX_BODY_BYTES
from streamrl.workers.reward_server.batcher import Batcher, Row, ScoringModelDouble
from streamrl.workers.reward_server.server import MAX_PENDING_ROWS, MAX_ROWS, RewardApp
from tests.helpers import wait_until, wait_until_async
from tests.made_pages import for_prometheus, told_for_prometheus


@pytest.fixture
def model() -> ScoringModelDouble:
    return ScoringModelDouble()


@pytest.fixture
async def client(model: ScoringModelDouble) -> AsyncIterator[httpx.AsyncClient]:
    async with connected(model) as client:
        yield client


@asynccontextmanager
async def connected(model: ScoringModelDouble, *, health_timeout_s: float = 5.0) -> AsyncIterator[httpx.AsyncClient]:
    batcher = Batcher(model, max_delay_s=0.0, max_batch_tokens=1000)
    app = RewardApp(model, batcher, token="secret", health_timeout_s=health_timeout_s).asgi()
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    headers = {"authorization": "Bearer secret"}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://reward", headers=headers) as client,
    ):
        yield client


async def test_texts_and_tokens_are_scored(client: httpx.AsyncClient) -> None:
    assert (await client.post("/score", json={"texts": ["a", "bc"]})).json() == {"rewards": [97.0, 197.0]}
    assert (await client.post("/score", json={"tokens": [[1, 2], [3]]})).json() == {"rewards": [3.0, 3.0]}


async def test_openrlhf_is_answered_in_its_own_form(client: httpx.AsyncClient) -> None:
    query = {"query": ["a", "bc"], "prompts": ["", "b"], "labels": [None, 3], "more": True}
    answer = await client.post("/get_reward", json=query)
    assert answer.json() == {"rewards": [97.0, 197.0], "scores": [97.0, 197.0], "extra_logs": {}}
    answer = await client.post("/get_reward", json={"prompts": ["a"]})
    assert (answer.status_code, answer.json()) == (422, {"error": "query: Field required"})


async def test_metrics_count_what_was_asked_and_scored(client: httpx.AsyncClient) -> None:
    await client.post("/score", json={"texts": ["a", "bc"]})
    await client.post("/score", json={})
    lines = (await client.get("/metrics", headers={"authorization": ""})).text.splitlines()
    for line in (
        'streamrl_reward_requests_total{status="200"} 1.0',
        'streamrl_reward_requests_total{status="422"} 1.0',
        "streamrl_reward_rows_total 2.0",
        "streamrl_reward_tokens_total 3.0",
        "streamrl_reward_pending_rows 0.0",
        "streamrl_reward_request_seconds_count 2.0",
    ):
        assert line in lines


async def test_the_page_names_the_metrics_that_the_server_has(client: httpx.AsyncClient) -> None:
    await client.post("/score", json={"texts": ["a"]})
    assert for_prometheus((await client.get("/metrics")).text) == told_for_prometheus("reward server")


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        (b"", 422, "Invalid JSON"),
        (b"{", 422, "Invalid JSON"),
        (b'{"texts": ["\xff"]}', 422, "Invalid JSON: invalid unicode"),
        (b'{"texts": ["\\ud800"]}', 422, "Invalid JSON"),
        (b"[]", 422, "should be an object"),
        (b"{}", 422, "exactly one of"),
        (b'{"texts": ["a"], "tokens": [[1]]}', 422, "exactly one of"),
        (b'{"texts": ["a"], "model": "x"}', 422, "model: no such key; a request takes texts or tokens"),
        (b'{"texts": "a"}', 422, "texts: Input should be a valid array"),
        (b'{"texts": [1]}', 422, r"texts\.0: Input should be a valid string"),
        (b'{"texts": []}', 422, "at least 1 item"),
        (b'{"texts": [""]}', 422, "row 0 has no tokens"),
        (b'{"tokens": [[1], []]}', 422, "row 1 has no tokens"),
        (b'{"tokens": [[1.5]]}', 422, r"tokens\.0\.0: Input should be a valid integer"),
        (b'{"tokens": [[true]]}', 422, "valid integer"),
        (b'{"tokens": [[-1]]}', 422, "row 0 has a token outside of"),
        (b'{"tokens": [[99999999999999999999]]}', 422, "row 0 has a token outside of"),
        (json.dumps({"texts": ["x" * 1001]}).encode(), 422, "row 0 has 1001 tokens; the model takes 1000"),
        (json.dumps({"texts": ["x"] * (MAX_ROWS + 1)}).encode(), 422, f"at most {MAX_ROWS} items"),
        (json.dumps({"texts": ["x" * MAX_BODY_BYTES]}).encode(), 413, "the body exceeds"),
        (b"[" * 100_000, 422, "Invalid JSON: recursion limit exceeded"),
    ],
)
async def test_a_bad_request_is_told_why_and_the_server_goes_on(
    client: httpx.AsyncClient, content: bytes, status: int, reason: str
) -> None:
    answer = await client.post("/score", content=content)
    assert answer.status_code == status
    with pytest.raises(ValueError, match=reason):
        raise ValueError(answer.json()["error"])
    assert (await client.post("/score", json={"texts": ["a"]})).status_code == 200


@pytest.mark.parametrize("authorization", ["", "Bearer wrong", "secret", "Bearer s\u00e9cret"])
async def test_without_the_token_nothing_is_scored(
    client: httpx.AsyncClient, model: ScoringModelDouble, authorization: str
) -> None:
    headers = {"authorization": authorization.encode()}
    answer = await client.post("/score", json={"texts": ["a"]}, headers=headers)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert model.batches == []


async def test_a_page_in_a_browser_is_not_scored(client: httpx.AsyncClient, model: ScoringModelDouble) -> None:
    answer = await client.post("/score", json={"texts": ["a"]}, headers={"origin": "http://evil.example"})
    assert answer.status_code == 403
    assert model.batches == []


async def test_unknown_paths_and_methods_are_explained_too(client: httpx.AsyncClient) -> None:
    assert (await client.get("/nothing")).json() == {"error": "no such path: /nothing; see /openapi.json"}
    assert (await client.get("/score")).status_code == 405


async def test_health_follows_the_model_and_needs_no_token(
    client: httpx.AsyncClient, model: ScoringModelDouble
) -> None:
    model.failure = RuntimeError("broken")
    answer = await client.get("/health", headers={"authorization": ""})
    assert (answer.status_code, answer.json()["status"]) == (503, "failing")
    model.failure = None
    answer = await client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")


async def test_a_model_that_scores_nothing_is_stuck(model: ScoringModelDouble) -> None:
    async with connected(model, health_timeout_s=0.05) as client:
        model.may_continue.clear()
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "stuck")
        model.may_continue.set()


async def test_a_model_with_so_much_to_do_that_health_must_wait_its_turn_is_not_stuck(
    model: ScoringModelDouble,
) -> None:
    may_end, score = threading.Event(), model.score

    def score_two_batches_soon(rows: Sequence[Row]) -> list[float]:
        if len(model.batches) >= 2:
            may_end.wait(10.0)
        return score(rows)

    model.score = score_two_batches_soon  # type: ignore[method-assign]
    model.may_continue.clear()
    async with connected(model, health_timeout_s=2.0) as client:

        async def all_wait() -> bool:
            return "streamrl_reward_pending_rows 7.0" in (await client.get("/metrics")).text

        ahead = asyncio.create_task(client.post("/score", json={"tokens": [[1] * 1000] * 10}))
        await asyncio.to_thread(wait_until, lambda: model.batches, description="the first one is being scored")
        health = asyncio.create_task(client.get("/health"))
        await wait_until_async(all_wait, description="health's own row waits behind the others")
        model.may_continue.set()
        assert (await health).json()["status"] == "ok"
        may_end.set()
        assert (await ahead).status_code == 200


async def test_a_model_that_fails_is_a_server_error_and_never_a_number(
    client: httpx.AsyncClient, model: ScoringModelDouble
) -> None:
    model.failure = RuntimeError("broken")
    answer = await client.post("/score", json={"texts": ["a"]})
    assert (answer.status_code, answer.json()) == (500, {"error": "the model raised RuntimeError"})


async def test_above_the_limit_of_rows_the_server_is_busy_until_some_are_answered(
    client: httpx.AsyncClient, model: ScoringModelDouble
) -> None:
    model.may_continue.clear()
    full = [
        asyncio.create_task(client.post("/score", json={"tokens": [[1]] * MAX_ROWS}))
        for _ in range(MAX_PENDING_ROWS // MAX_ROWS)
    ]
    await asyncio.to_thread(wait_until, lambda: model.batches, description="the model is at work")
    await wait_until_async(functools.partial(is_busy, client), description="all have been read")
    model.may_continue.set()
    assert [answer.status_code for answer in await asyncio.gather(*full)] == [200] * len(full)
    assert not await is_busy(client)


async def is_busy(client: httpx.AsyncClient) -> bool:
    answer = await client.post("/score", json={})
    if answer.status_code == 429:
        assert answer.headers["retry-after"] == "1"
        assert answer.json() == {"error": f"busy: {MAX_PENDING_ROWS} rows are waiting already"}
    return answer.status_code == 429


async def test_who_hangs_up_is_not_scored(model: ScoringModelDouble) -> None:
    batcher = Batcher(model, max_delay_s=3600.0, max_batch_tokens=1000)
    app = RewardApp(model, batcher, token=None).asgi()
    coming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    coming.put_nowait({"type": "http.request", "body": b'{"tokens": [[1]]}'})
    scope = {"type": "http", "method": "POST", "path": "/score", "query_string": b"", "headers": []}

    async def send(message: MutableMapping[str, Any]) -> None:
        pass

    async with app.router.lifespan_context(app):
        asking = asyncio.create_task(app(scope, coming.get, send))
        await asyncio.to_thread(wait_until, lambda: batcher.num_pending, description="the row waits")
        coming.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(asking, 5)
        assert await batcher.score([[1] * 1000]) == [1000.0]  # a full batch goes at once, and takes along what waits
    assert model.batches == [[[1] * 1000]]
