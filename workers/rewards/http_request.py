"""One request to a reward service, and nothing believed of its answer: the scores of its rows, or why there are none.

A request has one deadline for everything, an answer has a size cap, redirects are not followed and compression is not
accepted.

Services are asked in one of these forms, each one's request beside its answer:

    streamrl       POST /score       {"texts": [...]}                                   {"rewards": [...]}
    openrlhf       POST /get_reward  {"query": [...], "prompts": [...], "labels": [...]} {"rewards": [...]}
    vllm-classify  POST /classify    {"input": [...], "use_activation": false}          {"data": [{"index", "probs"}]}
    vllm-pooling   POST /pooling     {"input": [...], "use_activation": false}          {"data": [{"index", "data"}]}

A query is prompt and completion together. `labels` are the rows' field `answer`, null where a row has none. vLLM is
asked for the model's own number, before any sigmoid, since a reward is one. A model of token rewards answers a number a
token: the last one counts. What is no answer in the form is a ValueError; whether its numbers are finite is for the
caller.

The bearer token that reward servers and clients share lies in a file, never in a configuration, an argument or a log.
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
_MAX_ANSWER_BYTES = 4096  # beside what the form allows for each row
_MAX_REASON_CHARS = 200
_GONE = 410
_REFUSALS = (400, 413, 422, _GONE)  # who says so has looked at the request, and will say so again
_TOO_OFTEN = 429
_LONGEST_REST_S = 3600.0  # whatever it asks for: it may have meant milliseconds
_AWAY = (502, 503, 504)
_NOT_NOW = (408, *_AWAY)


class TryAgain(Exception):
    """This attempt gave no scores; another may."""

    def __init__(
        self,
        reason: str,
        *,
        reached: bool = True,
        away: bool = False,
        answered: bool = False,
        rest_s: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.reached = reached or answered  # else nobody is there, or the address or the token is wrong
        self.away = away  # so a gateway says of what is behind it, or a service of itself
        self.answered = answered  # the service said something of these samples, and it was no score
        self.rest_s = rest_s  # nothing is wrong, but it is asked too often: not before so long; 0: it did not say


class Refused(Exception):
    """There will be no score for this request; there may be some for parts of it."""

    def __init__(self, reason: str, *, gone: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone  # what it was about is there no more


class Token(httpx.Auth):
    """The bearer token, read again when it is refused: tokens are put right while workers run."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read
        self._token = read()

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["authorization"] = f"Bearer {self._token}"
        response = yield request
        if response.status_code == 401:
            with contextlib.suppress(ConfigError):  # not there now: the service's own word says what is wrong
                self._token = self._read()

    def hidden(self, text: str) -> str:
        """Some services repeat a token that they do not know."""
        return text.replace(self._token, "[token]")


def make_client(
    source: schema.HttpReward | schema.Environment | schema.Judge | schema.Teacher,
    *,
    key: str,
    timeout_s: float,
    transport: httpx.AsyncBaseTransport | None,
    max_connections: int | None = None,
) -> httpx.AsyncClient:
    """`key`: of the section in the configuration."""
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
        trust_env=False,  # no proxy and no .netrc password that the operator did not name here
        transport=transport,
    )


async def ask(
    client: httpx.AsyncClient, source: schema.HttpReward, url: str, items: Sequence[ScoreItem]
) -> list[float]:
    """A number an item, none beyond the source's `max_abs`; or TryAgain, or Refused."""
    form = FORMS[source.form]
    max_bytes = _MAX_ANSWER_BYTES + form.max_answer_bytes_per_row * len(items)
    body = await post(client, url, form.request(items), timeout_s=source.timeout_s, max_bytes=max_bytes)
    return _read_scores(form, body, len(items), source.max_abs)


async def post(
    client: httpx.AsyncClient, url: str, question: Mapping[str, Any], *, timeout_s: float, max_bytes: int
) -> bytes:
    """The body of a good answer; or TryAgain, or Refused."""
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
    if response.status_code == _TOO_OFTEN:
        raise TryAgain(reason, rest_s=_rest_s(response.headers.get("retry-after", "")))
    not_now, away = response.status_code in _NOT_NOW, response.status_code in _AWAY
    raise TryAgain(reason, reached=not_now, away=away, answered=response.status_code >= 500 and not not_now)


def _without_token(client: httpx.AsyncClient, body: bytes) -> bytes:
    return client.auth.hidden(body.decode(errors="replace")).encode() if isinstance(client.auth, Token) else body


