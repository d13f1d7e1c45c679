"""The stream: what a group costs on its whole way, beside what the same bytes cost Redis and its client at the least.

    one process: workers                        Redis                    this process: the learner
    lease ─ encode ─ deliver script ──► tickets become groups ──► plan ─ fetch ─ verify ─ decode ─ settle ─ commit
    pipelined XADD                ──────► a plain stream ──────►  XREAD, XTRIM                    (the comparison)

Growth is looked at with small groups, for what could grow is what is kept per ticket. Its cost is CPU time of all
three processes, so that a busy machine does not show as growth. Receipts of deliveries live for twice the workers'
`redis.give_up_after_s`; that is 1 s there, so that their number settles at once and does not hide what grows.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import redis

from bench.answering import (
    MODEL,
    PLAIN_STREAM,
    Shape,
    Team,
    answer_tickets,
    encode_answer,
    hold_tickets,
    in_background,
    make_samples,
    write_plainly,
)
from bench.learning import Learning, groups_per_second
from bench.measure import Rounds, Say
from bench.report import Bar, Fact, Line
from streamrl.config import schema
from streamrl.transport.connection import connect, connect_async
from streamrl.transport.embedded import EmbeddedRedis
from streamrl.transport.keys import WORKERS, Keys
from streamrl.transport.learner import LearnerStream
from streamrl.transport.types import START
from streamrl.transport.worker import WorkerStream
from streamrl.versions import make_version
from streamrl.wire.ticket import Ticket

_LARGE = Shape(num_samples=8, num_tokens=512)  # 33 KB
_SMALL = Shape(num_samples=2, num_tokens=4)
_TEAMS = (1, 8, 64)  # workers
_GROUPS_PER_STEP = 128  # so that 64 workers have some tickets each; the plain commands come in batches of as many
_COMMIT_EVERY = 10  # steps, the default
_WARM_UP = 4  # steps
_FIRST_TICKETS = 1_000  # before growth is looked at
_WINDOW = 2_000  # tickets
_LONGEST_GROWTH_S = 240.0  # on a machine that is too slow for all of it
_RECLAIMED = 8  # tickets


def bench(*, quick: bool, say: Say) -> list[Line]:
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        EmbeddedRedis.start(Path(folder) / "redis") as server,
        connect(server.url, schema.Redis()) as client,
    ):
        say(f"full path against plain commands, groups of {_LARGE.num_samples} samples")
        lines = _speed(server, client, quick=quick, say=say)
        client.flushall()
        num_windows = 10 if quick else 500
        say(f"growth over {num_windows * _WINDOW:,} small tickets")
        lines += _growth(server, client, Path(folder) / "run", num_windows=num_windows, say=say)
        client.flushall()
        say("reclaiming what a killed worker held")
        lines += _reclaiming(server, client, quick=quick)
    return lines


# Speed


def _speed(server: EmbeddedRedis, client: redis.Redis, *, quick: bool, say: Say) -> list[Line]:
    for_s = 0.7 if quick else 2.0
    ways: dict[str, Callable[[], float]] = {"plain": partial(_plain, server, client, for_s)}
    ways |= {f"{size} workers": partial(_whole_path, server, client, size, for_s) for size in _TEAMS}
    rounds = Rounds(ways, num_rounds=2 if quick else 5, say=say)
    lines: list[Line] = [
        Bar(
            name="full path / plain XADD + XREAD + XTRIM",
            value=rounds.ratio("1 workers", to="plain"),
            unit="x",
            goal=0.5,
            better="higher",
        )
    ]
    for size in _TEAMS[1:]:
        value = rounds.ratio(f"{size} workers", to="1 workers")
        lines.append(Bar(name=f"{size} workers / 1 worker", value=value, unit="x", goal=0.8, better="higher"))
    return lines + [Fact(name=name, value=rounds.median(name), unit="groups/s") for name in ways]


def _plain(server: EmbeddedRedis, client: redis.Redis, for_s: float) -> float:
    client.flushall()
    header, body = encode_answer(_example_ticket(0), make_samples(_LARGE, version=make_version(1, 0)))
    reader = _PlainReader(client)
    with in_background(write_plainly, server.url, header, body, _GROUPS_PER_STEP):
        return groups_per_second(reader.step, warm_up=_WARM_UP, for_s=for_s)


def _whole_path(server: EmbeddedRedis, client: redis.Redis, num_workers: int, for_s: float) -> float:
    client.flushall()
    learning = Learning(client, "speed", shape=_LARGE, groups_per_step=_GROUPS_PER_STEP, commit_every=_COMMIT_EVERY)
    team = Team(url=server.url, run="speed", shape=_LARGE, num_workers=num_workers)
    with in_background(answer_tickets, team):
        # The more workers, the later the last of them has connected.
        return groups_per_second(learning.step, warm_up=_WARM_UP + num_workers // 8, for_s=for_s)


class _PlainReader:
    """Reads and trims as seldom as the learner commits."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._last = "0-0"
        self._num_reads = 0

    def step(self) -> int:
        reply: Any = self._client.xread({PLAIN_STREAM: self._last}, count=_GROUPS_PER_STEP, block=1000)
        entries = reply[0][1] if reply else []
        if entries:
            self._last = entries[-1][0]
        self._num_reads += 1
        if self._num_reads % _COMMIT_EVERY == 0:
            self._client.xtrim(PLAIN_STREAM, minid=self._last, approximate=False)
        return len(entries)


