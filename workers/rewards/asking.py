"""Client of a row-by-row service, with retries: rows asked in the same turn of the event loop share a request.

    ask ──► waiting ──► at most `max_concurrency` requests ──► the result of each row, or RewardError
                              │
                              ├─ no connection, timeout, 5xx, malformed: retry, on another replica if there is one
                              ├─ 401, 403, 404: retry too; blamed on address and token, unless others get answers there
                              ├─ 429: retry after the rest that the replica asks for; costs no attempt
                              └─ no healthy replica: an outage; wait for one up to `outage_s`, which costs no attempt;
                                 then RewardOutage

A request that is refused (400, 413, 422) or has used up its attempts is repeated row by row, so that a bad row fails
alone. To find out whether a replica has recovered, it is sent a row that was answered before.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import structlog

from streamrl.errors import RewardError, RewardOutage, UserError
from streamrl.workers.rewards.base import SourceHealth
from streamrl.workers.rewards.http_request import RequestRefused, TryAgain
from streamrl.workers.rewards.replicas import Replica, Replicas

log = structlog.get_logger(__name__)
FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0  # between attempts
Row = TypeVar("Row")
Result = TypeVar("Result")


class RetrySettings(Protocol):
    """The settings of a source that bound its retries."""

    @property
    def attempts(self) -> int: ...
    @property
    def outage_s(self) -> float: ...
    @property
    def max_concurrency(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting(Generic[Row, Result]):
    row: Row
    result: asyncio.Future[Result]


class Service(Generic[Row, Result]):
    """One service with one or more replicas."""

    def __init__(
        self,
        urls: Sequence[str],
        request: Callable[[str, Sequence[Row]], Awaitable[list[Result]]],  # a result a row; TryAgain, RequestRefused
        patience: RetrySettings,
        *,
        max_rows: int,  # per request
        kind: Callable[[Row], object] = lambda row: None,  # a request has rows of one kind
        per_s: float | None = None,  # the most requests per second
        first_pause_s: float,
    ) -> None:
        self._request, self._patience, self._max_rows, self._kind = request, patience, max_rows, kind
        self._replicas = Replicas(urls, per_s=per_s, first_pause_s=first_pause_s)
        self._first_pause_s = first_pause_s
        self._answered: list[Row] = []  # the row answered last; empty at first
        self._waiting: list[_Waiting[Row, Result]] = []
        self._requests: set[asyncio.Task[None]] = set()

    def health(self) -> SourceHealth:
        # A replica that is due for a trial does not count as out: without requests nobody would notice its recovery.
        return SourceHealth(outage=self._replicas.outage, state=self._replicas.state)

    async def ask(self, row: Row) -> Result:
        loop = asyncio.get_running_loop()
        entry: _Waiting[Row, Result] = _Waiting(row=row, result=loop.create_future())
        self._waiting.append(entry)
        if len(self._waiting) == 1:
            loop.call_soon(self._send_waiting)
        return await entry.result

    async def close(self) -> None:
        _fail(self._waiting, RewardError("the request was cancelled"))
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    def _send_waiting(self) -> None:
        while self._waiting and len(self._requests) < self._patience.max_concurrency:
            kinds = [self._kind(entry.row) for entry in self._waiting]
            alike = [entry for entry, kind in zip(self._waiting, kinds, strict=True) if kind == kinds[0]]
            others = [entry for entry, kind in zip(self._waiting, kinds, strict=True) if kind != kinds[0]]
            batch, self._waiting = alike[: self._max_rows], [*others, *alike[self._max_rows :]]
            request = asyncio.create_task(self._settle(batch), name=f"reward request of {len(batch)}")
            self._requests.add(request)
            request.add_done_callback(self._on_request_done)

    def _on_request_done(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        if not request.cancelled():
            self._send_waiting()

    async def _settle(self, batch: list[_Waiting[Row, Result]]) -> None:
        """Give every entry its result or its error."""
        try:
            await self._answer(batch)
        except (RewardOutage, UserError) as error:
            _fail(batch, error)
        except Exception as error:  # a bug costs these samples, and says so
            log.exception("reward_request_failed")
            _fail(batch, RewardError(f"{type(error).__name__}: {error}"))
        finally:
            _fail(batch, RewardError("the request was cancelled"))  # so that no entry waits for ever

    async def _answer(self, batch: list[_Waiting[Row, Result]]) -> None:
        batch = [entry for entry in batch if not entry.result.done()]  # done: its caller has gone
        if not batch:
            return
        try:
            results = await self._ask_patiently([entry.row for entry in batch])
        except RequestRefused as refusal:
            if len(batch) == 1:
                _fail(batch, RewardError(str(refusal)))
            else:
                for entry in batch:
                    await self._answer([entry])
        else:
            for entry, result in zip(batch, results, strict=True):
                if not entry.result.done():
                    entry.result.set_result(result)

    async def _ask_patiently(self, rows: list[Row]) -> list[Result]:
        """Ask with retries. RequestRefused: the rows used up their attempts. RewardOutage: no replica was available."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience.outage_s
        last: Replica | None = None
        attempts = tries = 0
        answered: dict[Replica, int] = {}  # each replica's `num_answered` when it last failed us
        while attempts < self._patience.attempts:
            await self._pause(tries, attempts)
            replica = await self._replicas.acquire(avoid=last, until=until)
            if replica is None:
                waited = f"no replica answered for {self._patience.outage_s:g} s"
                raise RewardOutage(f"{waited}: {self._replicas.last_errors}")
            on_trial, num_answered = replica.on_trial, answered.setdefault(replica, replica.num_answered)
            sent = self._trial_rows(replica, rows) if on_trial else rows
            try:
                with self._replicas.asking(replica):
                    results = await self._request(replica.url, sent)
                self._answered = [sent[0]]
                if sent is rows:
                    return results
            except TryAgain as error:
                last, reason = replica, f"{replica.url}: {error}"
                if error.rest_s is not None:  # healthy, but rate-limited
                    continue
                tries += 1
                answered[replica] = replica.num_answered
                # An unreachable or forbidding replica, or an outage that continues, says nothing about these rows,
                # unless others get answers there, or no row was ever answered that could tell.
                was_handled = error.reached and not error.backend_down
                blames_rows = error.answered and not self._answered if on_trial else was_handled
                if blames_rows or replica.num_answered > num_answered:
                    attempts += 1
                    until = loop.time() + self._patience.outage_s
            except RequestRefused:
                if sent is rows:
                    raise
        raise RequestRefused(f"{reason} ({attempts} attempts)")

    def _trial_rows(self, replica: Replica, rows: list[Row]) -> list[Row]:
        """Return the rows for a trial request. A row answered before can tell an outage from rows that cannot be
        answered; every other trial uses one of the given rows, so that not everything depends on the old one."""
        if self._answered and replica.trials_failed % 2 == 0:
            return self._answered
        return rows if len(rows) == 1 else [random.choice(rows)]

    async def _pause(self, tries: int, attempts: int) -> None:
        """Back off once every healthy replica has been tried; for replicas that are out, `acquire` waits anyway."""
        count = len(self._replicas)
        if tries and tries % count == 0 and self._replicas.num_well:
            pause_s = min(_LONGEST_PAUSE_S, self._first_pause_s * 2 ** min(max(0, attempts // count - 1), 10))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))


def _fail(batch: list[_Waiting[Row, Result]], error: RewardError | UserError) -> None:
    for entry in batch:
        if not entry.result.done():
            entry.result.set_exception(type(error)(str(error)))  # a copy each, since each gets its own traceback
