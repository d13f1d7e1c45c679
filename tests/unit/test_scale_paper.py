"""Arithmetic on measured costs, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.scale_paper import Cluster, on_paper
from bench.scale_run import Costs, Saturated, Seen
from streamrl.protocol.wire.group import Group
from tests.helpers import make_group, make_sample, make_ticket

MEASURED = Saturated(
    groups_per_s=500.0,
    redis_load=0.2,
    learner_load=0.3,
    idle_load=0.01,
    costs=Costs(redis=0.0004, rank0=0.0002, ranks=0.0001, workers=0.0003),
)


def test_the_costs_of_a_group_and_of_waiting_workers_add_up() -> None:
    cluster = Cluster(num_gpus=16384, generating=0.5, gpus_a_worker=8, tokens_per_s=2000.0)
    found = {line.name: line.value for line in on_paper(MEASURED, num_workers=100, cluster=cluster)}
    # 8,192 GPUs x 2,000 tokens/s / 16,384 tokens a group; 1,024 workers that cost 0.0001 of a core each
    assert found["on paper: groups"] == pytest.approx(1000.0)
    assert found["on paper: workers"] == 1024
    assert found["on paper: Redis"] == pytest.approx(100 * (1000 * 0.0004 + 1024 * 0.0001))
    assert found["on paper: rank 0"] == pytest.approx(20.0)
    assert found["on paper: GPUs that generate at Redis' limit"] == pytest.approx(8192 / 0.5024)


def groups_by(*workers: str) -> Sequence[Group]:
    return [
        make_group(make_ticket(number), samples=(make_sample(),), worker=worker)
        for number, worker in enumerate(workers)
    ]


def test_work_that_one_worker_gets_alone_is_uneven() -> None:
    even, uneven = Seen(), Seen()
    even.note(3, groups_by("a", "b", "c", "d") * 5)
    uneven.note(3, groups_by("a", "a", "a", "a") * 5)
    assert even.evenness(4) > 1.0
    assert uneven.evenness(4) == pytest.approx(0.25 * 23 / 20)
    assert even.lags == [3] * 20
