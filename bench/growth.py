"""Does the cost of a run grow with its length? CPU time per group and Redis memory, from 1e3 to 1e6 tickets.

Groups are small, since only per-ticket state could grow. The cost is the CPU time of all three processes (workers,
Redis, learner), so that other load on the machine does not look like growth. Load on the same core still would, so each
window is measured in units of a fixed piece of work done between its steps.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import redis

from bench.answering import Shape, Team, answer_tickets, example_answer, in_background
from bench.learning import Learning
from bench.measure import Say
from bench.report import Bar, Fact, Line
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.wire.group import decode_body, decode_header

_SMALL = Shape(num_samples=2, num_tokens=4)
_GROUPS_PER_STEP = 64
_COMMIT_EVERY = 100  # steps
_FIRST_TICKETS = 1_000  # before the first window
_LONGEST_S = 400.0  # limit for slow machines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """A window of some thousand tickets of the run."""

    cost: float  # CPU time per group in units of the fixed work
    cpu_us: float  # per group, all processes together
    wall_us: float
    redis_bytes: int  # after a commit


def growth(
    server: EmbeddedRedis, client: redis.Redis, folder: Path, *, num_tickets: int, num_windows: int, say: Say
) -> list[Line]:
    folder.mkdir()
    learning = Learning(
        client, "growth", shape=_SMALL, groups_per_step=_GROUPS_PER_STEP, commit_every=_COMMIT_EVERY, folder=folder
    )
    windows: list[_Window] = []
    began = time.monotonic()
    with in_background(answer_tickets, Team(url=server.url, run="growth", shape=_SMALL)) as workers:
        while learning.num_trained < _FIRST_TICKETS:
            learning.step()
        watch = _Watch(learning, client, pids=(os.getpid(), workers, server.pid))
        while learning.num_trained < num_tickets and time.monotonic() < began + _LONGEST_S:
            windows.append(watch.window(num_tickets // num_windows))
            if len(windows) % max(1, num_windows // 10) == 0:
                say(f"{learning.num_trained:,} tickets, {windows[-1].wall_us:.0f} us a group")
    num_compared = max(3, len(windows) // 20)
    first, last = windows[:num_compared], windows[-num_compared:]
    cost, memory = (
        median(map(read, last)) / median(map(read, first)) for read in map(attrgetter, ("cost", "redis_bytes"))
    )
    return [
        Bar(name="CPU time of a group, end / begin of the run", value=cost, unit="x", goal=1.2, better="lower"),
        Bar(name="Redis memory, end / begin of the run", value=memory, unit="x", goal=1.2, better="lower"),
        Bar(name="tickets in that run", value=learning.num_trained, unit="", goal=num_tickets, better="higher"),
        Fact(name="CPU time of a small group", value=median(w.cpu_us for w in windows), unit="us"),
        Fact(name="wall time of a small group", value=median(w.wall_us for w in windows), unit="us"),
        Fact(name="Redis memory at the end", value=median(w.redis_bytes for w in last) / 1e6, unit="MB"),
    ]


class _Watch:
    def __init__(self, learning: Learning, client: redis.Redis, *, pids: tuple[int, ...]) -> None:
        self._learning, self._client, self._pids = learning, client, pids
        self._header, self._body = example_answer(_SMALL)

    def window(self, num_tickets: int) -> _Window:
        learning = self._learning
        until, work_s = learning.num_trained + num_tickets, 0.0
        trained, cpu_s, began, num_steps = learning.num_trained, _cpu_s(self._pids), time.perf_counter(), 0
        while learning.num_trained < until:
            learning.step()
            work_s += self._fixed_work()
            num_steps += 1
        cpu_s, wall_s = _cpu_s(self._pids) - cpu_s - work_s, time.perf_counter() - began
        learning.commit()
        used: Any = self._client.info("memory")
        num_groups = learning.num_trained - trained
        return _Window(
            cost=(cpu_s / num_groups) / (work_s / num_steps),
            cpu_us=cpu_s / num_groups * 1e6,
            wall_us=wall_s / num_groups * 1e6,
            redis_bytes=used["used_memory"],
        )

    def _fixed_work(self) -> float:
        """Return the CPU seconds of the fixed work, about half a millisecond."""
        began = time.process_time()
        for _ in range(20):
            decode_body(decode_header(self._header), self._body)
        return time.process_time() - began


def _cpu_s(pids: tuple[int, ...]) -> float:
    """Return the CPU time these processes have used so far."""
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    ticks = sum(int(fields[11]) + int(fields[12]) for fields in stats)  # user and system time
    return ticks / os.sysconf("SC_CLK_TCK")
