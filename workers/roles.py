"""The two halves of a worker as its other parts see them: who makes groups, and who keeps an engine's weights new."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from streamrl.workers.engines.base import Engine, EngineStats


@dataclass(slots=True, kw_only=True)
class Counts:
    """Since the worker's start, over all its engines."""

    groups_delivered: int = 0
    groups_failed: int = 0
    groups_late: int = 0  # finished, but the ticket was not ours any more
    samples_failed: int = 0


class Work(Protocol):
    """`workers.rollout.Rollout`, or its double."""

    counts: Counts

    @property
    def engine_stats(self) -> EngineStats | None:
        """Of the engine at work; None where there is none."""

    async def run(self, engine: Engine, stop: asyncio.Event) -> None:
        """Until `stop` is set or the run has ended. EngineError: run again with another engine, nothing is lost.
        LoadRejected: so it is, but what the engine made under the version it did not prove is thrown away."""


class Weights(Protocol):
    """`workers.weights.WeightFollower`, or its double."""

    attempted: int  # the last version that an engine was to load
    num_proved: int  # versions, over all engines

    @property
    def proved_version(self) -> int:
        """The newest that the engine has proved to serve; 0: none."""
        ...

    async def follow(self, engine: Engine) -> None:
        """Keep this engine at the newest version, until cancelled; whatever it serves counts for nothing afterwards."""

    async def serving(self, version: int) -> None:
        """Wait until the engine serves this version, a newer one, or (for 0) any at all; the caller bounds the wait."""

    async def proved(self, version: int) -> None:
        """Wait until the engine has proved to serve this version or a newer one. A version that it cannot prove ends
        `follow`, and with it whoever waits here."""

    async def announced_beyond(self, version: int) -> object:
        """Wait for a newer announcement; the caller bounds the wait."""

    def distrust_mirror(self) -> None:
        """Fetch everything anew, from an anchor on, when an engine is followed next."""


class WorkDouble:
    """Its runs end as they are told to, one after the other, and all later ones well."""

    def __init__(self, *outcomes: Callable[[], Exception | None]) -> None:
        self.counts = Counts()
        self.engine_stats: EngineStats | None = None
        self.engines: list[Engine] = []  # of each run
        self._outcomes = list(outcomes)

    async def run(self, engine: Engine, stop: asyncio.Event) -> None:
        self.engines.append(engine)
        error = self._outcomes.pop(0)() if self._outcomes else None
        if error is not None:
            raise error


class WeightsDouble:
    """Loads its version and is done; `serve` moves it on by hand. What is served is proved, but for `unproved`."""

    def __init__(self, *, version: int = 1) -> None:
        self.version = 0  # being served
        self.attempted = self.num_proved = self.proved_version = self.num_distrusted = 0
        self.unproved: set[int] = set()  # versions whose proof is on its way
        self.newer = asyncio.Event()  # something newer is announced
        self._first = version
        self.engine: Engine | None = None
        self._changed = asyncio.Condition()

    async def follow(self, engine: Engine) -> None:
        self.engine = engine
        await self.serve(self.version or self._first)
        await asyncio.Event().wait()  # a companion does not end by itself

    async def serve(self, version: int, *, step: int = 0) -> None:
        assert self.engine is not None, "an engine is followed"
        await self.engine.load(Path("mirror"), version=version, step=step)
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

    async def announced_beyond(self, version: int) -> None:
        await self.newer.wait()
        self.newer.clear()

    def distrust_mirror(self) -> None:
        self.num_distrusted += 1
