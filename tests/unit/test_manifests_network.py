"""k8s/: who may speak to whom by the rendered policies, against what the parts need."""

from __future__ import annotations

import pytest

from tests.manifest_world import OVERLAYS, Rendered, render
from tests.network_world import Peer, Policies

NAMES = 53
NOBODYS = 9999  # a port on which nothing listens
READERS = ("worker", "learner", "monitor", "dashboard")
FOREIGN = [Peer(namespace=name) for name in ("keda", "monitoring", "kube-system", "elsewhere")]
# From whom, to whom, on which port. What is not here may not be.
NEEDED = {
    *((reader, "redis", 6379) for reader in READERS),
    ("worker", "reward", 5555),
    *(("learner", "learner", port) for port in (29400, NOBODYS)),  # ranks open ports as they please
}
BY_SENTINEL = {
    *((one, "sentinel", 26379) for one in (*READERS, "redis", "sentinel")),
    *((one, "redis", 6379) for one in ("redis", "sentinel")),
}
BY_KEDA = {("keda", "monitor", 9464)}
BY_PEERS = {("worker", "worker", 9500)}
BY_PROMETHEUS = {("monitoring", "monitor", 9464), ("monitoring", "worker", 9400)}


@pytest.fixture(params=OVERLAYS)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(request.param)


def called(peer: Peer) -> str:
    return peer.component or peer.namespace


def test_who_must_speak_may_and_nobody_else(rendered: Rendered) -> None:
    policies = Policies(rendered)
    needed = set(NEEDED) | {(called(pod), "kube-system", NAMES) for pod in policies.pods}
    needed |= BY_KEDA if rendered.of_kind("ScaledObject") else set()
    named = {policy["metadata"]["name"] for policy in rendered.of_kind("NetworkPolicy")}
    needed |= BY_SENTINEL if "to-sentinel" in named else set()
    needed |= BY_PEERS if "to-peers" in named else set()
    needed |= BY_PROMETHEUS if rendered.of_kind("ServiceMonitor") else set()
    peers = [*policies.pods, *FOREIGN]
    may = {
        (called(source), called(target), port)
        for source in peers
        for target in peers
        for port in policies.ports | {NAMES, NOBODYS}
        if {source, target} & set(policies.pods) and policies.may(source, target, "TCP", port)
    }
    of_learners = {flow for flow in may if flow[:2] == ("learner", "learner")}
    assert needed <= may
    assert may - of_learners == needed - of_learners


def test_names_are_asked_for_by_datagrams_too(rendered: Rendered) -> None:
    policies = Policies(rendered)
    names, elsewhere = Peer(namespace="kube-system"), Peer(namespace="elsewhere")
    assert all(policies.may(pod, names, "UDP", NAMES) for pod in policies.pods)
    assert not any(policies.may(pod, elsewhere, "UDP", NAMES) for pod in policies.pods)


def test_every_port_of_a_needed_flow_is_one_on_which_the_target_listens(rendered: Rendered) -> None:
    policies = Policies(rendered)
    pods = {called(pod): pod for pod in policies.pods}
    flows = [flow for flow in NEEDED | BY_KEDA | BY_PROMETHEUS if flow[2] != NOBODYS]
    assert all(policies.listens(pods[target], port) for _, target, port in flows)
