"""The reward server: returns a finite number per row or an error with its reason, and reports its true health.

    POST /score       {"texts": ["prompt and completion", ...]} or {"tokens": [[1, 2], ...]} ──► {"rewards": [0.5, ...]}
    POST /get_reward  {"query": ["prompt and completion", ...]}: OpenRLHF's API for remote reward models
    GET  /health, /metrics (for Prometheus), /openapi.json

A request is read (bounded in bytes and time), validated, tokenized in a thread and handed to the batcher.

SIGTERM or Ctrl-C shuts it down in order: no new connections, requests in progress are answered, then the process exits.
Requests that take longer than `STOP_TIMEOUT_S`, or are still open at a second such signal, get 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamrl.config import schema
from streamrl.tasks import run_beside
from streamrl.web import KEEP_ALIVE_S, AgingConnection, Server
from streamrl.web_requests import check_caller, http_error, internal_error, read_body
from streamrl.workers.reward_server.batcher import Batcher, ScoringFailed, ScoringModel
from streamrl.workers.reward_server.openapi import ServiceMetrics, document

if TYPE_CHECKING:
    from streamrl.workers.reward_server.model import Dtype

MAX_ROWS = 4096  # per request
MAX_PENDING_ROWS = 16384  # over all requests read and not answered; above that the server answers 429
HEALTH_TIMEOUT_S = 5.0  # a model without a score for this long must score a test row
STOP_TIMEOUT_S = 10
_LEAVE_TIMEOUT_S = 5  # for callers to read their answers


class ScoreRequest(BaseModel):
    """Score texts, or tokens."""

    model_config = ConfigDict(extra="forbid", strict=True)

    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_ROWS)] | None = None
    tokens: Annotated[list[list[int]], Field(min_length=1, max_length=MAX_ROWS)] | None = None


class OpenRlhfRequest(BaseModel):
    """Score texts, as OpenRLHF asks."""

    # Its versions send more than the query (prompts, labels), which is not needed here.
    model_config = ConfigDict(extra="ignore", strict=True)

    texts: Annotated[list[str], Field(alias="query", min_length=1, max_length=MAX_ROWS)]
    tokens: ClassVar[None] = None


class RewardApp:
    """The routes and their shared state."""

    def __init__(
        self,
        model: ScoringModel,
        batcher: Batcher,
        *,
        token: str | None,
        health_timeout_s: float = HEALTH_TIMEOUT_S,
    ) -> None:
        self._model = model
        self._batcher = batcher
        self._token = token
        self._health_timeout_s = health_timeout_s
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._num_rows = 0  # read and not answered
        self._ending = asyncio.Event()
        self._metrics = ServiceMetrics(pending_rows=lambda: batcher.num_pending)

    def asgi(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/score", self.score, methods=["POST"]),
                Route("/get_reward", self.get_reward, methods=["POST"]),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/openapi.json", self.openapi),
            ],
            exception_handlers={HTTPException: http_error("see /openapi.json"), Exception: internal_error},
            lifespan=self._lifespan,
        )

    async def score(self, request: Request) -> Response:
        return JSONResponse({"rewards": await self._answer(request, ScoreRequest)})

    async def get_reward(self, request: Request) -> Response:
        rewards = await self._answer(request, OpenRlhfRequest)
        return JSONResponse({"rewards": rewards, "scores": rewards, "extra_logs": {}})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(document({"/score": ScoreRequest, "/get_reward": OpenRlhfRequest}))

    async def health(self, request: Request) -> Response:
        """Healthy if the model has scored something within the last seconds, or does so now."""
        facts = {"model": self._model.name, "pending_rows": self._batcher.num_pending}
        began, limit_s = time.monotonic(), self._health_timeout_s
        if began - self._batcher.last_success > limit_s:
            try:
                await asyncio.wait_for(self._batcher.score([[0]]), limit_s)
            except TimeoutError:
                if self._batcher.last_success < began:  # otherwise it is busy, and scored other rows meanwhile
                    return JSONResponse({"status": "stuck", "reason": f"no score within {limit_s:g} s", **facts}, 503)
            except ScoringFailed as error:
                return JSONResponse({"status": "failing", "reason": str(error), **facts}, 503)
        return JSONResponse({"status": "ok", **facts})

    def give_up(self) -> None:
        """Give up on pending requests, since the server is about to end: they get 503."""
        self._ending.set()

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        batching = asyncio.create_task(self._batcher.run(), name="reward batcher")
        try:
            yield
        finally:
            batching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await batching
            self._tokenizing.shutdown(wait=True, cancel_futures=True)

    async def _answer(self, request: Request, form: type[ScoreRequest | OpenRlhfRequest]) -> list[float]:
        status = 500
        with self._metrics.seconds.time():
            try:
                check_caller(request, self._token)
                self._check_room(1)  # before reading a body that would not be scored
                body = _parse(await read_body(request, remedy="send fewer rows at once"), form)
                rewards = await self._rewards(request, body)
                status = 200
            except HTTPException as error:
                status = error.status_code
                raise
            finally:
                self._metrics.requests.labels(str(status)).inc()
        return rewards

    def _check_room(self, num_rows: int) -> None:
        if self._num_rows + num_rows > MAX_PENDING_ROWS:
            raise HTTPException(429, f"busy: {self._num_rows} rows are waiting already", {"retry-after": "1"})

    async def _rewards(self, request: Request, body: ScoreRequest | OpenRlhfRequest) -> list[float]:
        if (body.texts is None) == (body.tokens is None):
            raise HTTPException(422, "exactly one of `texts` and `tokens` is needed")
        num_rows = len(body.texts or body.tokens or ())
        self._check_room(num_rows)
        self._num_rows += num_rows
        try:
            # A caller that gave up and retries must not wait behind its own earlier request.
            ends = {"hang-up": _wait_for_hang_up(request), "end": self._wait_for_end()}
            return await run_beside(self._score(body), ends)
        finally:
            self._num_rows -= num_rows

    async def _score(self, body: ScoreRequest | OpenRlhfRequest) -> list[float]:
        rows: Sequence[Sequence[int]] | None = body.tokens
        if rows is None:
            loop = asyncio.get_running_loop()
            rows = await loop.run_in_executor(self._tokenizing, self._model.encode, body.texts or ())
        self._check_rows(rows)
        try:
            rewards = await self._batcher.score(rows)
        except ScoringFailed as error:
            raise HTTPException(500, str(error)) from None
        self._metrics.rows.inc(len(rows))
        self._metrics.tokens.inc(sum(map(len, rows)))
        return rewards

    async def _wait_for_end(self) -> None:
        await self._ending.wait()
        raise HTTPException(
            503, "the server is shutting down: try another one, or try again later", {"retry-after": "1"}
        )

    def _check_rows(self, rows: Sequence[Sequence[int]]) -> None:
        for index, row in enumerate(rows):
            if not row:
                raise HTTPException(422, f"row {index} has no tokens")
            if self._model.max_tokens is not None and len(row) > self._model.max_tokens:
                raise HTTPException(422, f"row {index} has {len(row)} tokens; the model takes {self._model.max_tokens}")
            if min(row) < 0 or max(row) >= self._model.vocab_size:
                raise HTTPException(422, f"row {index} has a token outside of [0, {self._model.vocab_size})")


async def _wait_for_hang_up(request: Request) -> None:
    await request.receive()  # the body has been read, so only a disconnect can follow
    raise HTTPException(499, "the caller hung up")


def _parse(body: bytes, form: type[ScoreRequest | OpenRlhfRequest]) -> ScoreRequest | OpenRlhfRequest:
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        reason = first["msg"]
        if first["type"] == "extra_forbidden":
            reason = f"no such key; a request takes {' or '.join(form.model_fields)}"
        raise HTTPException(422, f"{place}: {reason}" if place else reason) from None


def build_app(
    settings: schema.RewardServer, *, dtype: Dtype, threads: int | None, token: str | None, trust_remote_code: bool
) -> RewardApp:
    """Load the model, which takes a while, and build the application around it."""
    from streamrl.workers.reward_server.model import RewardModel, prepare_process  # lazy: imports torch

    prepare_process(threads)
    model = RewardModel.load(settings, dtype=dtype, trust_remote_code=trust_remote_code)
    batcher = Batcher(model, max_delay_s=settings.max_delay_ms / 1000, max_batch_tokens=settings.max_batch_tokens)
    return RewardApp(model, batcher, token=token)


class _Server(Server):
    """Exits on a signal without an error."""

    def __init__(self, app: RewardApp, on_ready: Callable[[], None]) -> None:
        super().__init__(
            app.asgi(),
            on_ready=on_ready,
            connection=AgingConnection,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_TIMEOUT_S + _LEAVE_TIMEOUT_S,
        )
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn would raise the signal again at the end; an orderly shutdown must exit with 0.
        if self.should_exit:
            self._app.give_up()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        giving_up = asyncio.get_running_loop().call_later(STOP_TIMEOUT_S, self._app.give_up)
        await super().shutdown(sockets=sockets)
        giving_up.cancel()


def run(app: RewardApp, bound: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, and return."""
    asyncio.run(_Server(app, on_ready).serve(sockets=[bound]))
