"""T7: between hosts nothing moves on one link for half a minute, and nobody is told."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.faults.report import is_judged, report
from tests.helpers import wait_until
from tests.root.cluster import Cluster
from tests.root.conftest import MakeCluster

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
CUT_OFF_S = 30.0  # longer than replies are waited for, and than workers' leases
RESUMED_WITHIN_S = 5.0
UNDER_WAY = 3  # steps for which the learner may have had all it needs


def test_each_host_may_be_cut_off_and_goes_on_by_itself(
    make_cluster: MakeCluster, record_property: Callable[[str, object], None]
) -> None:
    cluster = make_cluster()
    cluster.start_redis("redis-0")
    cluster.start("reward", "reward-0")
    learner = cluster.start("learner", "learner-0")
    for host in ("worker-0", "worker-1"):
        cluster.start("worker", host)
    cluster.wait_for_steps(2)

    recoveries = {host: cut_off(cluster, host) for host in ("learner-0", "redis-0")}
    with cluster.world.cut_off("worker-0"):
        wait_for(CUT_OFF_S)
        before = cluster.delivered("worker-0")
        cluster.wait_for_steps(3)  # the other one does its part, too
    recoveries["worker-0"] = cluster.wait(
        lambda: cluster.delivered("worker-0") > before, description="it delivers again"
    )

    assert cluster.streamrl("operator", "drain", host="monitor-0").returncode == 0
    cluster.ends_well(learner, "learner-0")
    longest_s = max(recoveries.values())
    shown = ", ".join(f"{host} {seconds:.1f} s" for host, seconds in recoveries.items())
    record_property("figure", f"after {CUT_OFF_S:g} s without a link each goes on within: {shown}")
    report("T7 hosts", cluster.audit(), injections=3, recovery_s=longest_s, cut_off_s=CUT_OFF_S)
    assert longest_s <= RESUMED_WITHIN_S or not is_judged(), shown


def cut_off(cluster: Cluster, host: str) -> float:
    """One without which nothing goes on; seconds until it does, once its link is there again."""
    with cluster.world.cut_off(host):
        closed_at = cluster.step()
        wait_for(CUT_OFF_S)
        before = cluster.step()
    assert before <= closed_at + UNDER_WAY, "something came through"
    return cluster.wait(lambda: cluster.step() > before, description=f"{host} goes on")


def wait_for(seconds: float) -> None:
    until = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > until, description="the time is up", timeout_s=2 * seconds, poll_s=0.2)
