"""T10: the host of Redis is lost, and its name is pointed at a replica elsewhere that has missed the last writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.report import report
from tests.root.cluster import Cluster
from tests.root.conftest import MakeCluster

pytestmark = [pytest.mark.root, pytest.mark.timeout(420)]


def test_a_replica_that_missed_the_last_writes_takes_over(
    make_cluster: MakeCluster, record_property: Callable[[str, object], None]
) -> None:
    cluster = make_cluster()
    world = cluster.world
    cluster.start_redis("redis-0")
    cluster.start_redis("redis-1", replica_of="redis-0.redis")
    cluster.start("reward", "reward-0")
    learner = cluster.start("learner", "learner-0")
    for host in ("worker-0", "worker-1"):
        cluster.start("worker", host)
    cluster.wait_for_steps(6)

    with world.cut_off("redis-1"):
        cluster.wait_for_steps(6)  # beyond a checkpoint
        missed = written(cluster, "redis-0") - written(cluster, "redis-1")
        world.lose("redis-0")
    with cluster.admin("redis-1") as admin:
        admin.replicaof("NO", "ONE")
    world.point("redis", "redis-1")
    recovery_s = cluster.wait_for_steps(1)
    cluster.wait_for_steps(5)

    assert cluster.streamrl("operator", "drain", host="monitor-0").returncode == 0
    cluster.ends_well(learner, "learner-0")
    record_property("figure", f"a step {recovery_s:.1f} s after the name led elsewhere; {missed:,} bytes missed")
    assert missed > 0
    audit = cluster.audit("redis-1")
    report("T10 hosts", audit, injections=1, recovery_s=recovery_s, missed_bytes=missed)
    assert cluster.denied("redis-1") == []


def written(cluster: Cluster, host: str) -> int:
    """Bytes of commands that changed something, of those that it knows."""
    with cluster.admin(host) as admin:
        found = admin.info("replication")
    return int(found["master_repl_offset"])
