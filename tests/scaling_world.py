"""What scales workers in a cluster, on a clock controlled by the test: KEDA's operator and the autoscaler, modelled on
their sources.

    exporter's text ─► triggers ─► formula ─► Keda: none or some, every pollingInterval    ─► replicas
                                         └──► Autoscaler: how many, every 15 s             ─┘

Settings come from the rendered objects. Modelled on KEDA 2.20 (metrics_api_scaler.go, scale_scaledobjects.go) and
Kubernetes 1.33 (podautoscaler/horizontal.go): without a metric neither acts.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from tests.manifest_world import Object

SYNC_S = 15.0  # kube-controller-manager's --horizontal-pod-autoscaler-sync-period
_TOLERANCE = 0.1
_BY_DEFAULT = {
    "scaleUp": {
        "stabilizationWindowSeconds": 0,
        "policies": [
            {"type": "Pods", "value": 4, "periodSeconds": 15},
            {"type": "Percent", "value": 100, "periodSeconds": 15},
        ],
    },
    "scaleDown": {
        "stabilizationWindowSeconds": 300,
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
    },
}


def metric(text: str, selector: str) -> float | None:
    """Read `name` or `name{label="value"}` from an exporter's text; the first match, as in KEDA."""
    name, _, labels = selector.partition("{")
    wanted = dict(pair.split("=") for pair in labels.rstrip("}").split(",") if pair)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and all(sample.labels.get(key) == value.strip('"') for key, value in wanted.items()):
                return sample.value
    return None


def formula(text: str, values: Mapping[str, float]) -> float:
    """Evaluate sums and products of triggers, the only KEDA expressions that our scalers use."""
    operators = {ast.Add: operator.add, ast.Mult: operator.mul}

    def value(node: ast.expr) -> float:
        match node:
            case ast.BinOp(left=left, op=op, right=right):
                return operators[type(op)](value(left), value(right))
            case ast.Name(id=name):
                return values[name]
            case ast.Constant(value=float() | int() as number):
                return number
        raise AssertionError(f"{ast.unparse(node)}: no sum or product of triggers")

    return value(ast.parse(text, mode="eval").body)


@dataclass(slots=True, kw_only=True)
class Autoscaler:
    """An HPA with one external metric and a target average value."""

    most: int
    target: float
    behavior: Object
    _told: list[tuple[float, int]] = field(default_factory=list)  # (time, recommended replicas)
    _done: list[tuple[float, int]] = field(default_factory=list)  # (time, change of replicas)

    def sync(self, now: float, replicas: int, value: float | None) -> int:
        if replicas == 0 or value is None:
            return replicas
        wanted = replicas
        if abs(value / (self.target * replicas) - 1) > _TOLERANCE:
            wanted = math.ceil(value / self.target)
        bounded = self._paced(now, replicas, self._steady(now, replicas, wanted))
        new = max(1, min(self.most, bounded))
        if new != replicas:
            self._done.append((now, new - replicas))
        return new

    def _steady(self, now: float, replicas: int, wanted: int) -> int:
        def since(direction: str) -> list[int]:
            window_s = self._rule(direction)["stabilizationWindowSeconds"]
            return [wanted, *(count for at, count in self._told if at > now - window_s)]

        least, most = min(since("scaleUp")), max(since("scaleDown"))
        self._told.append((now, wanted))
        return min(max(replicas, least), most)

    def _paced(self, now: float, replicas: int, wanted: int) -> int:
        up = wanted > replicas
        sign = 1 if up else -1
        allowed = []
        for policy in self._rule("scaleUp" if up else "scaleDown")["policies"]:
            since = now - policy["periodSeconds"]
            before = replicas - sum(change for at, change in self._done if at > since and change * sign > 0)
            share = policy["value"] if policy["type"] == "Pods" else before * policy["value"] / 100
            allowed.append(math.ceil(before + sign * share) if up else math.floor(before + sign * share))
        return min(wanted, max(allowed)) if up else max(wanted, min(allowed))

    def _rule(self, direction: str) -> Object:
        return {**_BY_DEFAULT[direction], **self.behavior.get(direction, {})}


@dataclass(slots=True)
class Keda:
    """A ScaledObject: its own activation logic, and the autoscaler that it creates."""

    scaled: Object  # its spec
    autoscaler: Autoscaler = field(init=False)
    _active_at: float | None = None

    def __post_init__(self) -> None:
        advanced = self.scaled["advanced"]
        self.autoscaler = Autoscaler(
            most=self.scaled["maxReplicaCount"],
            target=float(advanced["scalingModifiers"]["target"]),
            behavior=advanced["horizontalPodAutoscalerConfig"]["behavior"],
        )

    @property
    def period_s(self) -> float:
        return float(self.scaled["pollingInterval"])

    def value(self, told: str) -> float | None:
        """Evaluate its formula; None if a trigger has no value."""
        found = {one["name"]: metric(told, one["metadata"]["valueLocation"]) for one in self.scaled["triggers"]}
        known = {name: value for name, value in found.items() if value is not None}
        return formula(self.scaled["advanced"]["scalingModifiers"]["formula"], known) if known == found else None

    def poll(self, now: float, replicas: int, value: float | None) -> int:
        if value is None:
            return replicas
        if value > float(self.scaled["advanced"]["scalingModifiers"].get("activationTarget", 0)):
            self._active_at = now
            return replicas or max(1, self.scaled["minReplicaCount"])
        if self._active_at is not None and now <= self._active_at + self.scaled["cooldownPeriod"]:
            return replicas
        return int(self.scaled["minReplicaCount"])
