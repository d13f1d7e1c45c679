"""Protocols between a worker's parts, each with its double.

`transport.worker.WorkerStream` ─► Tickets ─► Work: generates groups
             └─ its `announcements` ─► Announcements ─► Weights: keeps an engine's weights up to date
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from streamrl.errors import RunGone
from streamrl.protocol.transport.types import Announcement, Control, Leased, RunInfo, RunState
from streamrl.protocol.wire.ticket import Ticket
from streamrl.workers.engines.base import Engine, EngineStats, Load


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


class Announcements(Protocol):
    """Announcements of the learner's weights."""

    async def latest(self, *, anew: bool = False) -> Announcement | None:
        """Return the newest announcement. `anew` bypasses the cache: an anchor may have been added to it since."""
        ...

    async def await_newer(self, version: int, *, within_s: float) -> bool:
        """Wait for an announcement newer than `version`. False: none was seen in time; `latest` may still have one."""
        ...

    async def manifest(self, version: int) -> bytes | None: ...


@dataclass(slots=True, kw_only=True)
class Counts:
    """Totals since the worker's start, over all its engines."""

    groups_delivered: int = 0
    groups_failed: int = 0
    groups_late: int = 0  # finished after the lease was lost
    samples_failed: int = 0


class Work(Protocol):
    """`workers.rollout.Rollout`, or its double."""

    counts: Counts

    @property
    def engine_stats(self) -> EngineStats | None:
        """Stats of the engine in use; None if there is none."""

    async def run(self, engine: Engine, stop: asyncio.Event) -> None:
        """Run until `stop` is set or the run has ended. EngineError: call again with another engine, nothing is lost.
        LoadRejected: the same, but samples generated under the unproved version are discarded."""


class Weights(Protocol):
    """`workers.weights.WeightFollower`, or its double."""

    attempted: int  # the last version that an engine was asked to load
    num_proved: int  # proved versions, over all engines

    @property
    def proved_version(self) -> int:
        """The newest version that the engine was proved to serve; 0 if none."""
        ...

    async def follow(self, engine: Engine) -> None:
        """Keep this engine at the newest version until cancelled. Afterwards, what it serves no longer counts."""

    async def serving(self, version: int) -> None:
        """Wait until the engine serves this version or a newer one (0: any version). The caller bounds the wait."""

    async def proved(self, version: int) -> None:
        """Wait until the engine is proved to serve this version or a newer one. If that fails, `follow` ends, and the
        caller's wait with it."""

    async def newer_than(self, version: int) -> object:
        """Wait for an announcement newer than `version`. The caller bounds the wait."""

    async def announced_in(self, term: int) -> None:
        """Wait until this term's learner, or a later one, has announced weights; WeightsError if none does in time."""

    def distrust_mirror(self) -> None:
        """When the next engine is followed, fetch the weights again from an anchor on."""


class FurtherMirrors(Protocol):
    """The mirrors on the engine's other hosts (`workers.hosts.first.Hosts`)."""

    async def bring(
        self, version: int, *, refetch: bool = False, bytes_arrived: Callable[[], None] = lambda: None
    ) -> None:
        """Have each hold exactly this version; the caller bounds the wait. `refetch`: from an anchor on.
        `bytes_arrived` is called now and then while one of them receives data. WeightsError: one of them does not hold
        it, and why."""


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


class AnnouncementsDouble:
    """Announcements made by hand: the newest, and the manifests of those before it."""

    def __init__(self) -> None:
        self.newest: Announcement | None = None
        self.manifests: dict[int, bytes] = {}
        self._bell = asyncio.Event()

    def announce(self, announcement: Announcement) -> None:
        self.newest = announcement
        self.manifests[announcement.version] = announcement.manifest
        self._bell.set()

    async def latest(self, *, anew: bool = False) -> Announcement | None:
        if anew and self.newest is not None:
            self.newest = replace(self.newest, manifest=self.manifests[self.newest.version])
        return self.newest

    async def await_newer(self, version: int, *, within_s: float) -> bool:
        if self.newest is None or self.newest.version <= version:
            self._bell.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._bell.wait(), within_s)
        return self.newest is not None and self.newest.version > version

    async def manifest(self, version: int) -> bytes | None:
        return self.manifests.get(version)


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


class WeightsDouble:
    """Loads one version; `serve` moves on by hand. What is served counts as proved, except versions in `unproved`."""

    def __init__(self, *, version: int = 1) -> None:
        self.version = 0  # served now
        self.attempted = self.num_proved = self.proved_version = self.num_distrusted = 0
        self.unproved: set[int] = set()  # versions whose proof is still pending
        self.newer = asyncio.Event()  # a newer version is announced
        self._first = version
        self.engine: Engine | None = None
        self._changed = asyncio.Condition()

    async def follow(self, engine: Engine) -> None:
        self.engine = engine
        await self.serve(self.version or self._first)
        await asyncio.Event().wait()  # companions must not return

    async def serve(self, version: int, *, step: int = 0) -> None:
        assert self.engine is not None, "an engine is followed"
        await self.engine.load(Load(weights=Path("mirror"), version=version, step=step))
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    async def prove(self, version: int) -> None:
        async with self._changed:
            self.unproved.discard(version)
            self._changed.notify_all()

    async def serving(self, version: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= max(version, 1))

    async def proved(self, version: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not any(one <= version for one in self.unproved))

    async def newer_than(self, version: int) -> None:
        await self.newer.wait()
        self.newer.clear()

    async def announced_in(self, term: int) -> None:
        await self.newer.wait()

    def distrust_mirror(self) -> None:
        self.num_distrusted += 1
