"""The cost of monitoring: a run of a thousand workers, with as many metrics in Redis as it keeps of a long run.

status     a whole process, next to a process that only imports the Redis client
top        one refresh: query Redis, build the view, draw the frame, at 200 x 50
page       from the first request to the first data: the view and all curves
Redis      CPU time of the server per second of one `top`, at 200 workers
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from statistics import median

import redis
from rich.console import Console

from bench.measure import Rounds, Say, cpu_s, seconds
from bench.report import Bar, Fact, Line
from streamrl.config import schema
from streamrl.errors import ResourceError
from streamrl.held_folders import scratch_folder
from streamrl.ops.monitor.poller import Watcher
from streamrl.ops.monitor.runs import Opened
from streamrl.ops.monitor.top.draw import draw
from streamrl.ops.monitor.top.screen import Screen
from streamrl.ops.monitor.view import EXIT_CODES
from streamrl.protocol.transport.clients import server_name
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.entries import encode_report
from streamrl.protocol.transport.keys import Keys, history_streams
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.types import START
from streamrl.telemetry.progress import Report
from streamrl.versions import make_version

_WORKERS, _WORKERS_OF_LOAD = 1_000, 200
_STEPS = 100_000  # of the run; Redis keeps some thousand of their records
_METRICS = 60  # per step
_PERIOD_S = 0.5  # of `top`
_STEPS_A_PIPELINE = 5_000


def bench(*, quick: bool, say: Say) -> list[Line]:
    with (
        scratch_folder() as folder,
        EmbeddedRedis.start(folder / "redis") as server,
        connect(server.url, schema.Redis()) as client,
    ):
        keys = Keys("watched")
        say(f"{_WORKERS} workers, {_STEPS:,} steps")
        points = _make_run(client, keys, num_steps=_STEPS // 10 if quick else _STEPS)
        there = Opened(client=client, keys=keys, server=server_name(client))
        lines: list[Line] = [Fact(name="metric points in Redis", value=points, unit="")]
        lines += _top(there, say, num_rounds=5 if quick else 30)
        lines += _page(server.url, keys, say, num_rounds=1 if quick else 3)
        lines += _status(server.url, keys, say, num_rounds=3 if quick else 11)
        lines += _load(server, there, say, for_s=3.0 if quick else 10.0)
    return lines


def _make_run(client: redis.Redis, keys: Keys, *, num_steps: int) -> int:
    """Create the run; return the number of metric points then in Redis."""
    config = {"training": {"max_steps": 2 * num_steps, "groups_per_step": 16}, "lag": {"max_steps": 4}}
    learner = LearnerStream(client, keys, run_uid="bench", term=1, holder="bench", lease_s=600.0)
    learner.claim(config_json=json.dumps(config), fingerprint="model", wait_s=0.0)
    learner.restore(cursor=START)
    for first in range(1, num_steps + 1, _STEPS_A_PIPELINE):
        with client.pipeline(transaction=False) as pipe:
            for step in range(first, min(first + _STEPS_A_PIPELINE, num_steps + 1)):
                fields = {"step": step, "term": 1, "at": time.time(), "values": _values(step)}
                for stream, longest in history_streams(keys, step, is_validation=False).items():
                    pipe.xadd(stream, dict(fields), maxlen=longest, approximate=True)
            pipe.execute()
    _report_all(client, keys, _WORKERS)
    streams = [keys.metrics, *(keys.thinned(level) for level in range(1, 6))]
    return _METRICS * sum(client.xlen(stream) for stream in streams)


def _values(step: int) -> str:
    named = {"train_rollouts/rewards": 0.5 + step % 97 / 200, "train_optim/optim_step": step, "timers/step": 1.0}
    named |= {"train_rollouts/init_policy_kl": 0.01, "lag/mean": 1.2, "lag/max": 4.0, "policy/ess": 0.97}
    others = {f"stream/dropped_by_length/{place}": step / (place + 1) for place in range(_METRICS - len(named))}
    return json.dumps(named | others)


def _report_all(client: redis.Redis, keys: Keys, count: int) -> None:
    """Report progress for all workers, as they do every second."""
    now = time.time()
    reports = {
        f"worker/host-{number:04}": _report(f"worker/host-{number:04}", "worker", now) for number in range(count)
    }
    client.hset(keys.progress, mapping={**reports, "learner/0": _report("learner/0", "learner", now)})


def _report(part: str, role: str, now: float) -> bytes:
    detail = {"version": make_version(1, 7), "step": 7, "in_flight": 32, "tokens_per_s": 4321, "control": "run"}
    detail |= {"groups_delivered": 100, "groups_failed": 0, "samples_failed": 0, "loads": 7, "loads_in_flight": 6}
    report = Report(
        part=part,
        role="learner" if role == "learner" else "worker",
        host="host",
        pid=1,
        state="working",
        doing="generate",
        since=now,
        last_progress=now,
        at=now,
        detail=detail,
    )
    return encode_report(report)


def _top(there: Opened, say: Say, *, num_rounds: int) -> Iterator[Line]:
    watcher = Watcher(there.client, there.keys, server=there.server)
    began = time.perf_counter()
    watcher.look()
    yield Fact(name="top: first look, with all curves", value=1e3 * (time.perf_counter() - began), unit="ms")
    console = Console(file=io.StringIO(), force_terminal=True, width=200, height=50)
    times = []
    for _ in range(num_rounds):
        _report_all(there.client, there.keys, _WORKERS)  # so that every report is new
        times.append(seconds(lambda: _refresh(watcher, console)))
    say(f"top: {1e3 * median(times):.0f} ms")
    yield Bar(name="top: one refresh", value=1e3 * median(times), unit="ms", goal=100, better="lower")


def _refresh(watcher: Watcher, console: Console) -> None:
    for line in draw(watcher.look(), Screen(sort="progress"), width=console.width, height=console.height):
        console.print(line, end="", no_wrap=True, overflow="crop")


def _page(url: str, keys: Keys, say: Say, *, num_rounds: int) -> Iterator[Line]:
    """Time the first load of the page from a fresh server, without any caches."""
    times = []
    for _ in range(num_rounds):
        with _dashboard(url, keys) as page:
            times.append(seconds(lambda at=page: [_get(f"{at}{path}") for path in ("", "api/view", "api/history")]))
    say(f"page: {1e3 * median(times):.0f} ms")
    yield Bar(name="page: first data", value=1e3 * median(times), unit="ms", goal=500, better="lower")


def _get(url: str) -> int:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return len(reply.read())


@contextmanager
def _dashboard(url: str, keys: Keys) -> Iterator[str]:
    command = [*_streamrl("dashboard", url, keys), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().rpartition(" ")[2].strip()
        finally:
            process.terminate()
            process.wait(10)


def _streamrl(command: str, url: str, keys: Keys) -> list[str]:
    return [sys.executable, "-m", "streamrl.ops.cli.main", command, "--redis", url, "--run", keys.name]


def _status(url: str, keys: Keys, say: Say, *, num_rounds: int) -> Iterator[Line]:
    rounds = Rounds(
        {
            "import redis": process([sys.executable, "-c", "import redis"]),
            "status": process([*_streamrl("status", url, keys), "--json"], codes=EXIT_CODES.values()),
        },
        num_rounds=num_rounds,
    )
    more = rounds.median("status") - rounds.median("import redis")
    say(f"status: {more:.3f} s beyond the Redis client")
    yield Bar(name="status --json beyond import redis", value=more, unit="s", goal=0.25, better="lower")
    yield Fact(name="import redis", value=rounds.median("import redis"), unit="s")


def process(command: list[str], *, codes: Collection[int] = (0,)) -> Callable[[], float]:
    """Return what times the command; it raises if that exits with none of the codes."""

    def run() -> None:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode not in codes:
            raise ResourceError(f"{' '.join(command)} exited with {done.returncode}: {done.stderr.strip()[-2000:]}")

    return lambda: seconds(run)


def _load(server: EmbeddedRedis, there: Opened, say: Say, *, for_s: float) -> Iterator[Line]:
    """Compare the server's CPU use with and without a viewer."""
    there.client.delete(there.keys.progress)
    _report_all(there.client, there.keys, _WORKERS_OF_LOAD)
    watcher = Watcher(there.client, there.keys, server=there.server)
    watcher.look()
    idle = _server_cpu(server, lambda: None, for_s=for_s)
    watched = _server_cpu(server, lambda: watcher.look(), for_s=for_s)
    say(f"Redis: {100 * (watched - idle):.2f} % of a core")
    yield Bar(
        name="Redis's load by one top, 200 workers", value=100 * (watched - idle), unit="% core", goal=1, better="lower"
    )


def _server_cpu(server: EmbeddedRedis, look: Callable[[], object], *, for_s: float) -> float:
    """Return the server's share of a core while `look` runs as often as `top` does."""
    began, before = time.perf_counter(), cpu_s(server.pid)
    while (passed := time.perf_counter() - began) < for_s:
        look()
        time.sleep(min(_PERIOD_S, max(0.0, for_s - passed)))
    return (cpu_s(server.pid) - before) / (time.perf_counter() - began)
