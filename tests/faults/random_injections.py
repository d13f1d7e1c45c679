"""The faults that can happen to a run: each starts, lasts as long as its context, and ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from tests.faults.random_team import Team

Injection = Callable[[Team, random.Random], AbstractContextManager[None]]


@contextmanager
def worker_killed(team: Team, chance: random.Random) -> Iterator[None]:
    team.worker(chance.randrange(100)).kill()
    yield


@contextmanager
def worker_stopped(team: Team, chance: random.Random) -> Iterator[None]:
    """When it wakes, others have its tickets, and there is one worker too many."""
    with team.asleep(team.worker(chance.randrange(100))):
        team.tend()
        yield


@contextmanager
def learner_killed(team: Team, chance: random.Random) -> Iterator[None]:
    team.learner.kill()
    yield


@contextmanager
def learner_replaced_asleep(team: Team, chance: random.Random) -> Iterator[None]:
    """When it wakes, it must not touch what belongs to its successor."""
    with team.learner_asleep_and_replaced():
        yield


@contextmanager
def replies_lost(team: Team, chance: random.Random, *, road: str) -> Iterator[None]:
    team.roads[road].loss = chance.uniform(0.02, 0.2)
    yield
    team.roads[road].loss = 0.0


@contextmanager
def road_slow(team: Team, chance: random.Random, *, road: str) -> Iterator[None]:
    team.roads[road].delay_s = chance.uniform(0.005, 0.05)
    yield
    team.roads[road].delay_s = 0.0


@contextmanager
def road_blocked(team: Team, chance: random.Random, *, road: str) -> Iterator[None]:
    with team.roads[road].blackhole():
        yield


@contextmanager
def connections_broken(team: Team, chance: random.Random) -> Iterator[None]:
    for road in team.roads.values():
        road.break_connections()
    yield


@contextmanager
def run_paused(team: Team, chance: random.Random) -> Iterator[None]:
    team.say("pause")
    yield
    team.say("run")


@contextmanager
def redis_emptied(team: Team, chance: random.Random) -> Iterator[None]:
    team.client.flushall()
    yield


@contextmanager
def redis_killed(team: Team, chance: random.Random) -> Iterator[None]:
    team.kill_redis()
    yield
    team.start_redis()


INJECTIONS: Mapping[str, Injection] = {
    "worker killed": worker_killed,
    "worker stopped": worker_stopped,
    "learner killed": learner_killed,
    "learner replaced in its sleep": learner_replaced_asleep,
    **{f"replies to {road} lost": partial(replies_lost, road=road) for road in ("learner", "workers")},
    **{f"road of {road} slow": partial(road_slow, road=road) for road in ("learner", "workers")},
    **{f"road of {road} blocked": partial(road_blocked, road=road) for road in ("learner", "workers")},
    "connections broken": connections_broken,
    "run paused": run_paused,
    "Redis emptied": redis_emptied,
    "Redis killed": redis_killed,
}
NEED_REDIS = ("run paused", "Redis emptied")  # start these before Redis is killed
