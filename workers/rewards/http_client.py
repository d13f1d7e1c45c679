"""Rewards from a service over HTTP: what comes in the same turn of the loop shares a request; answers are distrusted.

    score ──► waiting ──► at most `max_concurrency` requests ──► one number a sample, or RewardError
                              │
                              ├─ no connection, too late, 5xx, nonsense: again, elsewhere if there are replicas
                              ├─ 401, 403, 404: so too; of address and token, unless others get their scores there
                              └─ no replica is well: an outage; wait for one, which costs no attempt, up to `outage_s`;
                                 then RewardOutage

A request that is refused (400, 413, 422), or had its attempts, is sent again row by row: one bad sample fails alone.
Whether a replica that is out is well again, a row that was scored before finds out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import httpx

from streamrl.config import schema
from streamrl.config.places import LOCAL_REWARD_SERVER
from streamrl.errors import ConfigError, RewardError, RewardOutage
from streamrl.permissions import Permissions
from streamrl.workers.rewards.base import Health, ScoreItem
from streamrl.workers.rewards.http_request import FORMS, Form, Refused, TryAgain, ask, make_client
from streamrl.workers.rewards.replicas import Replica, Replicas
from streamrl.workers.rewards.sandbox_fusion import ask_programs

MAX_ROWS = 64  # a request
FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0  # between attempts


def build_http_reward(
    name: str,
    source: schema.HttpReward,
    permissions: Permissions,
    local_reward_url: str | None,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    first_pause_s: float = FIRST_PAUSE_S,
) -> HttpReward:
    """Checks the addresses and this worker's permission for their hosts; connects to nothing yet."""
    key, form = f"rewards.{name}", FORMS[source.form]
    client = make_client(source, key=key, transport=transport, max_connections=source.max_concurrency)
    urls = [_address(f"{key}.url", url, form, permissions, local_reward_url) for url in source.urls]
    return HttpReward(source, urls, client, first_pause_s=first_pause_s)


def _address(key: str, url: str, form: Form, permissions: Permissions, local_reward_url: str | None) -> str:
    if url == LOCAL_REWARD_SERVER:
        if local_reward_url is None:
            raise ConfigError(
                f"{key}: `local` needs the address of the reward server: start this with --local-reward-url URL; "
                "`streamrl up` gives it to its own workers"
            )
        url = local_reward_url  # named on this worker's command line, so it needs no other permission
    else:
        check_host(key, url, permissions)
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + form.path


