"""The effect of a hundred monitors, and of their death by kill -9, on a run's steps.

    [first] ─► [second] ─► 100 monitors start ─► [watched] ─► kill -9 of all ─► [after]        a window of steps each

Many short rounds are more informative than a few long ones: other load on the machine varies within seconds. The run is
saturated: simulated workers answer at once, and a step is stream work only, so that it shows what Redis does for
others. A monitor is a process that polls like `streamrl top`, as the user that `streamrl redis acl` prints. Here they
share two cores with the run, which they normally do not: so they run at low priority, and `watched` reflects this
machine as much as Redis. `second / first` is the variation without any monitors, and the quartiles show the spread of
the rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from statistics import median, quantiles

import redis

from bench.answering import Shape, Team, answer_tickets, in_background
from bench.learning import Learning
from bench.measure import Say
from bench.report import Bar, Fact, Line
from streamrl.config import schema
from streamrl.errors import ResourceError
from streamrl.held_folders import scratch_folder
from streamrl.ops.monitor.poller import Watcher
from streamrl.protocol.transport.acl import rules
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys

_MONITORS = 100
_PERIOD_S = 0.5  # of `top`
_WINDOW_S = 2.0
_RUN = "watched"
_SHAPE = Shape(num_samples=8, num_tokens=512)
_WORKERS, _GROUPS_PER_STEP, _COMMIT_EVERY = 8, 16, 10
_PASSWORD = "of-the-monitors"
_ARRIVED_WITHIN_S = 60.0
_PAUSE_S = 0.1
_NICEST = 19

_CONTEXT = multiprocessing.get_context("forkserver")


def bench(*, quick: bool, say: Say) -> list[Line]:
    _CONTEXT.set_forkserver_preload(["bench.watchers"])
    with (
        scratch_folder() as folder,
        EmbeddedRedis.start(folder / "redis") as server,
        connect(server.url, schema.Redis()) as client,
    ):
        client.execute_command("ACL", "SETUSER", "monitor", "on", f">{_PASSWORD}", *rules("monitor").split())
        learning = Learning(client, _RUN, shape=_SHAPE, groups_per_step=_GROUPS_PER_STEP, commit_every=_COMMIT_EVERY)
        team = Team(url=server.url, run=_RUN, shape=_SHAPE, num_workers=_WORKERS)
        with in_background(answer_tickets, team):
            _steps(learning)  # a process's first steps are slower
            rounds = [_round(learning, client, server.url, say) for _ in range(3 if quick else 30)]
    return _lines(rounds)


Windows = dict[str, list[float]]  # seconds of each step, by window; and `looks` per second


def _round(learning: Learning, client: redis.Redis, url: str, say: Say) -> Windows:
    found = {name: _steps(learning) for name in ("first", "second")}
    with _monitors(client, url, learning) as processes:
        looks = _num_looks(client)
        found["watched"] = _steps(learning)
        found["looks"] = [(_num_looks(client) - looks) / _WINDOW_S]
        for process in processes:
            assert process.pid is not None, "it was started"
            os.kill(process.pid, signal.SIGKILL)
        found["after"] = _steps(learning)
    say(", ".join(f"{name} {1e3 * median(found[name]):.2f} ms" for name in ("first", "second", "watched", "after")))
    return found


def _steps(learning: Learning) -> list[float]:
    """Return the seconds of each step in one window."""
    times = []
    until = time.perf_counter() + _WINDOW_S
    while (began := time.perf_counter()) < until:
        learning.step()
        times.append(time.perf_counter() - began)
    return times


@contextmanager
def _monitors(client: redis.Redis, url: str, learning: Learning) -> Iterator[list[BaseProcess]]:
    """Yield all monitors, once they are polling."""
    address = url.replace("unix://", f"unix://monitor:{_PASSWORD}@")
    processes = [_CONTEXT.Process(target=look_again_and_again, args=(address,), daemon=True) for _ in range(_MONITORS)]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + _ARRIVED_WITHIN_S
        while sum(one["user"] == "monitor" for one in client.client_list()) < _MONITORS:
            if time.monotonic() > deadline:
                raise ResourceError(f"{_MONITORS} monitors have not connected in {_ARRIVED_WITHIN_S:g} s")
            learning.step()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def look_again_and_again(url: str) -> None:
    """Poll until the process is killed."""
    os.nice(_NICEST)
    with connect(url, schema.Redis()) as client:
        watcher = Watcher(client, Keys(_RUN), server="the bench's")
        while True:
            began = time.monotonic()
            watcher.look()
            time.sleep(max(_PAUSE_S, _PERIOD_S - (time.monotonic() - began)))


def _num_looks(client: redis.Redis) -> int:
    """Count polls by Redis's TIME calls: each poll makes one, and nothing else does."""
    return int(client.info("commandstats").get("cmdstat_time", {"calls": 0})["calls"])


def _lines(rounds: list[Windows]) -> list[Line]:
    def ratios(name: str, to: str) -> list[float]:
        return [median(one[name]) / median(one[to]) for one in rounds]

    killed = ratios("after", "second")
    lowest, _, highest = quantiles(killed, n=4)
    return [
        Bar(
            name=f"step after kill -9 of {_MONITORS} monitors / before they came",
            value=median(killed),
            unit="x",
            goal=1.02,
            better="lower",
        ),
        Fact(name="the same, first quartile of the rounds", value=lowest, unit="x"),
        Fact(name="the same, third quartile", value=highest, unit="x"),
        Fact(name="second / first window, nobody there", value=median(ratios("second", "first")), unit="x"),
        Fact(name="step under the monitors / before they came", value=median(ratios("watched", "second")), unit="x"),
        Fact(name="looks, all monitors", value=median(one["looks"][0] for one in rounds), unit="/s"),
        Fact(name="step", value=1e3 * median(median(one["second"]) for one in rounds), unit="ms"),
        Fact(name="slowest step before", value=1e3 * median(max(one["second"]) for one in rounds), unit="ms"),
        Fact(name="slowest step after the kill", value=1e3 * median(max(one["after"]) for one in rounds), unit="ms"),
    ]
