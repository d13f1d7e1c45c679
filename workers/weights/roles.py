"""Protocols of a worker's weights, with doubles.

`transport.worker.WorkerStream.announcements` ─► Announcements ─► Weights: keeps an engine's weights up to date
                                                                     └─► FurtherMirrors: those of its other hosts
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from streamrl.protocol.transport.types import Announcement
from streamrl.workers.engines.base import Engine, Load


class Announcements(Protocol):
    """Announcements of the learner's weights."""

    async def latest(self, *, anew: bool = False) -> Announcement | None:
        """Return the newest announcement. `anew` bypasses the cache: an anchor may have been added to it since."""
        ...

    async def await_newer(self, version: int, *, within_s: float) -> bool:
        """Wait for an announcement newer than `version`. False: none was seen in time; `latest` may still have one."""
        ...

    async def manifest(self, version: int) -> bytes | None: ...


class Weights(Protocol):
    """`workers.weights.follower.WeightFollower`, or its double."""

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
