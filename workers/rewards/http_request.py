"""Sends one request to a reward service and validates its answer: the scores of its rows, or why there are none.

One deadline covers the whole request, the answer's size is capped, redirects are not followed and compression is not
accepted.

The supported request forms, each beside its answer:

    streamrl       POST /score       {"texts": [...]}                                   {"rewards": [...]}
    openrlhf       POST /get_reward  {"query": [...], "prompts": [...], "labels": [...]} {"rewards": [...]}
    vllm-classify  POST /classify    {"input": [...], "use_activation": false}          {"data": [{"index", "probs"}]}
    vllm-pooling   POST /pooling     {"input": [...], "use_activation": false}          {"data": [{"index", "data"}]}

A query is prompt and completion concatenated; a chat is written to its end (`rewards.chats`), and vLLM is told not to
add special tokens to it. `labels` are the rows' field `answer`, null if a row has none. vLLM is asked for the model's
raw output, before any sigmoid, which is what a reward is. From a model of token rewards, with one number per token, the
last one counts. A malformed answer is a ValueError; whether its numbers are finite is checked by the caller.

The bearer token that reward servers and clients share is kept in a file, never in a configuration, an argument or a
log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
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

_CONNECT_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 4096  # in addition to what the form allows per row
_MAX_REASON_CHARS = 200
_GONE = 410
_REFUSALS = (400, 413, 422, _GONE)  # the service has read the request; a retry would get the same answer
_RATE_LIMITED = 429
_LONGEST_REST_S = 3600.0  # cap on `retry-after`, which may have been meant in milliseconds
_BACKEND_DOWN = (502, 503, 504)
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


class Refused(Exception):
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

    def hidden(self, text: str) -> str:
        """Remove the token from a text: some services echo a token that they reject."""
        return text.replace(self._token, "[token]")


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
    return httpx.AsyncClient(
        auth=auth,
        headers={"accept-encoding": "identity", "content-type": "application/json"},
        timeout=httpx.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s)),
        limits=httpx.Limits(max_connections=max_connections),
        follow_redirects=False,
        trust_env=False,  # use no proxy and no .netrc password from the environment
        transport=transport,
    )


async def ask(
    client: httpx.AsyncClient, source: schema.HttpReward, url: str, items: Sequence[ScoreItem]
) -> list[float]:
    """Return one number per item, none beyond the source's `max_abs`. Raises TryAgain or Refused."""
    form = FORMS[source.form]
    max_bytes = _MAX_ANSWER_BYTES + form.max_answer_bytes_per_row * len(items)
    body = await post(client, url, form.request(items), timeout_s=source.timeout_s, max_bytes=max_bytes)
    return _read_scores(form, body, len(items), source.max_abs)


async def post(
    client: httpx.AsyncClient, url: str, question: Mapping[str, Any], *, timeout_s: float, max_bytes: int
) -> bytes:
    """Return the body of a 200 response. Raises TryAgain or Refused."""
    content = json.dumps(question).encode()
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
        return body
    reason = f"answered {response.status_code}: {printable(_without_token(client, body))}"
    if response.status_code in _REFUSALS:
        raise Refused(f"{url}: {reason}", gone=response.status_code == _GONE)
    if response.status_code == _RATE_LIMITED:
        raise TryAgain(reason, rest_s=_rest_s(response.headers.get("retry-after", "")))
    is_temporary, backend_down = response.status_code in _TEMPORARY, response.status_code in _BACKEND_DOWN
    raise TryAgain(
        reason,
        reached=is_temporary,
        backend_down=backend_down,
        answered=response.status_code >= 500 and not is_temporary,
    )


def _without_token(client: httpx.AsyncClient, body: bytes) -> bytes:
    return client.auth.hidden(body.decode(errors="replace")).encode() if isinstance(client.auth, Token) else body


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