def check_host(key: str, url: str, permissions: Permissions) -> None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = SplitResult("", "", "", "", ""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username is not None:
        raise ConfigError(f"{key}: {url!r} is no address of a service: http://host:port is expected")
    allowed = {host.lower() for host in permissions.hosts}
    if not allowed & {parts.hostname, f"{parts.hostname}:{port}"}:
        raise ConfigError(
            f"{key}: this worker may not send samples to {parts.hostname!r}; "
            f"start it with --allow-host {parts.hostname} if it may"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    item: ScoreItem
    score: asyncio.Future[float]


class HttpReward:
    """One service, of one or several replicas."""

    def __init__(
        self, source: schema.HttpReward, urls: Sequence[str], client: httpx.AsyncClient, *, first_pause_s: float
    ) -> None:
        self._source = source
        self._replicas = Replicas(urls, first_pause_s=first_pause_s)
        self._client = client
        runs_programs = source.form == "sandbox-fusion"
        self._ask, self._max_rows = (ask_programs, 1) if runs_programs else (ask, MAX_ROWS)
        self._first_pause_s = first_pause_s
        self._scored: ScoreItem | None = None  # the latest
        self._waiting: list[_Waiting] = []
        self._requests: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Nothing to show: a server that is not there yet is an outage, not a mistake."""

    def health(self) -> Health:
        # While nobody asks, nobody finds out that a service is back; so who may be tried is not out.
        return Health(outage=self._replicas.outage, state=self._replicas.state)

    async def score(self, item: ScoreItem) -> float:
        loop = asyncio.get_running_loop()
        entry = _Waiting(item=item, score=loop.create_future())
        self._waiting.append(entry)
        if len(self._waiting) == 1:
            loop.call_soon(self._send_waiting)
        return await entry.score

    async def close(self) -> None:
        _fail(self._waiting, RewardError("the request was given up"))
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        await self._client.aclose()

    def _send_waiting(self) -> None:
        while self._waiting and len(self._requests) < self._source.max_concurrency:
            batch, self._waiting = self._waiting[: self._max_rows], self._waiting[self._max_rows :]
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
            await self._score(batch)
        except RewardOutage as error:
            _fail(batch, error)
        finally:
            _fail(batch, RewardError("the request was given up"))  # whatever happens, nobody waits for ever

    async def _score(self, batch: list[_Waiting]) -> None:
        batch = [entry for entry in batch if not entry.score.done()]  # done: nobody waits for it any more
        if not batch:
            return
        try:
            scores = await self._ask_patiently([entry.item for entry in batch])
        except Refused as refusal:
            if len(batch) == 1:
                _fail(batch, RewardError(str(refusal)))
            else:
                for entry in batch:
                    await self._score([entry])
        else:
            for entry, score in zip(batch, scores, strict=True):
                if not entry.score.done():
                    entry.score.set_result(score)

    async def _ask_patiently(self, items: list[ScoreItem]) -> list[float]:
        """Refused: these samples had their attempts. RewardOutage: there was none for them, nor for others."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._source.outage_s
        last: Replica | None = None
        attempts = tries = 0
        answered: dict[Replica, int] = {}  # what each had answered when it last failed us
        while attempts < self._source.attempts:
            await self._pause(tries, attempts)
            replica = await self._replicas.one(but=last, until=until)
            if replica is None:
                waited = f"no replica gave a score for {self._source.outage_s:g} s"
                raise RewardOutage(f"{waited}: {self._replicas.last_errors}")
            on_trial, before = replica.on_trial, answered.setdefault(replica, replica.num_answered)
            rows = self._trial_rows(replica, items) if on_trial else items
            try:
                with self._replicas.asking(replica):
                    scores = await self._ask(self._client, self._source, replica.url, rows)
                self._scored = rows[0]
                if rows is items:
                    return scores
            except TryAgain as error:
                last, reason = replica, f"{replica.url}: {error}"
                tries += 1
                answered[replica] = replica.num_answered
                # That nobody is there, or lets us in, or that an outage goes on, says nothing about these samples,
                # unless others get their scores there, or nothing was ever scored that could tell.
                about_them = error.answered and self._scored is None if on_trial else error.reached
                if about_them or replica.num_answered > before:
                    attempts += 1
                    until = loop.time() + self._source.outage_s
            except Refused:
                if rows is items:
                    raise
        raise Refused(f"{reason} ({attempts} attempts)")

    def _trial_rows(self, replica: Replica, items: list[ScoreItem]) -> list[ScoreItem]:
        """What was scored before tells an outage from samples that cannot be scored; in turn with one of these, lest
        all depend on it for ever."""
        if self._scored is not None and replica.trials_failed % 2 == 0:
            return [self._scored]
        return items if len(items) == 1 else [random.choice(items)]

    async def _pause(self, tries: int, attempts: int) -> None:
        """Where some are well and each has been asked, time may help; one that is out is waited for anyway."""
        count = len(self._replicas)
        if tries and tries % count == 0 and self._replicas.num_well:
            pause_s = min(_LONGEST_PAUSE_S, self._first_pause_s * 2 ** min(max(0, attempts // count - 1), 10))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))


def _fail(batch: list[_Waiting], error: RewardError) -> None:
    for entry in batch:
        if not entry.score.done():
            entry.score.set_exception(type(error)(str(error)))  # its own: each gets another traceback
