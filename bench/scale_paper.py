"""Extrapolates the measured costs to a cluster that is not available: arithmetic, with its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.report import Fact, Line
from bench.scale_run import SHAPE, Saturated

_BYTES_A_TOKEN = 8  # an id and a logprob; headers are negligible


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Assumptions, not measurements."""

    num_gpus: int = 10_000
    generating: float = 0.75  # fraction of the GPUs
    gpus_a_worker: int = 8
    tokens_per_s: float = 2_000.0  # per generating GPU: a model of about 7B, answers of some thousand tokens


def on_paper(most: Saturated, *, num_workers: int, cluster: Cluster) -> Iterator[Line]:
    group_tokens = SHAPE.num_samples * SHAPE.num_tokens
    generating = cluster.num_gpus * cluster.generating
    ranks = cluster.num_gpus - generating
    workers = generating / cluster.gpus_a_worker
    groups_per_s = generating * cluster.tokens_per_s / group_tokens
    idle = most.idle_load / num_workers * workers
    yield Fact(name="on paper: GPUs (assumed)", value=cluster.num_gpus, unit="")
    yield Fact(name="on paper: of them generate (assumed)", value=100 * cluster.generating, unit="%")
    yield Fact(name="on paper: tokens/s of each (assumed)", value=cluster.tokens_per_s, unit="")
    yield Fact(name="on paper: tokens of a group", value=group_tokens, unit="")
    yield Fact(name="on paper: workers", value=workers, unit="")
    yield Fact(name="on paper: groups", value=groups_per_s, unit="groups/s")
    yield Fact(
        name="on paper: into Redis, and out", value=groups_per_s * group_tokens * _BYTES_A_TOKEN / 1e6, unit="MB/s"
    )
    yield Fact(name="measured: Redis' CPU for a group", value=1e3 * most.costs.redis, unit="ms")
    yield Fact(name="measured: rank 0's CPU for a group", value=1e3 * most.costs.rank0, unit="ms")
    yield Fact(name="measured: the ranks' CPU for a group", value=1e3 * most.costs.ranks, unit="ms")
    yield Fact(name="measured: Redis' CPU for a waiting worker", value=1e6 * most.idle_load / num_workers, unit="us/s")
    yield Fact(name="on paper: Redis", value=100 * (groups_per_s * most.costs.redis + idle), unit="% core")
    yield Fact(name="on paper: rank 0", value=100 * groups_per_s * most.costs.rank0, unit="% core")
    yield Fact(name="on paper: each other rank", value=100 * groups_per_s * most.costs.ranks / ranks, unit="% core")
    per_gpu = groups_per_s / generating * most.costs.redis + most.idle_load / num_workers / cluster.gpus_a_worker
    yield Fact(name="on paper: GPUs that generate at Redis' limit", value=1 / per_gpu, unit="")
