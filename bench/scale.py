"""The limits of one Redis and one rank 0: one to two thousand simulated workers, groups of 8 samples of 2,048 tokens.

    Size.saturated ─► CPU cost per group and part ─► the bottleneck, and what would move it
    Size.paced     ─► starvation, lag and evenness at half of that rate
                      └──► on paper: the same costs at ten thousand GPUs (bench.scale_paper)

Workers and learner have no models; streams, scripts, feed, codec and checks are the real ones.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence

from bench.measure import Say
from bench.report import Bar, Fact, Line
from bench.scale_paper import Cluster, on_paper
from bench.scale_run import Paced, Saturated, Size
from streamrl.config import schema
from streamrl.errors import ResourceError, TrainingError
from streamrl.held_folders import scratch_folder
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis

_SIZES = (1, 8, 64, 256, 1000, 2000)
_QUICK_SIZES = (1, 64)
_PACE = 0.5  # fraction of the saturated rate
_DESCRIPTORS_A_WORKER = 4


def bench(*, quick: bool, say: Say) -> list[Line]:
    sizes = _QUICK_SIZES if quick else _SIZES
    _allow_connections(_DESCRIPTORS_A_WORKER * sizes[-1])
    lines: list[Line] = []
    found: list[tuple[int, Saturated]] = []
    with (
        scratch_folder() as folder,
        EmbeddedRedis.start(folder / "redis") as server,
        connect(server.url, schema.Redis()) as client,
    ):
        for num_workers in sizes:
            try:
                most, paced = _measure(Size(server, client, num_workers), quick=quick, say=say)
            except (TrainingError, ResourceError) as error:
                if not found:
                    raise
                say(f"{num_workers:,} workers are too many here: {error}")
                lines.append(Fact(name="broke with workers", value=num_workers, unit=""))
                break
            lines += _of_size(num_workers, most, paced)
            found.append((num_workers, most))
    lines += _limits(found)
    lines += on_paper(found[-1][1], num_workers=found[-1][0], cluster=Cluster())
    return lines


def _measure(size: Size, *, quick: bool, say: Say) -> tuple[Saturated, Paced]:
    most = size.saturated(for_s=2.0 if quick else 8.0)
    say(f"{size.num_workers:,} workers: {most.groups_per_s:.0f} groups/s; paced at {_PACE:g} of that")
    return most, size.paced(groups_per_s=_PACE * most.groups_per_s, for_s=5.0 if quick else 20.0)


def _allow_connections(wanted: int) -> None:
    """Raise the limit for this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ResourceError(f"only {hard} files may be open here, and this bench needs {wanted}: raise `ulimit -Hn`")
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _of_size(num_workers: int, most: Saturated, paced: Paced) -> Iterator[Line]:
    name = f"{num_workers:,} workers"
    yield Fact(name=f"{name}: at most", value=most.groups_per_s, unit="groups/s")
    yield Fact(name=f"{name}: Redis then", value=100 * most.redis_load, unit="% core")
    yield Fact(name=f"{name}: learner then", value=100 * most.learner_load, unit="% core")
    yield Fact(name=f"{name}: Redis with nothing to do", value=100 * most.idle_load, unit="% core")
    yield Fact(name=f"{name}: paced", value=paced.groups_per_s, unit="groups/s")
    yield Fact(name=f"{name}: Redis then, paced", value=100 * paced.redis_load, unit="% core")
    starved, evenness = 100 * paced.starved, paced.evenness
    yield Bar(name=f"{name}: learner starved, paced", value=starved, unit="% time", goal=5, better="lower")
    yield Fact(name=f"{name}: learner's calls to Redis, paced", value=100 * paced.in_calls, unit="% time")
    yield Fact(name=f"{name}: of these, for a group", value=1e3 * paced.calls_s, unit="ms")
    yield Fact(name=f"{name}: lag in the mean", value=paced.lag_mean, unit="steps")
    yield Fact(name=f"{name}: lag at most", value=paced.lag_max, unit="steps")
    yield Bar(name=f"{name}: evenness, paced", value=evenness, unit="x", goal=0.9, better="higher")


def _limits(found: Sequence[tuple[int, Saturated]]) -> Iterator[Line]:
    """Yield each part's rate if it had its own core; the lowest is the bottleneck."""
    num_workers, most = found[-1]
    alone = {"Redis": most.costs.redis, "rank 0": most.costs.rank0, "one rank of the learner": most.costs.ranks}
    for part, cost in alone.items():
        yield Fact(name=f"{part} alone would carry", value=1 / cost, unit="groups/s")
    first = found[0][1].groups_per_s
    yield Fact(name=f"{num_workers:,} workers / {found[0][0]} worker", value=most.groups_per_s / first, unit="x")
