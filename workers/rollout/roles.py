"""Protocols of a worker's rollouts, each with its double.

`transport.worker.WorkerStream` ─► Tickets ─► Work: generates groups
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from streamrl.errors import RunGone
from streamrl.protocol.transport.types import Control, Leased, RunInfo, RunState
from streamrl.protocol.wire.ticket import Ticket
from streamrl.workers.engines.base import Engine, EngineStats


class Tickets(Protocol):
    """Leases tickets and delivers groups. TransportError if Redis stays away too long, RunGone if the run is
    removed."""

    async def run_info(self) -> RunInfo | None: ...

    async def control(self) -> Control: ...

    async def lease(self, *, max_tickets: int, block_ms: int) -> list[Leased]: ...

    async def renew(self, leased: Sequence[Leased]) -> list[Leased]:
        """Renew these leases; return those that we no longer hold."""
        ...

    async def deliver(self, leased: Leased, header: bytes, body: bytes) -> bool:
        """Deliver a group. False: we no longer hold the ticket, and the group is to be dropped."""
        ...

    async def hand_back(self, leased: Sequence[Leased]) -> None: ...


@dataclass(slots=True, kw_only=True)
class Counts:
    """Totals since the worker's start, over all its engines."""

    groups_delivered: int = 0
    groups_failed: int = 0
    groups_late: int = 0  # finished after the lease was lost
    samples_failed: int = 0


class Work(Protocol):
    """`workers.rollout.loop.Rollout`, or its double."""

    counts: Counts

    @property
    def engine_stats(self) -> EngineStats | None:
        """Stats of the engine in use; None if there is none."""

    async def run(self, engine: Engine, stop: asyncio.Event) -> None:
        """Run until `stop` is set or the run has ended. EngineError: call again with another engine, nothing is lost.
        LoadRejected: the same, but samples generated under the unproved version are discarded."""


class TicketsDouble:
    """A run in memory with one worker: tests add tickets and read what was delivered and handed back."""

    def __init__(self, info: RunInfo) -> None:
        self.info: RunInfo | None = info
        self.mode: Control = "run"
        self.waiting: list[Ticket] = []
        self.delivered: list[tuple[int, bytes, bytes]] = []  # (ticket number, header, body)
        self.handed_back: list[int] = []
        self.taken_away: set[int] = set()  # numbers of tickets now leased by others
        self.renewals = 0
        self.num_looks = 0  # at the run
        self._entries = itertools.count(1)

    def end(self, state: RunState) -> None:
        assert self.info is not None
        self.info = replace(self.info, state=state)

    async def run_info(self) -> RunInfo | None:
        self.num_looks += 1
        if self.info is None:
            raise RunGone("the run was removed")
        return self.info

    async def control(self) -> Control:
        return self.mode

    async def lease(self, *, max_tickets: int, block_ms: int) -> list[Leased]:
        if not self.waiting:
            await asyncio.sleep(min(block_ms, 10) / 1000)
        taken = self.waiting[:max_tickets]
        del self.waiting[:max_tickets]  # in place: several workers may share the list
        return [Leased(entry_id=f"{next(self._entries)}-0", ticket=one, purpose=one.purpose) for one in taken]

    async def renew(self, leased: Sequence[Leased]) -> list[Leased]:
        self.renewals += 1
        return [one for one in leased if one.ticket.number in self.taken_away]

    async def deliver(self, leased: Leased, header: bytes, body: bytes) -> bool:
        if leased.ticket.number in self.taken_away:
            return False
        self.delivered.append((leased.ticket.number, header, body))
        return True

    async def hand_back(self, leased: Sequence[Leased]) -> None:
        self.handed_back += [one.ticket.number for one in leased]


class WorkDouble:
    """Runs that end with the given outcomes, one after the other; later runs succeed."""

    def __init__(self, *outcomes: Callable[[], Exception | None]) -> None:
        self.counts = Counts()
        self.engine_stats: EngineStats | None = None
        self.engines: list[Engine] = []  # one per run
        self._outcomes = list(outcomes)

    async def run(self, engine: Engine, stop: asyncio.Event) -> None:
        self.engines.append(engine)
        error = self._outcomes.pop(0)() if self._outcomes else None
        if error is not None:
            raise error
