"""Who may connect to whom under the rendered network policies, by Kubernetes' documented rules.

A pod that no policy selects for a direction is open in it; otherwise anything that one of its policies allows is
allowed. A connection needs both: egress at its source, ingress at its target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tests.manifest_world import COMPONENT, Object, Rendered

Direction = Literal["ingress", "egress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A pod of the run, or one in another namespace."""

    namespace: str
    component: str = ""


class Opening(NamedTuple):
    protocol: str
    port: int | None  # None: all ports


class Policies:
    def __init__(self, rendered: Rendered) -> None:
        self._specs = [one["spec"] for one in rendered.of_kind("NetworkPolicy")]
        templates = [workload["spec"]["template"] for workload in rendered.workloads]
        self._labels = {one["metadata"]["labels"][COMPONENT]: one["metadata"]["labels"] for one in templates}
        self._ports = {
            (container.pod, port["name"]): int(port["containerPort"])
            for container in rendered.containers()
            for port in container.spec.get("ports", ())
        }
        (self._namespace,) = {workload["metadata"]["namespace"] for workload in rendered.workloads}

    @property
    def pods(self) -> list[Peer]:
        return [Peer(namespace=self._namespace, component=component) for component in self._labels]

    @property
    def ports(self) -> set[int]:
        """The ports on which some pod listens."""
        return set(self._ports.values())

    def listens(self, pod: Peer, port: int) -> bool:
        return port in {own for (component, _), own in self._ports.items() if component == pod.component}

    def may(self, source: Peer, target: Peer, protocol: str, port: int) -> bool:
        ways: tuple[tuple[Direction, Peer, Peer], ...] = (("egress", source, target), ("ingress", target, source))
        openings = [self.openings(direction, pod, peer) for direction, pod, peer in ways]
        return all(found is None or found & {(protocol, port), (protocol, None)} for found in openings)

    def openings(self, direction: Direction, pod: Peer, peer: Peer) -> set[Opening] | None:
        """Return what the pod's policies allow to or from that peer; None if nothing restricts the pod."""
        if pod.namespace != self._namespace:
            return None
        selecting = [
            spec
            for spec in self._specs
            if direction.capitalize() in spec["policyTypes"] and _matches(spec["podSelector"], self._labels_of(pod))
        ]
        rules = [rule for spec in selecting for rule in spec.get(direction, ())]
        side, target = ("from", pod) if direction == "ingress" else ("to", peer)
        fitting = [rule for rule in rules if side not in rule or any(self._is(one, peer) for one in rule[side])]
        return {one for rule in fitting for one in self._opened(rule, target)} if selecting else None

    def _opened(self, rule: Object, target: Peer) -> list[Opening]:
        if "ports" not in rule:
            return [Opening("TCP", None), Opening("UDP", None)]
        found = [(port.get("protocol", "TCP"), port["port"]) for port in rule["ports"]]
        numbers = [(protocol, self._ports.get((target.component, port), port)) for protocol, port in found]
        return [Opening(protocol, port) for protocol, port in numbers if isinstance(port, int)]

    def _is(self, named: Object, peer: Peer) -> bool:
        assert set(named) <= {"podSelector", "namespaceSelector"}, f"{named}: not known here"
        if "namespaceSelector" in named:
            in_namespace = _matches(named["namespaceSelector"], {"kubernetes.io/metadata.name": peer.namespace})
        else:
            in_namespace = peer.namespace == self._namespace
        return in_namespace and _matches(named.get("podSelector", {}), self._labels_of(peer))

    def _labels_of(self, peer: Peer) -> Mapping[str, str]:
        return self._labels.get(peer.component, {}) if peer.namespace == self._namespace else {}


def _matches(selector: Object, labels: Mapping[str, str]) -> bool:
    expressions = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in expressions), f"{selector}: not known here"
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )
