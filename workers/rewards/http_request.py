"""One request to a reward service, and nothing believed of its answer: the scores of its rows, or why there are none.

A request has one deadline for everything, an answer has a size cap, redirects are not followed and compression is not
accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Generator, Sequence
from typing import Any

import httpx

from streamrl.errors import ConfigError
from workers.rewards.base import ScoreItem
from workers.rewards.bearer import read_token
from workers.rewards.forms import Form

_CONNECT_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 4096  # beside what the form allows for each row
_MAX_REASON_CHARS = 200
_REFUSALS = (400, 413, 422)  # who says so has looked at the request, and will say so again
_NOT_NOW = (408, 429, 502, 503, 504)


class TryAgain(Exception):
    """This attempt gave no scores; another may."""

    def __init__(self, reason: str, *, reached: bool = True, answered: bool = False) -> None:
        super().__init__(reason)
        self.reached = reached or answered  # else nobody is there, or the address or the token is wrong
        self.answered = answered  # the service said something of these samples, and it was no score


class Refused(Exception):
    """There will be no score for this request; there may be some for parts of it."""


class TokenFile(httpx.Auth):
    """The bearer token in a file, read again when it is refused: tokens are put right while workers run."""

    def __init__(self, path: str, *, key: str) -> None:
        self._path, self._key = path, key
        self._token = read_token(path, key=key)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["authorization"] = f"Bearer {self._token}"
        response = yield request
        if response.status_code == 401:
            with contextlib.suppress(ConfigError):  # not there now: the service's own word says what is wrong
                self._token = read_token(self._path, key=self._key)


def make_client(
    *, timeout_s: float, max_connections: int, auth: httpx.Auth | None, transport: httpx.AsyncBaseTransport | None
) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        auth=auth,
        headers={"accept-encoding": "identity", "content-type": "application/json"},
        timeout=httpx.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s)),
        limits=httpx.Limits(max_connections=max_connections),
        follow_redirects=False,
        trust_env=False,  # no proxy and no .netrc password that the operator did not name here
        transport=transport,
    )


async def ask(
    client: httpx.AsyncClient, url: str, form: Form, items: Sequence[ScoreItem], *, timeout_s: float, max_abs: float
) -> list[float]:
    """A number an item, none beyond `max_abs`; or TryAgain, or Refused."""
    content = json.dumps(form.request(items)).encode()
    max_bytes = _MAX_ANSWER_BYTES + form.max_answer_bytes_per_row * len(items)
    try:
        # httpx bounds each read; only this bounds a server that sends a byte now and then.
        async with asyncio.timeout(timeout_s), client.stream("POST", url, content=content) as response:
            body = await _read(response, max_bytes)
    except TimeoutError:
        raise TryAgain(f"no answer within {timeout_s:g} s") from None
    except httpx.HTTPError as error:
        reached = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        raise TryAgain(f"{type(error).__name__}: {error}", reached=reached) from None
    if response.status_code == 200:
        return _read_scores(form, body, len(items), max_abs)
    reason = f"answered {response.status_code}: {_printable(body)}"
    if response.status_code in _REFUSALS:
        raise Refused(f"{url}: {reason}")
    not_now = response.status_code in _NOT_NOW
    raise TryAgain(reason, reached=not_now, answered=response.status_code >= 500 and not not_now)


async def _read(response: httpx.Response, max_bytes: int) -> bytes:
    if "content-encoding" in response.headers:  # a small body may unpack to any size
        raise TryAgain("answered compressed, which was not accepted", answered=True)
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > max_bytes:
            raise TryAgain(f"answered more than {max_bytes} bytes", answered=True)
    return bytes(body)


def _read_scores(form: Form, body: bytes, count: int, max_abs: float) -> list[float]:
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise TryAgain(f"answered no JSON: {_printable(body)}", answered=True) from None
    try:
        scores = form.numbers(answer, count)
    except ValueError as error:
        raise TryAgain(f"answered {error}: {_printable(body)}", answered=True) from None
    # NaN compares with nothing, and an integer of a thousand digits is no float.
    if any(type(score) not in (int, float) or not abs(score) <= sys.float_info.max for score in scores):
        raise TryAgain(f"answered rewards that are no finite numbers: {_printable(body)}", answered=True)
    if any(abs(score) > max_abs for score in scores):
        reason = f"answered rewards beyond the source's max_abs of {max_abs:g}: {_printable(body)}"
        raise TryAgain(reason, answered=True)
    return [float(score) for score in scores]


def _printable(body: bytes) -> str:
    text = body[:_MAX_REASON_CHARS].decode("utf-8", errors="replace")
    return "".join(character if character.isprintable() else " " for character in text)
