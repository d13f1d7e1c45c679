"""The reward server: `POST /score` gives a finite number a row or an error with its reason, `GET /health` the truth.

    {"texts": ["prompt and completion", ...]} or {"tokens": [[1, 2], ...]}  ──►  {"rewards": [0.5, ...]}

A request is read (bounded in bytes and time), checked, tokenised in a thread of its own and handed to the batcher.
SIGTERM and Ctrl-C end it in order: no new connections, what was asked is answered, then the process leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamrl.config import schema
from streamrl.errors import ResourceError
from workers.rewards.batcher import Batcher, ScoringFailed, ScoringModel

if TYPE_CHECKING:
    from workers.rewards.model import Dtype

MAX_BODY_BYTES = 8 << 20
MAX_ROWS = 4096  # of one request
MAX_PENDING_ROWS = 16384  # of all requests; above it the server says that it is busy
BODY_TIMEOUT_S = 30.0
HEALTH_TIMEOUT_S = 5.0  # a model that scored nothing for so long is asked to prove itself
STOP_TIMEOUT_S = 10


class ScoreRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_ROWS)] | None = None
    tokens: Annotated[list[list[int]], Field(min_length=1, max_length=MAX_ROWS)] | None = None


class RewardApp:
    """The routes, and what they share."""

    def __init__(self, model: ScoringModel, batcher: Batcher, *, token: str | None) -> None:
        self._model = model
        self._batcher = batcher
        self._token = token
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    def asgi(self) -> Starlette:
        return Starlette(
            routes=[Route("/score", self.score, methods=["POST"]), Route("/health", self.health)],
            exception_handlers={HTTPException: _explain, Exception: _apologise},
            lifespan=self._lifespan,
        )

    async def score(self, request: Request) -> Response:
        self._check_token(request)
        if self._batcher.num_pending > MAX_PENDING_ROWS:
            raise HTTPException(503, f"busy: {self._batcher.num_pending} rows wait already", {"retry-after": "1"})
        rows = await self._rows(_parse(await _read_body(request)))
        self._check_rows(rows)
        try:
            return JSONResponse({"rewards": await self._batcher.score(rows)})
        except ScoringFailed as error:
            raise HTTPException(500, str(error)) from None

    async def health(self, request: Request) -> Response:
        """Well means: the model scored something within the last seconds, or does so now."""
        facts = {"model": self._model.name, "pending_rows": self._batcher.num_pending}
        if time.monotonic() - self._batcher.last_success > HEALTH_TIMEOUT_S:
            try:
                await asyncio.wait_for(self._batcher.score([[0]]), HEALTH_TIMEOUT_S)
            except TimeoutError:
                return JSONResponse(
                    {"status": "stuck", "reason": f"no score within {HEALTH_TIMEOUT_S:g} s", **facts}, 503
                )
            except ScoringFailed as error:
                return JSONResponse({"status": "failing", "reason": str(error), **facts}, 503)
        return JSONResponse({"status": "ok", **facts})

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

    def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise HTTPException(401, "a bearer token is needed, and this is not it", {"www-authenticate": "Bearer"})

    async def _rows(self, request: ScoreRequest) -> Sequence[Sequence[int]]:
        if request.tokens is not None:
            return request.tokens
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizing, self._model.encode, request.texts or [])

    def _check_rows(self, rows: Sequence[Sequence[int]]) -> None:
        for index, row in enumerate(rows):
            if not row:
                raise HTTPException(422, f"row {index} has no tokens")
            if self._model.max_tokens is not None and len(row) > self._model.max_tokens:
                raise HTTPException(422, f"row {index} has {len(row)} tokens; the model takes {self._model.max_tokens}")
            if min(row) < 0 or max(row) >= self._model.vocab_size:
                raise HTTPException(422, f"row {index} has a token outside of [0, {self._model.vocab_size})")


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body exceeds {MAX_BODY_BYTES} bytes: send fewer rows at once")
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body ended early") from None
    return bytes(body)


def _parse(body: bytes) -> ScoreRequest:
    try:
        parsed = ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise HTTPException(422, f"{place}: {first['msg']}" if place else first["msg"]) from None
    if (parsed.texts is None) == (parsed.tokens is None):
        raise HTTPException(422, "exactly one of `texts` and `tokens` is needed")
    return parsed


async def _explain(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _apologise(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "internal error; the server's log has it"}, 500)


def build_app(
    settings: schema.RewardServer, *, dtype: Dtype, threads: int | None, token: str | None, trust_remote_code: bool
) -> Starlette:
    """Load the model, which takes its time, and build the application around it."""
    from workers.rewards.model import RewardModel, prepare_process  # torch: only where a real model is served

    prepare_process(threads)
    model = RewardModel.load(
        settings.model,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        reward_mean=settings.reward_mean,
        reward_std=settings.reward_std,
    )
    batcher = Batcher(model, max_delay_s=settings.max_delay_ms / 1000, max_batch_tokens=settings.max_batch_tokens)
    return RewardApp(model, batcher, token=token).asgi()


def bind(host: str, port: int) -> socket.socket:
    """Take the port before anything slow is done. Port 0: any free one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # The protocol by name: asyncio sends without delay only where it sees TCP, else an answer takes 40 ms more.
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ResourceError(f"reward server: no such host {host!r}: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ResourceError(
            f"reward server: cannot take port {port} of {host}: {error.strerror}; choose another --port, or 0 for any"
        ) from None
    return bound


class _Server(uvicorn.Server):
    """uvicorn, saying when it really listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()


def run(app: Starlette, bound: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, and return."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="on", ws="none", timeout_graceful_shutdown=STOP_TIMEOUT_S
    )
    # uvicorn ends on these signals, then raises them again for whoever had them before: an orderly end is exit code 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    asyncio.run(_Server(config, on_ready).serve(sockets=[bound]))
