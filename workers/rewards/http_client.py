"""Rewards from a reward server: what comes in the same turn of the loop shares a request, and answers are distrusted.

    score ──► waiting ──► at most `max_concurrency` requests ──► one number a sample, or RewardError
                              └─ no connection, too late, 5xx, nonsense: again, after a growing pause with jitter

A request has one deadline for everything, an answer has a size cap, redirects are not followed and compression is not
accepted. A request that the server refuses (4xx) is sent again row by row, so that one bad sample fails alone.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

from streamrl.config import schema
from streamrl.errors import ConfigError, RewardError
from workers.permissions import Permissions
from workers.rewards.base import ScoreItem
from workers.rewards.bearer import read_token

LOCAL = "local"  # the url that means: the server which the launcher runs on this machine
MAX_ROWS = 64  # a request
_CONNECT_TIMEOUT_S = 5.0
FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0  # between attempts
_MAX_ANSWER_BYTES, _MAX_ANSWER_BYTES_PER_ROW = 4096, 64
_MAX_REASON_CHARS = 200


def build_http_reward(
    name: str,
    source: schema.HttpReward,
    permissions: Permissions,
    local_reward_url: str | None,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    first_pause_s: float = FIRST_PAUSE_S,
) -> HttpReward:
    """Checks the address and this worker's permission for its host; connects to nothing yet."""
    key = f"rewards.{name}"
    if source.url == LOCAL:
        if local_reward_url is None:
            raise ConfigError(f"{key}.url: `local` needs a reward server on this machine: set reward_server.model")
        url = local_reward_url  # named on this worker's command line, so it needs no other permission
    else:
        url = source.url
        _check_host(f"{key}.url", url, permissions)
    headers = {"accept-encoding": "identity", "content-type": "application/json"}
    if source.token_file is not None:
        headers["authorization"] = f"Bearer {read_token(source.token_file, key=f'{key}.token_file')}"
    client = httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(source.timeout_s, connect=min(_CONNECT_TIMEOUT_S, source.timeout_s)),
        limits=httpx.Limits(max_connections=source.max_concurrency),
        follow_redirects=False,
        trust_env=False,  # no proxy and no .netrc password that the operator did not name here
        transport=transport,
    )
    return HttpReward(source, url=url.rstrip("/") + "/score", client=client, first_pause_s=first_pause_s)


def _check_host(key: str, url: str, permissions: Permissions) -> None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = SplitResult("", "", "", "", ""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username is not None:
        raise ConfigError(f"{key}: {url!r} is no address of a reward server: http://host:port or `local` is expected")
    allowed = {host.lower() for host in permissions.hosts}
    if not allowed & {parts.hostname, f"{parts.hostname}:{port}"}:
        raise ConfigError(
            f"{key}: this worker may not send samples to {parts.hostname!r}; "
            f"start it with --allow-host {parts.hostname} if it may"
        )


class _TryAgain(Exception):
    """This attempt gave no scores; another may."""


class _Refused(Exception):
    """The server will never score this request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    text: str
    score: asyncio.Future[float]


class HttpReward:
    """One reward server."""

    def __init__(self, source: schema.HttpReward, *, url: str, client: httpx.AsyncClient, first_pause_s: float) -> None:
        self._source = source
        self._url = url
        self._client = client
        self._first_pause_s = first_pause_s
        self._waiting: list[_Waiting] = []
        self._requests: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Nothing to show: a server that is not there yet is an outage, not a mistake."""

    async def score(self, item: ScoreItem) -> float:
        loop = asyncio.get_running_loop()
        entry = _Waiting(text=item.prompt + item.completion, score=loop.create_future())
        self._waiting.append(entry)
        if len(self._waiting) == 1:
            loop.call_soon(self._send_waiting)
        return await entry.score

    async def close(self) -> None:
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        await self._client.aclose()

    def _send_waiting(self) -> None:
        while self._waiting and len(self._requests) < self._source.max_concurrency:
            batch, self._waiting = self._waiting[:MAX_ROWS], self._waiting[MAX_ROWS:]
            request = asyncio.create_task(self._settle(batch), name=f"reward request of {len(batch)}")
            self._requests.add(request)
            request.add_done_callback(self._on_request_done)

    def _on_request_done(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        if not request.cancelled():
            self._send_waiting()

    async def _settle(self, batch: list[_Waiting]) -> None:
        """Give every entry its score or its error."""
        try:
            scores = await self._ask_patiently([entry.text for entry in batch])
            for entry, score in zip(batch, scores, strict=True):
                if not entry.score.done():
                    entry.score.set_result(score)
        except _Refused as refusal:
            if len(batch) == 1:
                _fail(batch, str(refusal))
            else:
                for entry in batch:
                    await self._settle([entry])
        except RewardError as error:
            _fail(batch, str(error))
        finally:
            _fail(batch, "the request was given up")  # whatever happens, nobody waits for ever

    async def _ask_patiently(self, texts: list[str]) -> list[float]:
        reason = ""
        for attempt in range(self._source.attempts):
            if attempt:
                pause_s = min(_LONGEST_PAUSE_S, self._first_pause_s * 2 ** (attempt - 1))
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            try:
                return await self._ask(texts)
            except _TryAgain as error:
                reason = str(error)
        raise RewardError(f"{self._url}: {reason} ({self._source.attempts} attempts)")

    async def _ask(self, texts: list[str]) -> list[float]:
        content = json.dumps({"texts": texts}).encode()
        max_bytes = _MAX_ANSWER_BYTES + _MAX_ANSWER_BYTES_PER_ROW * len(texts)
        try:
            # httpx bounds each read; only this bounds a server that sends a byte now and then.
            async with (
                asyncio.timeout(self._source.timeout_s),
                self._client.stream("POST", self._url, content=content) as response,
            ):
                body = await _read(response, max_bytes)
        except TimeoutError:
            raise _TryAgain(f"no answer within {self._source.timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from None
        if response.status_code == 200:
            return _read_scores(body, len(texts))
        reason = f"answered {response.status_code}: {_printable(body)}"
        if response.status_code >= 500 or response.status_code in (408, 429):
            raise _TryAgain(reason)
        raise _Refused(f"{self._url}: {reason}")


def _fail(batch: list[_Waiting], reason: str) -> None:
    for entry in batch:
        if not entry.score.done():
            entry.score.set_exception(RewardError(reason))


async def _read(response: httpx.Response, max_bytes: int) -> bytes:
    if "content-encoding" in response.headers:  # a small body may unpack to any size
        raise _TryAgain("answered compressed, which was not accepted")
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > max_bytes:
            raise _TryAgain(f"answered more than {max_bytes} bytes")
    return bytes(body)


def _read_scores(body: bytes, count: int) -> list[float]:
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise _TryAgain(f"answered no JSON: {_printable(body)}") from None
    scores = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != count:
        raise _TryAgain(f"answered no list of {count} rewards: {_printable(body)}")
    if any(type(score) not in (int, float) or not math.isfinite(score) for score in scores):
        raise _TryAgain(f"answered rewards that are no finite numbers: {_printable(body)}")
    return [float(score) for score in scores]


def _printable(body: bytes) -> str:
    text = body[:_MAX_REASON_CHARS].decode("utf-8", errors="replace")
    return "".join(character if character.isprintable() else " " for character in text)
