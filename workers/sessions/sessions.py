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
from streamrl.workers.sessions.openai_asked import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Refused,
    read_request,
)
from streamrl.workers.sessions.session import KEY_REDACTED, Model, Session, is_over

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
        reached = "127.0.0.1" if host in _ANYWHERE else None
        self.address = (reached or bound.getsockname()[0], bound.getsockname()[1])
        self._origin = f"http://{address_of(bound, host=reached)}"
        async with serving(self.asgi(), bound):
            yield

    @contextlib.asynccontextmanager
    async def opened(self, engine: Engine, request: SampleRequest) -> AsyncIterator[Session]:
        session = Session(self.model, engine, request)
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
        places = ("/sessions/{id}", "/sessions/{id}/key/{key}")
        return Starlette(
            routes=[
                *(Route(at + path, self._post(do), methods=["POST"]) for at in places for path, do in routes),
                *(Route(f"{at}/v1/models", self._models) for at in places),
            ],
            exception_handlers={Refused: _refuse, HTTPException: _explain, Exception: _apologise},
        )

    def _post(self, do: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            session = self._let_in(request)
            with session.heard():
                body = await _read_body(request, session)
                # An agent that gave up retries: an abandoned request must not become part of its rollout.
                return await run_beside(do(session, body), {"hang-up": _wait_for_hang_up(request)})

        return endpoint

    def _let_in(self, request: Request) -> Session:
        session = self._open.get(request.path_params["id"])
        if session is None:
            raise is_over()
        given = [request.headers.get("authorization", "").removeprefix("Bearer ")]
        given.append(request.headers.get("x-api-key", ""))  # for clients that cannot set a bearer token
        if self.model.settings.key_in_url:
            given.append(request.path_params.get("key", ""))
        if not any(map(session.opens_with, given)):
            raise Refused(401, "this is not the API key of this rollout's session", code="invalid_api_key")
        return session

    async def _models(self, request: Request) -> Response:
        model = self._let_in(request).model
        one = {"id": model.name, "object": "model", "created": 0, "owned_by": "streamrl"}
        return JSONResponse({"object": "list", "data": [{**one, "max_model_len": model.max_length}]})

    async def _chat(self, session: Session, body: bytes) -> Response:
        asked, ignored = read_request(ChatRequest, body)
        turn = await session.chat(asked)
        if asked.stream:
            return _stream(answers.chat_chunks(turn, asked), ignored)
        return _whole(answers.chat(turn, asked), ignored)

    async def _complete(self, session: Session, body: bytes) -> Response:
        asked, ignored = read_request(CompletionRequest, body)
        turn = await session.complete(asked)
        if asked.stream:
            return _stream(answers.completion_chunks(turn, asked), ignored)
        return _whole(answers.completion(turn, asked), ignored)

    async def _generate(self, session: Session, body: bytes) -> Response:
        asked, ignored = read_request(GenerateRequest, body)
        return _whole(answers.generate(await session.generate(asked)), ignored)


def _whole(body: answers.Body, ignored: tuple[str, ...]) -> Response:
    return JSONResponse(body, headers=_told(ignored))


def _stream(chunks: Iterator[answers.Body], ignored: tuple[str, ...]) -> Response:
    lines = [*(json.dumps(chunk) for chunk in chunks), "[DONE]"]
    return StreamingResponse(iter([f"data: {line}\n\n" for line in lines]), headers=_told(ignored), media_type=_EVENTS)


_EVENTS = "text/event-stream"


def _told(ignored: tuple[str, ...]) -> dict[str, str]:
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
                    raise Refused(413, f"a request may have {MAX_BODY_BYTES} bytes", code="request_too_large")
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


async def _explain(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "a session has v1/chat/completions, v1/completions, v1/models and inference/v1/generate"
    return JSONResponse(Refused(error.status_code, message, code="not_found").body, error.status_code)


async def _apologise(request: Request, error: Exception) -> Response:
    message = "internal error; the worker's log has it"
    return JSONResponse(Refused(500, message, code="internal_error").body, 500)