def _rest_s(retry_after: str) -> float:
    """Seconds, or the time at which it ends; 0 for what is neither."""
    if retry_after.isdecimal():
        return min(float(retry_after), _LONGEST_REST_S)
    try:
        return min(max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time()), _LONGEST_REST_S)
    except (ValueError, OverflowError):  # the latter of a day or an hour that no calendar has
        return 0.0


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
        raise TryAgain(f"answered no JSON: {printable(body)}", answered=True) from None
    try:
        scores = form.numbers(answer, count)
    except ValueError as error:
        raise TryAgain(f"answered {error}: {printable(body)}", answered=True) from None
    # NaN compares with nothing, and an integer of a thousand digits is no float.
    if any(type(score) not in (int, float) or not abs(score) <= sys.float_info.max for score in scores):
        raise TryAgain(f"answered rewards that are no finite numbers: {printable(body)}", answered=True)
    if any(abs(score) > max_abs for score in scores):
        reason = f"answered rewards beyond the source's max_abs of {max_abs:g}: {printable(body)}"
        raise TryAgain(reason, answered=True)
    return [float(score) for score in scores]


def printable(body: bytes) -> str:
    text = body[:_MAX_REASON_CHARS].decode("utf-8", errors="replace")
    return "".join(character if character.isprintable() else " " for character in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    path: str  # where requests go when the service's address names no path
    request: Callable[[Sequence[ScoreItem]], dict[str, Any]]
    rows: str  # the key under which an answer has its rows, one a sample
    indexed: bool = False  # each row says which it is
    number: Callable[[Any], Any] = lambda row: row  # what a row says; ValueError when it says none
    max_answer_bytes_per_row: int = 512

    def numbers(self, answer: Any, count: int) -> list[Any]:
        """What the answer holds for each of `count` rows, in their order; ValueError when it is none."""
        rows = answer.get(self.rows) if isinstance(answer, dict) else None
        if not isinstance(rows, list) or len(rows) != count:
            raise ValueError(f"no list of {count} {self.rows}")
        if self.indexed and [row.get("index") if isinstance(row, dict) else None for row in rows] != list(range(count)):
            raise ValueError(f"`{self.rows}` does not hold the rows 0 to {count - 1} in their order")
        return [self.number(row) for row in rows]


def _texts(items: Sequence[ScoreItem]) -> list[str]:
    return [item.prompt + item.completion for item in items]


def _ask_openrlhf(items: Sequence[ScoreItem]) -> dict[str, Any]:
    return {
        "query": _texts(items),
        "prompts": [item.prompt for item in items],
        "labels": [item.fields.get("answer") for item in items],
    }


def _ask_vllm(items: Sequence[ScoreItem]) -> dict[str, Any]:
    return {"input": _texts(items), "use_activation": False}


def _only(row: Any) -> Any:
    """x, or [x], as a tensor of [B, 1] prints."""
    if not isinstance(row, list):
        return row
    if len(row) != 1:
        raise ValueError(f"a row has {len(row)} numbers; a reward is one")
    return row[0]


def _last(values: Any) -> Any:
    """[x], or a list a token of [x] or of x: the last token's x."""
    if not isinstance(values, list) or not values:
        raise ValueError("a row has no numbers")
    return _only(values[-1])


FORMS: Mapping[str, Form] = {
    "streamrl": Form(
        path="/score",
        request=lambda items: {"texts": _texts(items)},
        rows="rewards",
        max_answer_bytes_per_row=64,
    ),
    # Beside the rewards an answer may tell scores and what to log.
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
    """The file's one line. Strict, since the path may come from Redis: it must not send just any file away."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{key}: cannot read the token file {path!r}: {error.strerror}") from None
    return _checked(content.strip().decode("ascii", errors="replace"), f"{key}: {path!r}")


def token_in(variable: str, *, key: str) -> str:
    """Of this process's environment."""
    if variable not in os.environ:
        raise ConfigError(f"{key}: there is no variable {variable} in this worker's environment; it holds the token")
    return _checked(os.environ[variable].strip(), f"{key}: {variable}")


def _checked(token: str, place: str) -> str:
    if not token or len(token) > _MAX_TOKEN_BYTES or not all("!" <= character <= "~" for character in token):
        raise ConfigError(f"{place} must hold one token of visible ASCII characters and nothing else")
    return token
