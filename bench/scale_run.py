"""A simulated run of one size: many workers without engines, the real stream, and a learner with simulated step times.

saturated   workers answer at once, the learner trains at once: the path's throughput, and the cost of a group
paced       groups and steps take time, groups long-tailed: is the learner starved, how old are groups, who works
idle        after saturated: no tickets are left; what waiting workers cost Redis

The learner is starved while it asks for groups and the stream has none. Its Redis calls also take time, on cores that
it shares here with Redis and all workers; this is reported separately, as a cost per group that does not depend on the
step time. A step here takes tens of milliseconds, so this is a large share of it; of a real step it is a small one.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import redis

from bench.answering import Shape, Team, answer_tickets, in_background
from bench.learning import Learning
from bench.measure import cpu_s
from streamrl.errors import ResourceError
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.wire.group import Group

SHAPE = Shape(num_samples=8, num_tokens=2048)
_LAG = 4  # steps; the default
_AHEAD = 1.25  # tickets issued per ticket that can be in progress
_LEAST_A_STEP = 32  # groups
_AT_WORK = 64  # groups in progress over all workers, if there are few
_COMMIT_EVERY = 10  # steps
_CONNECTED_WITHIN_S = 60.0
_LONGEST_S = 20.0  # upper limit of a group's mean time, to keep the bench short
_IDLE_S = 2.0
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """CPU seconds per group."""

    redis: float
    rank0: float  # plan, settle, commit
    ranks: float  # fetch, verify, decode: shared by all ranks
    workers: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturated:
    groups_per_s: float
    redis_load: float  # fraction of a core
    learner_load: float
    idle_load: float  # of Redis, while workers wait
    costs: Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced:
    groups_per_s: float
    starved: float  # fraction of the learner's time in which it wanted groups and the stream had none
    in_calls: float  # fraction that its Redis calls took otherwise
    calls_s: float  # per group
    lag_mean: float  # steps from issue to training
    lag_max: int
    evenness: float  # 1: groups are spread over workers as evenly as by chance
    redis_load: float


class Size:
    """Runs with this many workers; each is a new run on an empty server."""

    def __init__(self, server: EmbeddedRedis, client: redis.Redis, num_workers: int) -> None:
        self._server, self._client = server, client
        self.num_workers = num_workers
        self.at_work = max(1, _AT_WORK // num_workers)  # groups per worker
        self.groups_per_step = max(_LEAST_A_STEP, math.ceil(_AHEAD * num_workers * self.at_work / (_LAG + 1)))

    def saturated(self, *, for_s: float) -> Saturated:
        learning, _ = self._begin("saturated")
        with in_background(answer_tickets, self._team("saturated")) as workers:
            self._fill(learning)
            pids = {"redis": self._server.pid, "workers": workers, "learner": os.getpid()}
            plan_s, fetch_s = learning.plan_cpu_s, learning.fetch_cpu_s
            before, began, trained = {name: cpu_s(pid) for name, pid in pids.items()}, time.perf_counter(), 0
            while (elapsed := time.perf_counter() - began) < for_s:
                trained += learning.step()
            used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
            idle_load = self._idle_load(learning)
        return Saturated(
            groups_per_s=trained / elapsed,
            redis_load=used["redis"] / elapsed,
            learner_load=used["learner"] / elapsed,
            idle_load=idle_load,
            costs=Costs(
                redis=used["redis"] / trained,
                rank0=(learning.plan_cpu_s - plan_s) / trained,
                ranks=(learning.fetch_cpu_s - fetch_s) / trained,
                workers=used["workers"] / trained,
            ),
        )

    def paced(self, *, groups_per_s: float, for_s: float, supply: float = _AHEAD) -> Paced:
        """Run with a learner that consumes this rate, and workers that can produce at least `supply` times that."""
        learning, seen = self._begin("paced")
        generate_s = min(_LONGEST_S, self.num_workers * self.at_work / (supply * groups_per_s))
        step_s = self.groups_per_step / groups_per_s
        with in_background(answer_tickets, self._team("paced", generate_s=generate_s)):
            self._fill(learning)
            seen.clear()
            stream, trained = learning.stream, 0
            starved_s, calls_s = stream.starved_s, stream.calls_s
            began, redis_s = time.perf_counter(), cpu_s(self._server.pid)
            while (elapsed := time.perf_counter() - began) < for_s:
                requested, starved_before_s = time.perf_counter(), stream.starved_s
                trained += learning.step()
                busy_s = time.perf_counter() - requested - (stream.starved_s - starved_before_s)
                time.sleep(max(0.0, step_s - busy_s))  # only the rest, to keep the learner's rate
            redis_s = cpu_s(self._server.pid) - redis_s
            starved_s, calls_s = stream.starved_s - starved_s, stream.calls_s - calls_s
        return Paced(
            groups_per_s=trained / elapsed,
            starved=starved_s / elapsed,
            in_calls=calls_s / elapsed,
            calls_s=calls_s / trained,
            lag_mean=sum(seen.lags) / len(seen.lags),
            lag_max=max(seen.lags),
            evenness=seen.evenness(self.num_workers),
            redis_load=redis_s / elapsed,
        )

    def _begin(self, run: str) -> tuple[Learning, Seen]:
        self._client.flushall()
        seen = Seen()
        learning = Learning(
            self._client,
            run,
            shape=SHAPE,
            groups_per_step=self.groups_per_step,
            commit_every=_COMMIT_EVERY,
            observe=seen.note,
        )
        return learning, seen

    def _team(self, run: str, *, generate_s: float = 0.0) -> Team:
        return Team(
            url=self._server.url,
            run=run,
            shape=SHAPE,
            num_workers=self.num_workers,
            max_groups_in_flight=self.at_work,
            generate_s=generate_s,
        )

    def _fill(self, learning: Learning) -> None:
        """Run until all workers have connected and every queue has turned over."""
        deadline = time.monotonic() + _CONNECTED_WITHIN_S
        for _ in range(_LAG + 1):
            learning.step()
        while self._client.info("clients")["connected_clients"] < self.num_workers:
            learning.step()
            if time.monotonic() > deadline:
                raise ResourceError(f"{self.num_workers} workers have not connected in {_CONNECTED_WITHIN_S:g} s")

    def _idle_load(self, learning: Learning) -> float:
        """Return Redis's share of a core, once all tickets are answered and no more are issued."""
        deadline = time.monotonic() + _CONNECTED_WITHIN_S
        while self._client.xlen(learning.keys.tickets("train")) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        before, began = cpu_s(self._server.pid), time.perf_counter()
        time.sleep(_IDLE_S)
        return (cpu_s(self._server.pid) - before) / (time.perf_counter() - began)


class Seen:
    """Lags of trained groups, and the workers they came from."""

    def __init__(self) -> None:
        self.lags: list[int] = []
        self._by_worker: Counter[str] = Counter()

    def note(self, step: int, groups: Sequence[Group]) -> None:
        self.lags += [step - group.samples[0].spans[0].step for group in groups]
        self._by_worker.update(group.header.worker for group in groups)

    def clear(self) -> None:
        self.lags.clear()
        self._by_worker.clear()

    def evenness(self, num_workers: int) -> float:
        """Return Jain's fairness index of groups per worker, relative to random assignment."""
        total, squares = self._by_worker.total(), sum(count**2 for count in self._by_worker.values())
        by_chance = total / (total + num_workers - 1)
        return total**2 / (num_workers * squares) / by_chance
