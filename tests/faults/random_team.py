"""The parts of a run exposed to random faults: who is there, who is replaced, and who ended without explanation.

Learner and workers reach Redis by a route each; the judge and the operator have their own. Blocks while starting Redis
again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

import redis

from streamrl.ops.audit import Audit
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.operator import set_control
from streamrl.protocol.transport.types import Control
from tests.faults.harness import FENCED, REFUSED, FaultWorld, Part
from tests.faults.place import Place
from tests.faults.stand_in_learner import STEP
from tests.helpers import wait_until
from tests.proxy import Proxy

NUM_WORKERS = 3
_WRONG_WEIGHTS = "its blob is another's"  # in the output of a worker that found them
_GAVE_UP = "TrainingError"
_NO_REDIS = "ResourceError: Redis at"  # from a part started while nobody could reach it
_ENDS_WITHIN_S = 60.0
_EXPLAINED = (0, FENCED, REFUSED, -signal.SIGKILL)


class Team:
    def __init__(self, place: Place, client: redis.Redis, parts: ExitStack, server: EmbeddedRedis) -> None:
        self.place, self.client = place, client
        self._server = server
        parts.callback(lambda: self._server.stop())  # runs last
        self.roads = {name: parts.enter_context(Proxy(place.url)) for name in ("learner", "workers")}
        self.world = parts.enter_context(FaultWorld(place))
        self._numbers = count()
        self._parts: list[Part] = []
        self._asleep: list[Part] = []
        self.leavers: list[Part] = []  # parts that must end by themselves
        self.learner = self._start_learner()
        self.workers: dict[str, Part] = {}
        self._drains = False
        self.tend()

    def tend(self) -> None:
        """Replace ended parts, as a supervisor does; terminate workers in excess."""
        if self.learner.exit_code is not None:
            self.learner = self._start_learner()
        self.workers = {name: part for name, part in self.workers.items() if part.exit_code is None}
        while len(self._awake()) < NUM_WORKERS and not self._drains:
            name = f"w{next(self._numbers)}"
            self.workers[name] = self._started(self.world.start_worker(name=name, url=self.roads["workers"].url))
        for name in self._awake()[:-NUM_WORKERS]:
            self.leavers.append(self.workers.pop(name))
            self.leavers[-1].send(signal.SIGTERM)

    def _awake(self) -> list[str]:
        return [name for name, part in self.workers.items() if part not in self._asleep]

    def worker(self, number: int) -> Part:
        """Return any awake worker."""
        self.tend()
        awake = self._awake()
        return self.workers[awake[number % len(awake)]]

    @contextmanager
    def asleep(self, part: Part) -> Iterator[None]:
        part.send(signal.SIGSTOP)
        self._asleep.append(part)
        try:
            yield
        finally:
            self._asleep.remove(part)
            part.send(signal.SIGCONT)

    @contextmanager
    def learner_asleep_and_replaced(self) -> Iterator[None]:
        """Let another job take over from a learner that does not notice."""
        self.tend()
        sleeper = self.learner
        self.leavers.append(sleeper)
        with self.asleep(sleeper):
            self.learner = self._start_learner(takeover=True)
            yield

    def kill_redis(self) -> None:
        os.kill(self._server.pid, signal.SIGKILL)
        self._server.stop()

    def start_redis(self) -> None:
        """Start it with what it had written."""
        self._server = EmbeddedRedis.start(self.place.folder / "redis")

    def say(self, word: Control) -> None:
        set_control(self.client, self.world.keys, word, by="the operator")

    def drain(self) -> Audit:
        """Wait until everything issued has ended, and then all parts."""
        self.tend()
        self._drains = True  # a new worker might wait for a run that has ended
        wait_until(self._has_drained, description="the run has drained", timeout_s=_ENDS_WITHIN_S)
        for part in self.leavers + list(self.workers.values()):
            part.ended()
        return self.world.audit()

    def _has_drained(self) -> bool:
        self.say("drain")
        if self.learner.exit_code == 0:
            return True
        self.tend()
        return False

    def num_descriptors(self) -> int:
        """Return the largest number of an awake part."""
        self.tend()
        awake = [self.workers[name] for name in self._awake()]
        return max(len(os.listdir(f"/proc/{part.pid}/fd")) for part in (self.learner, *awake))

    def num_wrong_weights(self) -> int:
        return sum(_WRONG_WEIGHTS in part.output for part in self._parts)

    def num_given_up(self) -> int:
        return sum(part.exit_code == 1 and _GAVE_UP in part.output for part in self._parts)

    def surprises(self) -> list[str]:
        unlike = [part for part in self._parts if part.exit_code not in _EXPLAINED]
        found = [part for part in unlike if _GAVE_UP not in part.output and _NO_REDIS not in part.output]
        return [f"{part.name} ended with {part.exit_code}: {part.output.strip()[-400:]}" for part in found]

    def last_words(self) -> str:
        """Return the ends of the newest parts' outputs."""
        return "\n".join(f"{part.name} ({part.exit_code}): {part.output[-600:]}" for part in self._parts[-8:])

    def num_wasted_steps(self) -> int:
        """Count the steps repeated after a restart."""
        made = [line for part in self._parts for line in part.output.splitlines() if line.startswith(STEP)]
        return len(made) - len(set(made))

    def _start_learner(self, *, takeover: bool = False) -> Part:
        holder = f"job-{next(self._numbers)}" if takeover else "job"
        return self._started(self.world.start_learner(holder=holder, takeover=takeover, url=self.roads["learner"].url))

    def _started(self, part: Part) -> Part:
        self._parts.append(part)
        return part
