"""T36: a run on hosts of its own, started by the very words of the manifests, from the first pod to the last."""

from __future__ import annotations

import json

import pytest

from tests.faults.report import report
from tests.root.conftest import MakeCluster

pytestmark = [pytest.mark.root, pytest.mark.timeout(420)]
STEPS = 300  # half a minute: who comes late needs ten seconds


def test_a_run_is_trained_while_a_workers_host_is_lost_and_another_comes_late(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps=STEPS)
    cluster.start_redis("redis-0")
    for name in ("reward", "monitor"):
        cluster.start(name, f"{name}-0")
    learner = cluster.start("learner", "learner-0")
    cluster.start("worker", "worker-0")
    stays = cluster.start("worker", "worker-1")
    for host in ("reward-0", "worker-0", "worker-1", "monitor-0"):
        cluster.wait_until_ready(host.partition("-")[0], host)
    cluster.wait_for_steps(2)

    cluster.world.lose("worker-0")
    assert cluster.step() < STEPS / 2, "the run has most of its way before it"
    comes_late = cluster.start("worker", "worker-2")
    cluster.wait(lambda: cluster.delivered("worker-2") > 0, description="who came late delivers")

    cluster.ends_well(learner, "learner-0")
    cluster.ends_well(stays, "worker-1")
    cluster.ends_well(comes_late, "worker-2")
    audit = cluster.audit()
    report("T36 workers", audit, injections=2)
    assert (audit.step, audit.lost, audit.twice) == (STEPS, 0, 0)
    seen = json.loads(cluster.streamrl("monitor", "status", "--json", host="monitor-0").stdout)
    assert (seen["run"]["state"], seen["run"]["step"]) == ("finished", STEPS)
    assert cluster.denied() == [], "the users of the roles are enough"
