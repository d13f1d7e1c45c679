"""Serves a worker's sessions over HTTP: one base URL per rollout, compatible with OpenAI's API.

    /sessions/ID/v1/chat/completions, .../v1/completions, .../v1/models    tools, streaming, logprobs
    /sessions/ID/inference/v1/generate                                     tokens in, tokens out
    /sessions/ID/key/KEY/...                                               for agents that cannot send a key

The ID is not secret; the bearer key is, and opens only this session. It is also accepted as `x-api-key`. Requests are
not logged. Where a request body contains the session's own key (for example in a URL inside an error message), the key
is replaced, so that it does not enter prompts, traces or recordings.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from streamrl.process import address_of, bind
from streamrl.tasks import run_beside
from streamrl.web import serving
from streamrl.workers.engines.base import Engine, SampleRequest
from streamrl.workers.sessions import openai_answers as answers
from streamrl.workers.sessions.openai_requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Refused,
    read_request,
)
from streamrl.workers.sessions.session import KEY_REDACTED, Model, Session, session_over

MAX_BODY_BYTES = 4 << 20
_BODY_TIMEOUT_S = 30.0
_ANYWHERE = ("0.0.0.0", "::")

Answer = Callable[[Session, bytes], Coroutine[Any, Any, Response]]


class Sessions:
    """The open sessions, by id."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.address = ("", 0)
        self._open: dict[str, Session] = {}
        self._origin = ""

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[None]:
        bound = bind(host, port, what="--sessions")
        reachable_host = "127.0.0.1" if host in _ANYWHERE else None
        self.address = (reachable_host or bound.getsockname()[0], bound.getsockname()[1])
        self._origin = f"http://{address_of(bound, host=reachable_host)}"
        async with serving(self.asgi(), bound):
            yield

    @contextlib.asynccontextmanager
    async def opened(self, engine: Engine, request: SampleRequest, *, num_samples: int = 1) -> AsyncIterator[Session]:
        session = Session(self.model, engine, request, num_samples=num_samples)
        self._open[session.id] = session
        try:
            yield session
        finally:
            del self._open[session.id]
            await session.close()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def url_of(self, session: Session) -> str:
        key = f"/key/{session.key}" if self.model.settings.key_in_url else ""
        return f"{self._origin}/sessions/{session.id}{key}/v1"

    def asgi(self) -> Starlette:
        routes: list[tuple[str, Answer]] = [
            ("/v1/chat/completions", self._chat),
            ("/v1/completions", self._complete),
            ("/inference/v1/generate", self._generate),
        ]
        prefixes = ("/sessions/{id}", "/sessions/{id}/key/{key}")
        return Starlette(
            routes=[
                *(
                    Route(prefix + path, self._post(handler), methods=["POST"])
                    for prefix in prefixes
                    for path, handler in routes
                ),
                *(Route(f"{prefix}/v1/models", self._models) for prefix in prefixes),
            ],
            exception_handlers={Refused: _refuse, HTTPException: _http_error, Exception: _internal_error},
        )

    def _post(self, handler: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            session = self._authenticate(request)
            with session.request_in_flight():
                body = await _read_body(request, session)
                # An agent that gave up retries: an abandoned request must not become part of its rollout.
                return await run_beside(handler(session, body), {"hang-up": _wait_for_hang_up(request)})

        return endpoint

    def _authenticate(self, request: Request) -> Session:
        session = self._open.get(request.path_params["id"])
        if session is None:
            raise session_over()
        keys = [request.headers.get("authorization", "").removeprefix("Bearer ")]
        keys.append(request.headers.get("x-api-key", ""))  # for clients that cannot set a bearer token
        if self.model.settings.key_in_url:
            keys.append(request.path_params.get("key", ""))
        if not any(map(session.accepts_key, keys)):
            raise Refused(401, "this is not the API key of this rollout's session", code="invalid_api_key")
        return session

    async def _models(self, request: Request) -> Response:
        model = self._authenticate(request).model
        entry = {"id": model.name, "object": "model", "created": 0, "owned_by": "streamrl"}
        return JSONResponse({"object": "list", "data": [{**entry, "max_model_len": model.max_length}]})

    async def _chat(self, session: Session, body: bytes) -> Response:
        request, ignored = read_request(ChatRequest, body)
        turn = await session.chat(request)
        if request.stream:
            return _stream(answers.chat_chunks(turn, request), ignored)
        return _json(answers.chat(turn, request), ignored)

    async def _complete(self, session: Session, body: bytes) -> Response:
        request, ignored = read_request(CompletionRequest, body)
        turn = await session.complete(request)
        if request.stream:
            return _stream(answers.completion_chunks(turn, request), ignored)
        return _json(answers.completion(turn, request), ignored)

    async def _generate(self, session: Session, body: bytes) -> Response:
        request, ignored = read_request(GenerateRequest, body)
        return _json(answers.generate(await session.generate(request)), ignored)


def _json(body: answers.Body, ignored: tuple[str, ...]) -> Response:
    return JSONResponse(body, headers=_ignored_header(ignored))


def _stream(chunks: Iterator[answers.Body], ignored: tuple[str, ...]) -> Response:
    lines = [*(json.dumps(chunk) for chunk in chunks), "[DONE]"]
    return StreamingResponse(
        iter([f"data: {line}\n\n" for line in lines]), headers=_ignored_header(ignored), media_type=_EVENTS
    )


_EVENTS = "text/event-stream"


def _ignored_header(ignored: tuple[str, ...]) -> dict[str, str]:
    return {"x-streamrl-ignored": ", ".join(ignored)} if ignored else {}


async def _wait_for_hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise Refused(499, "the agent hung up", code="hung_up")


async def _read_body(request: Request, session: Session) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                session.count_bytes(len(part))
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise Refused(413, f"a request may have at most {MAX_BODY_BYTES} bytes", code="request_too_large")
    except TimeoutError:
        raise Refused(408, f"the request did not arrive within {_BODY_TIMEOUT_S:g} s", code="timeout") from None
    except ClientDisconnect:
        raise Refused(400, "the request ended early", code="hung_up") from None
    return bytes(body).replace(session.key.encode(), KEY_REDACTED.encode())


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    # Too large or too slow: close the connection instead of reading the rest.
    headers = {"connection": "close"} if error.status in (408, 413) else None
    return JSONResponse(error.body, error.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "a session serves v1/chat/completions, v1/completions, v1/models and inference/v1/generate"
    return JSONResponse(Refused(error.status_code, message, code="not_found").body, error.status_code)


async def _internal_error(request: Request, error: Exception) -> Response:
    message = "internal error; see the worker's log"
    return JSONResponse(Refused(500, message, code="internal_error").body, 500)
