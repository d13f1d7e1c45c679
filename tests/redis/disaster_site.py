"""The place where the machine of `disaster_machine` is at work, what it counts, and what may befall an act."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.crashpoints import Point, SimulatedCrash, armed
from tests.redis.two_servers import LossyAsyncRedis, LossyRedis, TwoServers

LEASE_S = 600.0  # nothing lapses by itself


@dataclass(slots=True)
class Tally:
    """What happened in all runs of a test together."""

    steps: int = 0
    runs: int = 0
    learners: int = 0
    passed: Counter[str] = field(default_factory=Counter)  # crash points
    deaths: Counter[str] = field(default_factory=Counter)  # by crash point
    losses: Counter[str] = field(default_factory=Counter)  # of Redis
    replies_lost: int = 0
    zombie_acts: int = 0
    zombie_writes: int = 0  # accepted
    lost: int = 0
    twice: int = 0

    def __str__(self) -> str:
        return (
            f"{self.steps} steps in {self.runs} runs, audited after each: lost {self.lost}, twice {self.twice}; "
            f"{self.learners} learners, {self.deaths.total()} deaths at {len(self.deaths)} crash points, "
            f"{self.replies_lost} replies lost, Redis lost data {self.losses.total()} times, "
            f"{self.zombie_acts} acts of zombies, writes accepted {self.zombie_writes}"
        )


@dataclass(slots=True, kw_only=True)
class Site:
    """What is the same for all runs of a test."""

    servers: TwoServers
    client: LossyRedis
    async_client: LossyAsyncRedis
    runner: asyncio.Runner
    folder: Path
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peril:
    """What may befall a process in one act: it dies at a crash point, or a reply does not reach it."""

    dies_at: Point | None = None
    loses_reply: int = 0  # to the nth command; 0: none


SAFE = Peril()


@contextmanager
def facing(peril: Peril, client: LossyRedis | LossyAsyncRedis, tally: Tally) -> Iterator[None]:
    """One act of a process that uses this client."""

    def pass_point(point: Point) -> None:
        tally.passed[point] += 1
        if point == peril.dies_at:
            tally.deaths[point] += 1
            raise SimulatedCrash(point)

    client.luck.lose_reply(peril.loses_reply)
    try:
        with armed(pass_point):
            yield
    finally:
        client.luck.lose_reply(0)
