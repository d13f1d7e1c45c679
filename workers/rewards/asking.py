"""A service that answers row by row, asked with patience: whatever comes in the same turn of the loop shares a request.

    ask ──► waiting ──► at most `max_concurrency` requests ──► what it said of each row, or RewardError
                              │
                              ├─ no connection, too late, 5xx, nonsense: again, elsewhere if there are replicas
                              ├─ 401, 403, 404: so too; of address and token, unless others get their answers there
                              ├─ 429: again, when the replica has had the rest that it wants; this costs no attempt
                              └─ no replica is well: an outage; wait for one, which costs no attempt, up to `outage_s`;
                                 then RewardOutage

A request that is refused (400, 413, 422), or had its attempts, is sent again row by row: one bad row fails alone.
Whether a replica that is out is well again, a row that was answered before finds out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from streamrl.errors import RewardError, RewardOutage, UserError
from streamrl.workers.rewards.base import Health
from streamrl.workers.rewards.http_request import Refused, TryAgain
from streamrl.workers.rewards.replicas import Replica, Replicas

FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0  # between attempts
Row = TypeVar("Row")
Said = TypeVar("Said")


class Patience(Protocol):
    """The settings of a source that bound it."""

    @property
    def attempts(self) -> int: ...
    @property
    def outage_s(self) -> float: ...
    @property
    def max_concurrency(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting(Generic[Row, Said]):
    row: Row
    said: asyncio.Future[Said]


class Service(Generic[Row, Said]):
    """One service, of one or several replicas."""

    def __init__(
        self,
        urls: Sequence[str],
        request: Callable[[str, Sequence[Row]], Awaitable[list[Said]]],  # something for each row; TryAgain, or Refused
        patience: Patience,
        *,
        max_rows: int,  # of a request
        first_pause_s: float,
    ) -> None:
        self._request, self._patience, self._max_rows = request, patience, max_rows
        self._replicas = Replicas(urls, first_pause_s=first_pause_s)
        self._first_pause_s = first_pause_s
        self._answered: list[Row] = []  # the latest; none at first
        self._waiting: list[_Waiting[Row, Said]] = []
        self._requests: set[asyncio.Task[None]] = set()

    def health(self) -> Health:
        # While nobody asks, nobody finds out that a service is back; so who may be tried is not out.
        return Health(outage=self._replicas.outage, state=self._replicas.state)

    async def ask(self, row: Row) -> Said:
        loop = asyncio.get_running_loop()
        entry: _Waiting[Row, Said] = _Waiting(row=row, said=loop.create_future())
        self._waiting.append(entry)
        if len(self._waiting) == 1:
            loop.call_soon(self._send_waiting)
        return await entry.said

    async def close(self) -> None:
        _fail(self._waiting, RewardError("the request was given up"))
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    def _send_waiting(self) -> None:
        while self._waiting and len(self._requests) < self._patience.max_concurrency:
            batch, self._waiting = self._waiting[: self._max_rows], self._waiting[self._max_rows :]
            request = asyncio.create_task(self._settle(batch), name=f"reward request of {len(batch)}")
            self._requests.add(request)
            request.add_done_callback(self._on_request_done)

    def _on_request_done(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        if not request.cancelled():
            self._send_waiting()

    async def _settle(self, batch: list[_Waiting[Row, Said]]) -> None:
        """Give every entry its answer or its error."""
        try:
            await self._answer(batch)
        except (RewardOutage, UserError) as error:
            _fail(batch, error)
        finally:
            _fail(batch, RewardError("the request was given up"))  # whatever happens, nobody waits for ever

    async def _answer(self, batch: list[_Waiting[Row, Said]]) -> None:
        batch = [entry for entry in batch if not entry.said.done()]  # done: nobody waits for it any more
        if not batch:
            return
        try:
            said = await self._ask_patiently([entry.row for entry in batch])
        except Refused as refusal:
            if len(batch) == 1:
                _fail(batch, RewardError(str(refusal)))
            else:
                for entry in batch:
                    await self._answer([entry])
        else:
            for entry, one in zip(batch, said, strict=True):
                if not entry.said.done():
                    entry.said.set_result(one)

    async def _ask_patiently(self, rows: list[Row]) -> list[Said]:
        """Refused: these rows had their attempts. RewardOutage: there was none for them, nor for others."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience.outage_s
        last: Replica | None = None
        attempts = tries = 0
        answered: dict[Replica, int] = {}  # what each had answered when it last failed us
        while attempts < self._patience.attempts:
            await self._pause(tries, attempts)
            replica = await self._replicas.one(but=last, until=until)
            if replica is None:
                waited = f"no replica answered for {self._patience.outage_s:g} s"
                raise RewardOutage(f"{waited}: {self._replicas.last_errors}")
            on_trial, before = replica.on_trial, answered.setdefault(replica, replica.num_answered)
            asked = self._trial_rows(replica, rows) if on_trial else rows
            try:
                with self._replicas.asking(replica):
                    said = await self._request(replica.url, asked)
                self._answered = [asked[0]]
                if asked is rows:
                    return said
            except TryAgain as error:
                last, reason = replica, f"{replica.url}: {error}"
                if error.rest_s is not None:  # it is well, and says when it can be asked
                    continue
                tries += 1
                answered[replica] = replica.num_answered
                # That nobody is there, or lets us in, or that an outage goes on, says nothing about these rows,
                # unless others get their answers there, or nothing was ever answered that could tell.
                here = error.reached and not error.away
                about_them = error.answered and not self._answered if on_trial else here
                if about_them or replica.num_answered > before:
                    attempts += 1
                    until = loop.time() + self._patience.outage_s
            except Refused:
                if asked is rows:
                    raise
        raise Refused(f"{reason} ({attempts} attempts)")

    def _trial_rows(self, replica: Replica, rows: list[Row]) -> list[Row]:
        """What was answered before tells an outage from rows that cannot be answered; in turn with one of these, lest
        all depend on it for ever."""
        if self._answered and replica.trials_failed % 2 == 0:
            return self._answered
        return rows if len(rows) == 1 else [random.choice(rows)]

    async def _pause(self, tries: int, attempts: int) -> None:
        """Where some are well and each has been asked, time may help; one that is out is waited for anyway."""
        count = len(self._replicas)
        if tries and tries % count == 0 and self._replicas.num_well:
            pause_s = min(_LONGEST_PAUSE_S, self._first_pause_s * 2 ** min(max(0, attempts // count - 1), 10))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))


def _fail(batch: list[_Waiting[Row, Said]], error: RewardError | UserError) -> None:
    for entry in batch:
        if not entry.said.done():
            entry.said.set_exception(type(error)(str(error)))  # its own: each gets another traceback