def _read_scores(form: Form, body: bytes, count: int, max_abs: float) -> list[float]:
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise TryAgain(f"the answer is not JSON: {printable(body)}", answered=True) from None
    try:
        scores = form.numbers(answer, count)
    except ValueError as error:
        raise TryAgain(f"malformed answer: {error}: {printable(body)}", answered=True) from None
    # The comparison is false for NaN; an integer with a thousand digits would not fit a float.
    if any(type(score) not in (int, float) or not abs(score) <= sys.float_info.max for score in scores):
        raise TryAgain(f"answered rewards that are not finite numbers: {printable(body)}", answered=True)
    if any(abs(score) > max_abs for score in scores):
        reason = f"answered rewards beyond the source's max_abs of {max_abs:g}: {printable(body)}"
        raise TryAgain(reason, answered=True)
    return [float(score) for score in scores]


def printable(body: bytes) -> str:
    text = body[:_MAX_REASON_CHARS].decode("utf-8", errors="replace")
    return "".join(character if character.isprintable() else " " for character in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    path: str  # appended if the service's address has no path
    request: Callable[[Sequence[ScoreItem]], dict[str, Any]]
    rows: str  # the answer's key that holds one row per sample
    indexed: bool = False  # each row carries its index
    number: Callable[[Any], Any] = lambda row: row  # extracts a row's number; ValueError if it has none
    max_answer_bytes_per_row: int = 512

    def numbers(self, answer: Any, count: int) -> list[Any]:
        """Extract `count` numbers from the answer, in order. ValueError if it is malformed."""
        rows = answer.get(self.rows) if isinstance(answer, dict) else None
        if not isinstance(rows, list) or len(rows) != count:
            raise ValueError(f"no list of {count} {self.rows}")
        if self.indexed and [row.get("index") if isinstance(row, dict) else None for row in rows] != list(range(count)):
            raise ValueError(f"`{self.rows}` without the rows 0 to {count - 1} in order")
        return [self.number(row) for row in rows]


def _ask_openrlhf(items: Sequence[ScoreItem]) -> dict[str, Any]:
    return {
        "query": [item.text for item in items],
        "prompts": [item.prompt for item in items],
        "labels": [item.fields.get("answer") for item in items],
    }


def _ask_vllm(items: Sequence[ScoreItem]) -> dict[str, Any]:
    request: dict[str, Any] = {"input": [item.text for item in items], "use_activation": False}
    if items[0].is_chat:  # as all of them are: requests are of one kind
        request["add_special_tokens"] = False
    return request


def _only(row: Any) -> Any:
    """Return x from x or [x], as a [B, 1] tensor serialises."""
    if not isinstance(row, list):
        return row
    if len(row) != 1:
        raise ValueError(f"a row has {len(row)} numbers instead of one")
    return row[0]


def _last(values: Any) -> Any:
    """Return the last token's x, from [x] or a list per token of [x] or x."""
    if not isinstance(values, list) or not values:
        raise ValueError("a row has no numbers")
    return _only(values[-1])


FORMS: Mapping[str, Form] = {
    "streamrl": Form(
        path="/score",
        request=lambda items: {"texts": [item.text for item in items]},
        rows="rewards",
        max_answer_bytes_per_row=64,
    ),
    # The answer may also contain scores and values to log.
    "openrlhf": Form(path="/get_reward", request=_ask_openrlhf, rows="rewards", number=_only),
    "vllm-classify": Form(
        path="/classify", request=_ask_vllm, rows="data", indexed=True, number=lambda row: _last(row.get("probs"))
    ),
    "vllm-pooling": Form(
        path="/pooling",
        request=_ask_vllm,
        rows="data",
        indexed=True,
        number=lambda row: _last(row.get("data")),
        max_answer_bytes_per_row=1 << 18,
    ),
    # Asked test by test, by `sandbox_fusion`.
    "sandbox-fusion": Form(path="/run_code", request=lambda items: {}, rows=""),
}


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
