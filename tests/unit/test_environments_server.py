"""The server of environments: questions that it refuses, and rollouts that it closes by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from streamrl.config import schema
from streamrl.errors import SampleError
from streamrl.ops.cli.rewards.environment import serve
from streamrl.process import address_of, bind
from streamrl.web import serving
from streamrl.web_requests import MAX_BODY_BYTES
from streamrl.workers.environments.base import Answer, EnvironmentDouble, Episode
from streamrl.workers.environments.own import Busy
from streamrl.workers.environments.server import EnvironmentApp
from tests.http_reward_world import until


def echo(row: Mapping[str, Any], said: list[str]) -> Answer:
    return Answer(observation=said[-1])


async def ask(app: EnvironmentApp, path: str, body: object) -> tuple[int, Any]:
    transport = httpx.ASGITransport(app.asgi())
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        content = body if isinstance(body, str) else json.dumps(body)
        answer = await client.post(path, content=content)
    return answer.status_code, answer.json()


class SlowToBegin(EnvironmentDouble):
    def __init__(self) -> None:
        super().__init__(echo)
        self.may_begin = asyncio.Event()
        self.num_begun = 0

    async def begin(self, row: Mapping[str, Any]) -> Episode:
        await self.may_begin.wait()
        self.num_begun += 1
        return await super().begin(row)


async def test_a_rollout_that_begins_when_its_caller_has_given_up_is_closed() -> None:
    environment = SlowToBegin()
    app, bound = EnvironmentApp(environment), bind("127.0.0.1", 0, what="the test")
    async with serving(app.asgi(), bound), httpx.AsyncClient(base_url=f"http://{address_of(bound)}") as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/reset", json={"row": {"name": "a"}}, timeout=0.3)
        await client.get("/health")  # by its answer the server has seen the end of that connection, too
        environment.may_begin.set()
        await until(lambda: environment.num_begun, "it begins all the same")
        await until(lambda: app.num_rollouts == environment.num_open == 0, "it is closed")
        assert (await client.post("/reset", json={"row": {"name": "b"}})).status_code == 200
        assert app.num_rollouts == environment.num_open == 1


class FailsLate(EnvironmentDouble):
    """Its turns fail, as soon as they may."""

    def __init__(self) -> None:
        super().__init__(echo)
        self.may_fail = asyncio.Event()
        self.num_turns = 0

    async def begin(self, row: Mapping[str, Any]) -> Episode:
        return self

    async def step(self, completion: str) -> Answer:
        self.num_turns += 1
        await self.may_fail.wait()
        raise SampleError("KeyError: 'what'")


async def test_a_turn_that_failed_when_its_caller_had_given_up_is_not_played_again() -> None:
    environment = FailsLate()
    app, bound = EnvironmentApp(environment), bind("127.0.0.1", 0, what="the test")
    async with serving(app.asgi(), bound), httpx.AsyncClient(base_url=f"http://{address_of(bound)}") as client:
        begun = (await client.post("/reset", json={"row": {}})).json()
        turn = {"id": begun["id"], "turn": 1, "completion": "x"}
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/step", json=turn, timeout=0.3)
        await until(lambda: environment.num_turns, "it is played all the same")
        environment.may_fail.set()
        for number in (1, 1, 2):
            told = await client.post("/step", json={**turn, "turn": number})
            assert (told.status_code, told.json()) == (422, {"error": "KeyError: 'what'"})
        assert environment.num_turns == 1


class BusyAtFirst(EnvironmentDouble):
    """Finds no thread for its first call of each kind."""

    def __init__(self) -> None:
        super().__init__(echo)
        self.found_none: set[str] = set()

    def _call(self, name: str) -> None:
        if name not in self.found_none:
            self.found_none.add(name)
            raise Busy("no thread was free within 1 s")

    async def begin(self, row: Mapping[str, Any]) -> Episode:
        self._call("reset")
        return self

    async def step(self, completion: str) -> Answer:
        self._call("step")
        return Answer(observation=completion)


async def test_what_finds_no_thread_is_not_played_and_is_asked_for_again() -> None:
    app = EnvironmentApp(BusyAtFirst())
    busy = 429, {"error": "busy: no thread was free within 1 s"}
    assert await ask(app, "/reset", {"row": {}}) == busy
    _, begun = await ask(app, "/reset", {"row": {}})
    turn = {"id": begun["id"], "turn": 1, "completion": "a"}
    assert await ask(app, "/step", turn) == busy
    assert await ask(app, "/step", turn) == (200, {"observation": "a", "reward": 0.0, "done": False})


def test_a_server_gives_up_before_workers_do() -> None:
    (default,) = [option.default for option in serve.params if option.name == "timeout_s"]
    assert default < schema.Environment().timeout_s


async def test_rollouts_that_nobody_asks_for_are_closed() -> None:
    now, environment = 0.0, EnvironmentDouble(echo)
    app = EnvironmentApp(environment, idle_s=100.0, clock=lambda: now)
    _, old = await ask(app, "/reset", {"row": {"name": "old"}})
    now = 60.0
    _, young = await ask(app, "/reset", {"row": {"name": "young"}})
    now = 120.0
    await ask(app, "/reset", {"row": {"name": "new"}})

    assert app.num_rollouts == environment.num_open == 2
    assert (await ask(app, "/step", {"id": old["id"], "turn": 1, "completion": "x"}))[0] == 410
    assert (await ask(app, "/step", {"id": young["id"], "turn": 1, "completion": "x"}))[0] == 200


async def test_a_full_server_asks_callers_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.workers.environments.server.MAX_ROLLOUTS", 1)
    app = EnvironmentApp(EnvironmentDouble(echo))
    bound = bind("127.0.0.1", 0, what="the test")
    async with serving(app.asgi(), bound), httpx.AsyncClient(base_url=f"http://{address_of(bound)}") as client:
        first = await client.post("/reset", json={"row": {}})
        full = await client.post("/reset", json={"row": {}})
        assert (full.status_code, full.headers["retry-after"]) == (429, "1"), "which costs a caller no attempt"
        await client.post("/close", json={"id": first.json()["id"]})
        assert (await client.post("/reset", json={"row": {}})).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/reset", "{", 422),
        ("/reset", [], 422),
        ("/reset", {"row": 1}, 422),
        ("/step", {"id": "x", "turn": 1, "completion": 1}, 422),
        ("/step", {"id": "x", "turn": "1", "completion": ""}, 422),
        ("/step", {"id": "x", "turn": 1, "completion": ""}, 410),
        ("/reset", json.dumps({"row": {"x": "x" * (9 << 20)}}), 413),
        ("/close", {"id": "x"}, 200),
    ],
)
async def test_a_question_of_another_form_is_refused(path: str, body: object, status: int) -> None:
    assert (await ask(EnvironmentApp(EnvironmentDouble(echo)), path, body))[0] == status


async def test_what_is_told_of_a_wrong_path_or_a_long_body_is_of_this_service() -> None:
    app = EnvironmentApp(EnvironmentDouble(echo))
    status, told = await ask(app, "/nope", {})
    assert (status, told["error"]) == (
        404,
        "no such path: /nope; there are POST /reset, /step and /close, and GET /health",
    )
    status, told = await ask(app, "/reset", {"row": {"text": "x" * MAX_BODY_BYTES}})
    assert (status, "a row or a completion cannot be that long" in told["error"]) == (413, True)


async def test_a_turn_that_does_not_follow_is_refused() -> None:
    app = EnvironmentApp(EnvironmentDouble(echo))
    _, begun = await ask(app, "/reset", {"row": {"name": "a"}})

    status, told = await ask(app, "/step", {"id": begun["id"], "turn": 2, "completion": "x"})

    assert (status, told) == (422, {"error": "turn 2 does not follow turn 0"})