# Growth


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """Some thousand tickets of the run."""

    cpu_us: float  # a group, all processes together
    wall_us: float
    redis_bytes: int  # after the last commit


def _growth(server: EmbeddedRedis, client: redis.Redis, folder: Path, *, num_windows: int, say: Say) -> list[Line]:
    folder.mkdir()
    learning = Learning(client, "growth", shape=_SMALL, groups_per_step=16, commit_every=100, folder=folder)
    team = Team(url=server.url, run="growth", shape=_SMALL, give_up_after_s=1.0)
    began = time.monotonic()
    windows: list[_Window] = []
    with in_background(answer_tickets, team) as workers:
        while learning.num_trained < _FIRST_TICKETS:
            learning.step()
        pids = (os.getpid(), workers, server.pid)
        while len(windows) < num_windows and time.monotonic() < began + _LONGEST_GROWTH_S:
            windows.append(_watch_window(learning, client, pids))
            if len(windows) % (num_windows // 5) == 0:
                say(f"{learning.num_trained:,} tickets, {windows[-1].wall_us:.0f} us a group")
    num_compared = max(3, len(windows) // 50)
    first, last = windows[:num_compared], windows[-num_compared:]
    cpu, memory = (
        median(map(read, last)) / median(map(read, first)) for read in map(attrgetter, ("cpu_us", "redis_bytes"))
    )
    return [
        Bar(name="CPU time of a group, end / begin of the run", value=cpu, unit="x", goal=1.2, better="lower"),
        Bar(name="Redis memory, end / begin of the run", value=memory, unit="x", goal=1.2, better="lower"),
        Fact(name="tickets in that run", value=learning.num_trained, unit=""),
        Fact(name="CPU time of a small group", value=median(w.cpu_us for w in windows), unit="us"),
        Fact(name="wall time of a small group", value=median(w.wall_us for w in windows), unit="us"),
        Fact(name="Redis memory at the end", value=median(w.redis_bytes for w in last) / 1e6, unit="MB"),
    ]


def _watch_window(learning: Learning, client: redis.Redis, pids: tuple[int, ...]) -> _Window:
    trained, cpu, began = learning.num_trained, _cpu_s(pids), time.perf_counter()
    while learning.num_trained < trained + _WINDOW:
        learning.step()
    cpu, wall = _cpu_s(pids) - cpu, time.perf_counter() - began
    learning.commit()
    used: Any = client.info("memory")
    num_groups = learning.num_trained - trained
    return _Window(cpu_us=cpu / num_groups * 1e6, wall_us=wall / num_groups * 1e6, redis_bytes=used["used_memory"])


def _cpu_s(pids: tuple[int, ...]) -> float:
    """What these processes have used so far."""
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    ticks = sum(int(fields[11]) + int(fields[12]) for fields in stats)  # user and system time
    return ticks / os.sysconf("SC_CLK_TCK")


# Reclaiming


def _reclaiming(server: EmbeddedRedis, client: redis.Redis, *, quick: bool) -> list[Line]:
    lease_s = 2.0 if quick else 5.0
    times = [_reclaim(server, client, f"reclaim{number}", lease_s) for number in range(1 if quick else 5)]
    value = max(times) / lease_s
    return [
        Bar(name="reclaim of a killed worker's tickets / lease", value=value, unit="x", goal=1.2, better="lower"),
        Fact(name="lease in that measurement", value=lease_s, unit="s"),
    ]


def _reclaim(server: EmbeddedRedis, client: redis.Redis, run: str, lease_s: float) -> float:
    """Seconds from the death of a worker that renewed its leases until another one has all its tickets."""
    keys = Keys(run)
    learner = LearnerStream(client, keys, run_uid="bench", epoch=1, holder="bench", lease_s=600.0)
    learner.claim(config_json="{}", fingerprint=MODEL, wait_s=0.0)
    learner.restore(cursor=START)
    learner.issue([_example_ticket(number) for number in range(_RECLAIMED)])
    team = Team(url=server.url, run=run, shape=_SMALL, lease_s=lease_s, max_groups_in_flight=_RECLAIMED)
    with in_background(hold_tickets, team):
        _wait_for_leases(client, keys)
        time.sleep(lease_s)  # it renews several times, then it is killed
    return asyncio.run(_take_over(server.url, keys, lease_s))


def _wait_for_leases(client: redis.Redis, keys: Keys) -> None:
    deadline = time.monotonic() + 30.0
    while True:
        pending: Any = client.xpending(keys.tickets("train"), WORKERS)
        if pending["pending"] == _RECLAIMED:
            return
        assert time.monotonic() < deadline, "the doomed worker did not take its tickets"
        time.sleep(0.01)


async def _take_over(url: str, keys: Keys, lease_s: float) -> float:
    began = time.perf_counter()
    async with connect_async(url, schema.Redis()) as client:
        stream = WorkerStream(client, keys, worker="heir", lease_s=lease_s)
        missing = _RECLAIMED
        while missing:
            missing -= len(await stream.lease(max_tickets=missing, block_ms=500))
            assert time.perf_counter() - began < 10 * lease_s, "the tickets did not come back"
    return time.perf_counter() - began


def _example_ticket(number: int) -> Ticket:
    return Ticket(
        number=number,
        run_uid="bench",
        purpose="train",
        data_epoch=0,
        prompt_index=number,
        prompt=f"prompt {number}",
        token_ids=np.arange(40, dtype=np.int32),
        num_samples=1,
    )
