"""What services for workers (reward models, environments) ask of a request, and their JSON answers to errors.

Importing this requires starlette.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

MAX_BODY_BYTES = 8 << 20
BODY_TIMEOUT_S = 30.0


def check_caller(request: Request, token: str | None) -> None:
    if "origin" in request.headers:  # added by browsers, for whichever page is open on this machine
        raise HTTPException(403, "requests from browser pages are refused")
    if token is None:
        return
    authorization = request.headers.get("authorization", "").encode()
    if not hmac.compare_digest(authorization, f"Bearer {token}".encode()):
        raise HTTPException(401, "missing or wrong bearer token", {"www-authenticate": "Bearer"})


async def read_body(request: Request, *, remedy: str) -> bytes:
    """`remedy`: what a caller should do whose body is too long."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body exceeds {MAX_BODY_BYTES} bytes: {remedy}")
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body ended early") from None
    return bytes(body)


def http_error(paths: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return the handler of HTTP errors; `paths` tells a caller with a wrong path which there are."""

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reason = f"no such path: {request.scope['path']}; {paths}" if error.status_code == 404 else error.detail
        return JSONResponse({"error": reason}, error.status_code, error.headers)

    return answer


async def internal_error(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "internal error; see the server's log"}, 500)
