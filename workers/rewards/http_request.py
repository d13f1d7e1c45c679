"""Sends one request to a reward service and validates its answer: the scores of its rows, or why there are none.

One deadline covers the whole request, the answer's size is capped, redirects are not followed and compression is not
accepted. An error's status counts whatever its page looks like.

The bearer token that reward servers and clients share is kept in a file, never in a configuration, an argument or a
log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from streamrl.config import schema
from streamrl.errors import ConfigError
from streamrl.workers.rewards.base import ScoreItem
from streamrl.workers.rewards.forms import FORMS, Form

_CONNECT_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 4096  # in addition to what the form allows per row
_MAX_REASON_CHARS = 200
_PAGE_S = 1.0  # for the rest of an error's page
_MAX_PAGE_BYTES = 1 << 16  # read of an error's page; far more than is shown, so that no token is cut in half
_GONE = 410
_REFUSALS = (400, 413, 422, _GONE)  # the service has read the request; a retry would get the same answer
_RATE_LIMITED = 429
_LONGEST_REST_S = 3600.0  # cap on `retry-after`, which may have been meant in milliseconds
_BACKEND_DOWN = (502, 503, 504, *range(520, 528), 529, 530)  # the latter are Cloudflare's; 529: overloaded
_TEMPORARY = (408, *_BACKEND_DOWN)


class TryAgain(Exception):
    """This attempt gave no scores; another may."""

    def __init__(
        self,
        reason: str,
        *,
        reached: bool = True,
        backend_down: bool = False,
        answered: bool = False,
        rest_s: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.reached = reached or answered  # False: unreachable, or the address or the token is wrong
        self.backend_down = backend_down  # a gateway reports its backend as down, or a service itself
        self.answered = answered  # the service answered about these samples, but gave no score
        self.rest_s = rest_s  # rate-limited: do not ask before so long; 0: it did not say how long


class RequestRefused(Exception):
    """There will be no score for this request, but maybe for parts of it."""

    def __init__(self, reason: str, *, gone: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone  # what the request referred to no longer exists


class Token(httpx.Auth):
    """The bearer token; read again after a 401, since tokens may be corrected while workers run."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read
        self._token = read()

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["authorization"] = f"Bearer {self._token}"
        response = yield request
        if response.status_code == 401:
            with contextlib.suppress(ConfigError):  # unreadable now: report the service's refusal instead
                self._token = self._read()


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What a service answered. It may contain the token: some services echo what they were sent."""

    content: bytes
    token: str  # sent with the request; empty: none

    def shown(self, part: str | None = None) -> str:
        """Return the beginning of it, or of a part of it, for an error: printable, and without the token."""
        text = self.content.decode(errors="replace") if part is None else part
        text = text.replace(self.token, "[token]") if self.token else text
        return "".join(character if character.isprintable() else " " for character in text[:_MAX_REASON_CHARS])


def make_client(
    source: schema.HttpReward | schema.Environment | schema.Judge | schema.Teacher,
    *,
    key: str,
    timeout_s: float,
    transport: httpx.AsyncBaseTransport | None,
    max_connections: int | None = None,
) -> httpx.AsyncClient:
    """Build the client. `key` is the configuration section, for error messages."""
    auth = None
    if source.token_file is not None:
        auth = Token(partial(read_token, source.token_file, key=f"{key}.token_file"))
    elif isinstance(source, schema.Judge) and source.token_env is not None:
        auth = Token(partial(token_in, source.token_env, key=f"{key}.token_env"))
    limits = httpx.Limits(max_connections=max_connections)
    return httpx.AsyncClient(
        auth=auth,
        headers={"accept-encoding": "identity", "content-type": "application/json"},
        timeout=httpx.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s)),
        follow_redirects=False,
        trust_env=False,  # use no proxy and no .netrc password from the environment
        transport=transport or httpx.AsyncHTTPTransport(verify=_trusted(), limits=limits),
    )


def _trusted() -> ssl.SSLContext:
    """Trust the public authorities, the machine's, and those of SSL_CERT_FILE and SSL_CERT_DIR."""
    context = httpx.create_ssl_context(trust_env=False)
    context.load_default_certs()
    return context


async def ask(
    client: httpx.AsyncClient, source: schema.HttpReward, url: str, items: Sequence[ScoreItem]
) -> list[float]:
    """Return one number per item, none beyond the source's `max_abs`. Raises TryAgain or RequestRefused."""
    form = FORMS[source.form]
    max_bytes = _MAX_ANSWER_BYTES + sum(map(form.max_answer_bytes, items))
    body = await post(client, url, form.request(items), timeout_s=source.timeout_s, max_bytes=max_bytes)
    return _read_scores(form, body, len(items), source.max_abs)


