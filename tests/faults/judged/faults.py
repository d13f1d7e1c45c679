"""The faults that hit a judged run: each starts, lasts as long as its context, and ends."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

import redis

from streamrl.protocol.transport.operator import read_letters, request_retries
from tests.faults.agents import descendants
from tests.faults.judge.recorder import Recorder
from tests.faults.judged.forge import FORGERIES, forge
from tests.faults.judged.team import KEYS, Team

_MOST_COPIES = 6
_A_WHILE_S = (1.0, 4.0)  # how long a run works with an older copy


class Scene:
    """A run, its observer, and what is kept for later faults."""

    def __init__(self, team: Team, recorder: Recorder, chance: random.Random) -> None:
        self.team, self.recorder, self.chance = team, recorder, chance
        self.forged: set[str] = set()  # names of entries
        self.copies: list[Path] = []  # of Redis, oldest first
        self._moment = threading.Event()  # never set: for waiting

    def keep_copy(self) -> None:
        self.copies = [*self.copies[-_MOST_COPIES:], self.team.server.copy()]

    def wait(self, seconds: float) -> None:
        self._moment.wait(seconds)

    def put_back(self, copy: Path, *, why: str) -> None:
        self.see_all()
        self.recorder.note(why)
        self.team.server.put_back(copy)

    def see_all(self) -> None:
        """See everything before it is lost: otherwise groups that a learner has read and the recorder has not would
        look invented. A server stopped or killed by another fault shows nothing more."""
        with suppress(redis.RedisError):
            self.team.server.hold()
            self.recorder.catch_up()


class NothingThereError(Exception):
    """The target of the fault does not exist now."""


Fault = Callable[[Scene], AbstractContextManager[None]]


@contextmanager
def rank_hit(scene: Scene, *, by: signal.Signals) -> Iterator[None]:
    """Hit a rank; if it is stopped, its peers notice, and all are replaced."""
    if not (ranks := scene.team.ranks()):
        raise NothingThereError
    _send(scene.chance.choice(ranks), by)
    yield


@contextmanager
def agent_hit(scene: Scene, *, by: signal.Signals) -> Iterator[None]:
    _send(scene.team.learner.pid, by)
    yield


@contextmanager
def tree_asleep(scene: Scene) -> Iterator[None]:
    """Stop the whole learner, for shorter or longer than its lease."""
    tree = descendants(scene.team.learner.pid)
    for pid in tree:
        _send(pid, signal.SIGSTOP)
    yield
    scene.wait(scene.chance.uniform(0.0, 4.0))
    for pid in tree:
        _send(pid, signal.SIGCONT)


@contextmanager
def worker_hit(scene: Scene, *, by: signal.Signals) -> Iterator[None]:
    _send(scene.chance.choice(scene.team.workers).pid, by)
    yield


@contextmanager
def worker_asleep(scene: Scene) -> Iterator[None]:
    pid = scene.chance.choice(scene.team.workers).pid
    _send(pid, signal.SIGSTOP)
    yield
    scene.wait(scene.chance.uniform(0.0, 6.0))  # sometimes past its leases
    _send(pid, signal.SIGCONT)


@contextmanager
def redis_killed(scene: Scene) -> Iterator[None]:
    scene.recorder.note("killed")
    scene.team.server.kill()
    yield
    scene.team.server.start()


@contextmanager
def redis_loses_a_second(scene: Scene) -> Iterator[None]:
    server = scene.team.server
    sizes = server.sizes()
    scene.wait(1.0)
    scene.see_all()
    scene.recorder.note("killed, and a second lost")
    server.kill()
    server.cut(sizes)
    yield
    server.start()


@contextmanager
def redis_emptied(scene: Scene) -> Iterator[None]:
    scene.see_all()
    scene.recorder.note("emptied")
    with scene.team.server.client() as client, client.pipeline(transaction=False) as at_once:
        at_once.client_unpause().flushall().execute()  # held commands run after the flush
    yield


@contextmanager
def redis_put_back(scene: Scene) -> Iterator[None]:
    scene.put_back(scene.chance.choice(scene.copies), why="older copy")
    yield


@contextmanager
def redis_put_back_and_forth(scene: Scene) -> Iterator[None]:
    """Roll back to an older copy, and then forward to the state before it: two branches meet."""
    older = scene.chance.choice(scene.copies)
    newer = scene.team.server.copy()
    scene.put_back(older, why="older copy")
    yield
    scene.wait(scene.chance.uniform(*_A_WHILE_S))
    scene.put_back(newer, why="newer copy")


@contextmanager
def redis_and_learner_put_back_and_forth(scene: Scene) -> Iterator[None]:
    """The same, with a learner whose memory belongs to the respective branch."""
    older = scene.chance.choice(scene.copies)
    newer = scene.team.server.copy()
    scene.team.learner.kill()
    scene.put_back(older, why="older copy, learner dead")
    scene.team.learner.wait()
    scene.team.tend()
    yield
    scene.wait(scene.chance.uniform(*_A_WHILE_S) + 8.0)
    scene.put_back(newer, why="newer copy")


@contextmanager
def redis_asleep(scene: Scene) -> Iterator[None]:
    with scene.team.server.asleep():
        yield
        scene.wait(scene.chance.uniform(0.0, 4.0))  # sometimes beyond the reply timeout


@contextmanager
def road_blocked(scene: Scene, *, road: str) -> Iterator[None]:
    with scene.team.roads[road].blackhole():
        yield
        scene.wait(scene.chance.uniform(0.0, 4.0))


@contextmanager
def replies_lost(scene: Scene, *, road: str) -> Iterator[None]:
    scene.team.roads[road].loss = scene.chance.uniform(0.02, 0.2)
    yield
    scene.wait(1.0)
    scene.team.roads[road].loss = 0.0


@contextmanager
def connections_broken(scene: Scene) -> Iterator[None]:
    with scene.team.server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    yield


@contextmanager
def group_forged(scene: Scene, *, how: str) -> Iterator[None]:
    made = set[str]()
    for _ in range(3):
        made |= forge(scene.team.server, scene.recorder.record, scene.chance, how=how, before=scene.forged | made)
    scene.forged |= made
    if not made:
        raise NothingThereError
    yield


@contextmanager
def stopped_by_the_operator(scene: Scene) -> Iterator[None]:
    """It is started again, as by whoever stopped it."""
    scene.team.say("stop")
    yield


@contextmanager
def paused(scene: Scene) -> Iterator[None]:
    scene.team.say("pause")
    yield
    scene.team.say("run")


@contextmanager
def dead_repeated(scene: Scene) -> Iterator[None]:
    with scene.team.server.client() as client:
        letters = [letter for letter in read_letters(client, KEYS) if not letter.retry_requested]
        if not letters:
            raise NothingThereError
        request_retries(client, KEYS, letters, by="the judge")
    yield


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


FAULTS: Mapping[str, Fault] = {
    "rank killed": partial(rank_hit, by=signal.SIGKILL),
    "rank stopped": partial(rank_hit, by=signal.SIGSTOP),
    "rank told to end": partial(rank_hit, by=signal.SIGTERM),
    "agent killed": partial(agent_hit, by=signal.SIGKILL),
    "agent told to end": partial(agent_hit, by=signal.SIGTERM),
    "learner asleep": tree_asleep,
    "worker killed": partial(worker_hit, by=signal.SIGKILL),
    "worker told to end": partial(worker_hit, by=signal.SIGTERM),
    "worker asleep": worker_asleep,
    "Redis killed": redis_killed,
    "Redis loses a second": redis_loses_a_second,
    "Redis emptied": redis_emptied,
    "Redis put back": redis_put_back,
    "Redis put back and forth": redis_put_back_and_forth,
    "Redis and learner put back and forth": redis_and_learner_put_back_and_forth,
    "Redis asleep": redis_asleep,
    "connections broken": connections_broken,
    "stopped by the operator": stopped_by_the_operator,
    "paused": paused,
    "dead letters repeated": dead_repeated,
    **{f"forged: {how}": partial(group_forged, how=how) for how in FORGERIES},
    **{f"road of {road} blocked": partial(road_blocked, road=road) for road in ("learner", "worker")},
    **{f"replies to {road} lost": partial(replies_lost, road=road) for road in ("learner", "worker")},
}
NEED_WATCHDOG = ("rank stopped",)  # nothing else notices these
