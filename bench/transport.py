"""The stream: the full cost of a group, against the minimum that the same bytes cost Redis and its client.

    one process: workers                        Redis                    this process: the learner
    lease ─ encode ─ deliver script ──► tickets become groups ──► plan ─ fetch ─ verify ─ decode ─ settle ─ commit
    pipelined XADD                ──────► a plain stream ──────►  XREAD, XTRIM                    (the comparison)

Then whether that grows with the run (bench.growth), and how soon other workers take over a killed worker's tickets.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import redis

from bench.answering import (
    MODEL,
    PLAIN_STREAM,
    Shape,
    Team,
    answer_tickets,
    example_answer,
    example_ticket,
    hold_tickets,
    in_background,
    write_plainly,
)
from bench.growth import growth
from bench.learning import Learning, groups_per_second
from bench.measure import Rounds, Say, cpu_s
from bench.report import Bar, Fact, Line
from streamrl.config import schema
from streamrl.held_folders import scratch_folder
from streamrl.protocol.transport.connection import connect, connect_async
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import WORKERS, Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.types import START
from streamrl.protocol.transport.worker import WorkerStream

_LARGE = Shape(num_samples=8, num_tokens=512)  # 33 KB
_TEAMS = (1, 8, 64)  # workers
_GROUPS_PER_STEP = 128  # enough tickets for 64 workers; also the batch size of the plain commands
_COMMIT_EVERY = 10  # steps; the default
_WARM_UP = 4  # steps
_RECLAIMED = 8  # tickets
_LEASE_S = 2.0


def bench(*, quick: bool, say: Say) -> list[Line]:
    with (
        scratch_folder() as folder,
        EmbeddedRedis.start(folder / "redis") as server,
        connect(server.url, schema.Redis()) as client,
    ):
        say(f"full path against plain commands, groups of {_LARGE.num_samples} samples")
        lines = _speed(server, client, quick=quick, say=say)
        client.flushall()
        num_tickets, num_windows = (20_000, 10) if quick else (1_000_000, 200)
        say(f"growth over {num_tickets:,} small tickets")
        lines += growth(server, client, folder / "run", num_tickets=num_tickets, num_windows=num_windows, say=say)
        client.flushall()
        say("reclaiming what a killed worker held")
        lines += _reclaiming(server, client, num_rounds=1 if quick else 5)
    return lines


# Speed


def _speed(server: EmbeddedRedis, client: redis.Redis, *, quick: bool, say: Say) -> list[Line]:
    for_s = 0.7 if quick else 2.0
    ways: dict[str, Callable[[], float]] = {"plain": partial(_plain, server, client, for_s)}
    ways |= {f"{size} workers": partial(_whole_path, server, client, size, for_s) for size in _TEAMS}
    rounds = Rounds(ways, num_rounds=2 if quick else 5, say=say)
    cpu = Rounds({"ms": partial(_cpu_ms, server, client, for_s)}, num_rounds=2 if quick else 5)
    lines: list[Line] = [
        Bar(
            name="full path / plain XADD + XREAD + XTRIM",
            value=rounds.ratio("1 workers", to="plain"),
            unit="x",
            goal=0.5,
            better="higher",
        ),
        Bar(
            name="CPU time of a group in all three processes",
            value=cpu.median("ms"),
            unit="ms",
            goal=0.2,
            better="lower",
        ),
    ]
    for size in _TEAMS[1:]:
        value = rounds.ratio(f"{size} workers", to="1 workers")
        lines.append(Bar(name=f"{size} workers / 1 worker", value=value, unit="x", goal=0.8, better="higher"))
    return lines + [Fact(name=name, value=rounds.median(name), unit="groups/s") for name in ways]


def _plain(server: EmbeddedRedis, client: redis.Redis, for_s: float) -> float:
    client.flushall()
    header, body = example_answer(_LARGE)
    reader = _PlainReader(client)
    with in_background(write_plainly, server.url, header, body, _GROUPS_PER_STEP):
        return groups_per_second(reader.step, warm_up=_WARM_UP, for_s=for_s)


def _whole_path(server: EmbeddedRedis, client: redis.Redis, num_workers: int, for_s: float) -> float:
    with _learning(server, client, num_workers) as (learning, _):
        # With more workers, the last of them connects later.
        return groups_per_second(learning.step, warm_up=_WARM_UP + num_workers // 8, for_s=for_s)


def _cpu_ms(server: EmbeddedRedis, client: redis.Redis, for_s: float) -> float:
    """Return the CPU time per group of the server, one worker and the learner together."""
    with _learning(server, client, 1) as (learning, worker):
        groups_per_second(learning.step, warm_up=_WARM_UP, for_s=0.0)
        pids, before = (server.pid, worker, os.getpid()), learning.num_trained
        began_s = sum(map(cpu_s, pids))
        groups_per_second(learning.step, warm_up=0, for_s=for_s)
        return 1000 * (sum(map(cpu_s, pids)) - began_s) / (learning.num_trained - before)


@contextmanager
def _learning(server: EmbeddedRedis, client: redis.Redis, num_workers: int) -> Iterator[tuple[Learning, int]]:
    """Yield a learner, and the pid of its workers."""
    client.flushall()
    learning = Learning(client, "speed", shape=_LARGE, groups_per_step=_GROUPS_PER_STEP, commit_every=_COMMIT_EVERY)
    # A single worker has as many groups in flight as the plain writer's batch, else it would wait for tickets.
    at_work = max(32, _GROUPS_PER_STEP // num_workers)
    team = Team(url=server.url, run="speed", shape=_LARGE, num_workers=num_workers, max_groups_in_flight=at_work)
    with in_background(answer_tickets, team) as pid:
        yield learning, pid


class _PlainReader:
    """Reads, and trims as rarely as the learner commits."""

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


# Reclaiming


def _reclaiming(server: EmbeddedRedis, client: redis.Redis, *, num_rounds: int) -> list[Line]:
    longest_s = max(_reclaim(server, client, f"reclaim{number}") for number in range(num_rounds))
    name, value = "reclaim of a killed worker's tickets / lease", longest_s / _LEASE_S
    return [
        Bar(name=name, value=value, unit="x", goal=1.2, better="lower"),
        Fact(name="lease in that measurement", value=_LEASE_S, unit="s"),
    ]


def _reclaim(server: EmbeddedRedis, client: redis.Redis, run: str) -> float:
    """Return the seconds from the death of a worker that was renewing its leases until another has all its tickets."""
    keys = Keys(run)
    learner = LearnerStream(client, keys, run_uid="bench", term=1, holder="bench", lease_s=600.0)
    learner.claim(config_json="{}", fingerprint=MODEL, wait_s=0.0)
    learner.restore(cursor=START)
    learner.issue([example_ticket(number) for number in range(_RECLAIMED)])
    team = Team(url=server.url, run=run, shape=_LARGE, lease_s=_LEASE_S, max_groups_in_flight=_RECLAIMED)
    with in_background(hold_tickets, team):
        _wait_for_leases(client, keys)
        time.sleep(_LEASE_S)  # several renewals, then the kill
    return asyncio.run(_take_over(server.url, keys))


def _wait_for_leases(client: redis.Redis, keys: Keys) -> None:
    deadline = time.monotonic() + 30.0
    while True:
        pending: Any = client.xpending(keys.tickets("train"), WORKERS)
        if pending["pending"] == _RECLAIMED:
            return
        assert time.monotonic() < deadline, "the doomed worker did not take its tickets"
        time.sleep(0.01)


async def _take_over(url: str, keys: Keys) -> float:
    began = time.perf_counter()
    async with connect_async(url, schema.Redis()) as client:
        stream = WorkerStream(client, keys, worker="heir", lease_s=_LEASE_S)
        missing = _RECLAIMED
        while missing:
            missing -= len(await stream.lease(max_tickets=missing, block_ms=500))
            assert time.perf_counter() - began < 10 * _LEASE_S, "the tickets did not come back"
    return time.perf_counter() - began
