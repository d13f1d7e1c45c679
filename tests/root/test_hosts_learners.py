"""T36: more and fewer hosts that learn: they meet at learner-0, and the run survives each of them."""

from __future__ import annotations

import subprocess
import time

import pytest

from tests.faults.report import report
from tests.root.cluster import Cluster
from tests.root.conftest import MakeCluster

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
HOSTS = ("learner-0", "learner-1")


def test_a_second_learners_host_joins_and_is_killed(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    learner = begin(cluster)
    cluster.start("learner", "learner-1")
    learn_together(cluster)
    cluster.world.kill("learner-1")
    cluster.wait_for_steps(5)
    end(cluster, {"learner-0": learner}, injections=2)


def test_when_the_host_where_they_meet_is_lost_all_come_again(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    begin(cluster)
    other = cluster.start("learner", "learner-1")
    learn_together(cluster)
    cluster.world.kill("learner-0")
    cluster.wait(lambda: other.poll() is not None, description="the other agent ends, and the Job makes its pod anew")
    assert other.returncode != 0
    learners = {host: cluster.start("learner", host) for host in HOSTS}
    learn_together(cluster)
    end(cluster, learners, injections=2)


def begin(cluster: Cluster) -> subprocess.Popen[bytes]:
    cluster.start_redis("redis-0")
    cluster.start("reward", "reward-0")
    learner = cluster.start("learner", "learner-0")
    cluster.start("worker", "worker-0")
    cluster.wait_for_steps(2)
    return learner


def learn_together(cluster: Cluster) -> None:
    def both_report() -> bool:
        reports, now = cluster.reports(), time.time()
        return all(host in reports and now - reports[host].at < 3.0 for host in HOSTS)

    cluster.wait(both_report, description="each learners' host has a rank")
    cluster.wait_for_steps(3)
    assert both_report()


def end(cluster: Cluster, learners: dict[str, subprocess.Popen[bytes]], *, injections: int) -> None:
    assert cluster.streamrl("operator", "drain", host="monitor-0").returncode == 0
    for host, learner in learners.items():
        cluster.ends_well(learner, host)
    audit = cluster.audit()
    report("T36 learners", audit, injections=injections)
    assert audit.trained > 0
