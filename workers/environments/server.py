"""The server side of `remote`: serves a user's environment class over HTTP, in processes with the limits of a worker.

The outcome of each turn is kept until the next: a caller whose reply was lost repeats the turn and gets the same answer
or error, and nothing is played twice. A call for which no thread is free soon is refused with 429, before its caller
gives it up: it would be played for nobody. A rollout that failed plays no further turn. Rollouts idle for `idle_s` are
closed. Status 422: the fault of the user's code or the request; 410: no such rollout here, because it was closed or the
service restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamrl.errors import SampleError
from streamrl.web import KEEP_ALIVE_S, Server
from streamrl.web_requests import check_caller, http_error, internal_error, read_body
from streamrl.workers.environments.base import Answer, Environment, Episode
from streamrl.workers.environments.own import Busy

MAX_ROLLOUTS = 4096
IDLE_S = 3600.0
_STOP_TIMEOUT_S = 10
_PATHS = "there are POST /reset, /step and /close, and GET /health"


@dataclass(slots=True, kw_only=True)
class _Rollout:
    episode: Episode
    last_used: float
    turn: int = 0  # the last turn that was begun
    outcome: Answer | SampleError = field(default_factory=Answer)  # of that turn
    turns: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvironmentApp:
    def __init__(
        self,
        environment: Environment,
        *,
        token: str | None = None,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._environment, self._token, self._idle_s, self._clock = environment, token, idle_s, clock
        self._rollouts: dict[str, _Rollout] = {}

    @property
    def num_rollouts(self) -> int:
        return len(self._rollouts)

    def asgi(self) -> Starlette:
        calls = {"reset": self._reset, "step": self._step, "close": self._close}
        return Starlette(
            routes=[
                *(Route(f"/{name}", self._call(call), methods=["POST"]) for name, call in calls.items()),
                Route("/health", self._health),
            ],
            exception_handlers={HTTPException: http_error(_PATHS), Exception: internal_error},
        )

    @contextlib.asynccontextmanager
    async def ready(self) -> AsyncIterator[None]:
        """Start the environment. UserError if the class cannot be used."""
        try:
            await self._environment.start()
            yield
        finally:
            for rollout in self._rollouts.values():
                await rollout.episode.close()
            await self._environment.close()

    def _call(self, call: Callable[[dict[str, Any]], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            check_caller(request, self._token)
            try:
                body = json.loads(await read_body(request, remedy="a row or a completion cannot be that long"))
            except (ValueError, RecursionError):
                raise HTTPException(422, "the body is not JSON") from None
            if not isinstance(body, dict):
                raise HTTPException(422, "the body is not a JSON object")
            try:
                reply = await call(body)
            except SampleError as error:
                raise HTTPException(422, str(error)) from None
            except Busy as error:
                # 429, and not 503: callers wait for as long, and it does not count as a failure of this replica.
                raise HTTPException(429, f"busy: {error}", {"retry-after": "1"}) from None
            if call == self._reset and await request.is_disconnected():
                await self._close(reply)  # the caller is gone and will never know this rollout
            return JSONResponse(reply)

        return answer

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "rollouts": len(self._rollouts)})

    async def _reset(self, body: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(row := body.get("row"), dict):
            raise HTTPException(422, "`row` must be an object: the prompt's row without its prompt")
        await self._forget_idle()
        if len(self._rollouts) >= MAX_ROLLOUTS:
            raise Busy(f"{MAX_ROLLOUTS} rollouts are in progress")
        episode, number = await self._environment.begin(row), secrets.token_hex(8)
        self._rollouts[number] = _Rollout(episode=episode, last_used=self._clock())
        return {"id": number, "observation": episode.opening or None}

    async def _step(self, body: dict[str, Any]) -> dict[str, Any]:
        turn, completion = body.get("turn"), body.get("completion")
        if type(turn) is not int or not isinstance(completion, str):
            raise HTTPException(422, "a step needs `id`, `turn` (an integer from 1) and `completion` (a string)")
        rollout = self._rollouts.get(str(body.get("id")))
        if rollout is None:
            raise HTTPException(410, "no such rollout here")
        rollout.last_used = self._clock()
        async with rollout.turns:
            if turn == rollout.turn + 1 and isinstance(rollout.outcome, Answer):
                before = rollout.outcome
                rollout.turn, rollout.outcome = turn, SampleError("the turn was not played to its end")
                try:
                    rollout.outcome = await rollout.episode.step(completion)
                except SampleError as error:
                    rollout.outcome = error
                except Busy:  # it was not played at all
                    rollout.turn, rollout.outcome = turn - 1, before
                    raise
            answer = rollout.outcome
            if isinstance(answer, SampleError):
                raise HTTPException(422, str(answer))
            if turn != rollout.turn:
                raise HTTPException(422, f"turn {turn} does not follow turn {rollout.turn}")
        return {"observation": answer.observation or None, "reward": answer.reward, "done": answer.done}

    async def _close(self, body: dict[str, Any]) -> dict[str, Any]:
        if (rollout := self._rollouts.pop(str(body.get("id")), None)) is not None:
            await rollout.episode.close()
        return {}

    async def _forget_idle(self) -> None:
        """Close idle rollouts; called when another begins, since idle ones cost nothing until then."""
        idle_since = self._clock() - self._idle_s
        for number in [number for number, rollout in self._rollouts.items() if rollout.last_used < idle_since]:
            await self._rollouts.pop(number).episode.close()


class _Server(Server):
    """Exits on a signal without an error."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True


def run(app: EnvironmentApp, bound: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, and return."""
    asyncio.run(_run(app, bound, on_ready))


async def _run(app: EnvironmentApp, bound: socket.socket, on_ready: Callable[[], None]) -> None:
    async with app.ready():
        server = _Server(
            app.asgi(),
            on_ready=on_ready,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
        )
        await server.serve(sockets=[bound])
