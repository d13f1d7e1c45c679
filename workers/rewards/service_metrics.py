"""What the reward server counts for Prometheus, in a registry of its own: several may live in one process."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class ServiceMetrics:
    def __init__(self, *, pending_rows: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "streamrl_reward_requests", "Requests for scores, by status.", ["status"], registry=self._registry
        )
        self.rows = Counter("streamrl_reward_rows", "Rows scored.", registry=self._registry)
        self.tokens = Counter("streamrl_reward_tokens", "Tokens of the rows scored.", registry=self._registry)
        self.seconds = Histogram(
            "streamrl_reward_request_seconds",
            "Time from a request's arrival to its answer.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        pending = Gauge("streamrl_reward_pending_rows", "Rows that wait for a batch.", registry=self._registry)
        pending.set_function(pending_rows)

    def text(self) -> bytes:
        return generate_latest(self._registry)