async def post(
    client: httpx.AsyncClient, url: str, question: Mapping[str, Any], *, timeout_s: float, max_bytes: int
) -> Body:
    """Return the body of a 200 response. Raises TryAgain or RequestRefused."""
    content = json.dumps(question).encode()
    try:
        # httpx bounds each read; only this bounds a server that sends a byte now and then.
        async with asyncio.timeout(timeout_s), client.stream("POST", url, content=content) as response:
            content = await (_read(response, max_bytes) if response.status_code == 200 else _read_page(response))
    except TimeoutError:
        raise TryAgain(f"no answer within {timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reached = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.InvalidURL)
        raise TryAgain(f"{type(error).__name__}: {error}", reached=reached) from None
    # Not the token of the file, which may have been replaced since.
    body = Body(content=content, token=response.request.headers.get("authorization", "").removeprefix("Bearer "))
    if response.status_code == 200:
        return body
    reason = f"answered {response.status_code}: {body.shown()}"
    if response.status_code in _REFUSALS:
        raise RequestRefused(f"{url}: {reason}", gone=response.status_code == _GONE)
    if response.status_code == _RATE_LIMITED:
        raise TryAgain(reason, rest_s=_rest_s(response.headers.get("retry-after", "")))
    is_temporary, backend_down = response.status_code in _TEMPORARY, response.status_code in _BACKEND_DOWN
    raise TryAgain(
        reason,
        reached=is_temporary,
        backend_down=backend_down,
        answered=response.status_code >= 500 and not is_temporary,
    )


def _rest_s(retry_after: str) -> float:
    """Parse `retry-after`, seconds or a date, into seconds; 0 if it is neither."""
    if retry_after.isdecimal():
        return min(float(retry_after), _LONGEST_REST_S)
    try:
        return min(max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time()), _LONGEST_REST_S)
    except (ValueError, OverflowError):  # OverflowError: a date out of range
        return 0.0


async def _read(response: httpx.Response, max_bytes: int) -> bytes:
    if "content-encoding" in response.headers:  # a small compressed body may expand to any size
        raise TryAgain("answered with a compressed body, which the request did not accept", answered=True)
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > max_bytes:
            raise TryAgain(f"answered more than {max_bytes} bytes", answered=True)
    return bytes(body)


async def _read_page(response: httpx.Response) -> bytes:
    """Read the beginning of an error's page. Whatever its size and coding, also if it ends early, the status counts."""
    if "content-encoding" in response.headers:
        return b"a compressed body"
    page = bytearray()
    with contextlib.suppress(httpx.HTTPError, TimeoutError):
        async with asyncio.timeout(_PAGE_S):
            async for part in response.aiter_bytes():
                page += part
                if len(page) > _MAX_PAGE_BYTES:
                    break
    return bytes(page)


def _read_scores(form: Form, body: Body, count: int, max_abs: float) -> list[float]:
    try:
        answer: Any = json.loads(body.content)
    except (ValueError, RecursionError):
        raise TryAgain(f"the answer is not JSON: {body.shown()}", answered=True) from None
    try:
        scores = form.numbers(answer, count)
    except ValueError as error:
        raise TryAgain(f"malformed answer: {error}: {body.shown()}", answered=True) from None
    # The comparison is false for NaN; an integer with a thousand digits would not fit a float.
    if any(type(score) not in (int, float) or not abs(score) <= sys.float_info.max for score in scores):
        raise TryAgain(f"answered rewards that are not finite numbers: {body.shown()}", answered=True)
    if any(abs(score) > max_abs for score in scores):
        reason = f"answered rewards beyond the source's max_abs of {max_abs:g}: {body.shown()}"
        raise TryAgain(reason, answered=True)
    return [float(score) for score in scores]


_MAX_TOKEN_BYTES = 4096


def read_token(path: str, *, key: str) -> str:
    """Read the file's single line. Strict, since the path may come from Redis: no other file must be sent out."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{key}: cannot read the token file {path!r}: {error.strerror}") from None
    return _checked(content.strip().decode("ascii", errors="replace"), f"{key}: {path!r}")


def token_in(variable: str, *, key: str) -> str:
    """Read the token from this process's environment."""
    if variable not in os.environ:
        raise ConfigError(f"{key}: {variable} is not set in this worker's environment; it must hold the token")
    return _checked(os.environ[variable].strip(), f"{key}: {variable}")


def _checked(token: str, place: str) -> str:
    if not token or len(token) > _MAX_TOKEN_BYTES or not all("!" <= character <= "~" for character in token):
        raise ConfigError(f"{place} must hold one token of visible ASCII characters and nothing else")
    return token
