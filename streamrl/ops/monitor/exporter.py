"""Exports a run's metrics to Prometheus.

    streamrl_up                     Redis answers; everything else is from the last time that it did
    streamrl_metric{name="lag/mean"} every metric of the last step and validation (telemetry.metrics)
    streamrl_*                      the contents of a View: parts, streams, drops, causes

A test checks that the alert rules and the Grafana dashboard use only what is exported.

GET /metrics over plain HTTP; the standard library's server is enough for a scrape every few seconds.

Blocks until interrupted. A scrape never waits for Redis: a thread looks at it once a second, even before it exists, as
when all parts of a run start at once.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.server import ThreadingHTTPServer

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamrl.ops.monitor.evidence import alive
from streamrl.ops.monitor.poller import ConnectingWatcher, LatestView, Poller
from streamrl.ops.monitor.runs import Target
from streamrl.ops.monitor.view import EXIT_CODES, View


def make_registry(run: str, look: Callable[[], LatestView]) -> CollectorRegistry:
    """Return a registry that shows what was last seen."""
    registry = CollectorRegistry()
    registry.register(_RunFigures(run, look))
    return registry


class _RunFigures(Collector):
    def __init__(self, run: str, look: Callable[[], LatestView]) -> None:
        self._run, self._look = run, look
        self._uid: str | None = None  # uid of the run last seen under this name
        self._largest: dict[str, int] = {}  # the largest value exported, by counter

    def collect(self) -> Iterator[Metric]:
        seen = self._look()
        is_up = not seen.error and (seen.view is None or seen.view.run.folder is None)
        yield self._one("streamrl_up", "Redis answers", is_up)
        if seen.view is not None:
            yield from self._parts(seen.view)
            yield from self._flow(seen.view)

    def _parts(self, view: View) -> Iterator[Metric]:
        run, lead, workers = view.run, view.learner.lead, alive(view)
        health = EXIT_CODES[view.verdict]
        yield self._one("streamrl_health", "0 healthy, 3 degraded, 4 stalled, 5 ended: the exit code of status", health)
        causes: dict[tuple[str, ...], float] = {(cause.name, cause.level): 1.0 for cause in view.causes}
        yield self._family(
            "streamrl_cause", "1 if this cause holds the run back now (streamrl why)", causes, "cause", "level"
        )
        yield self._one("streamrl_running", "the run has not ended", run.state == "running")
        yield self._one("streamrl_step", "optimizer steps", run.step)
        yield self._one("streamrl_term", "term of the learner", run.term)
        yield self._one("streamrl_learner_up", "rank 0 reports", lead is not None and lead.alive)
        progress_s = lead.progress_s if lead else None
        yield self._one(
            "streamrl_learner_progress_age_seconds", "seconds since the learner last made progress", progress_s
        )
        doing = Counter(worker.part.state for worker in view.workers)
        yield self._by("streamrl_workers", "workers by state", "state", doing)
        speeds = {worker.part.name: worker.tokens_per_s or 0.0 for worker in workers}
        yield self._by("streamrl_worker_tokens_per_second", "tokens generated per second", "worker", speeds)
        lags = {worker.part.name: worker.lag for worker in workers}
        yield self._by("streamrl_worker_lag_steps", "how many steps its weights are behind the newest", "worker", lags)
        yield self._one(
            "streamrl_lag_bound_steps", "lag.max_steps: how old tokens may usually be", view.limits.max_lag_steps
        )
        yield self._one("streamrl_workers_behind", "workers that serve old weights", view.weights.behind)
        errors: dict[tuple[str, ...], float] = {
            (source.name, worker.part.name): float(count)
            for source in view.rewards
            for worker in workers
            if isinstance(count := worker.detail.get(f"rewards/{source.name}/failed", 0), int | float)
        }
        yield self._family("streamrl_reward_errors_total", "errors of reward sources", errors, "source", "worker")
        latencies = {source.name: source.latency_s for source in view.rewards}
        yield self._by("streamrl_reward_latency_seconds", "latency of reward sources", "source", latencies)

    def _flow(self, view: View) -> Iterator[Metric]:
        tickets = {stream.purpose: stream.tickets for stream in view.streams}
        yield self._by("streamrl_tickets", "tickets issued and not delivered", "purpose", tickets)
        leased = {stream.purpose: stream.leased for stream in view.streams}
        yield self._by("streamrl_leased_tickets", "tickets leased by workers", "purpose", leased)
        groups = {stream.purpose: stream.groups for stream in view.streams}
        yield self._by("streamrl_groups", "groups delivered and not committed", "purpose", groups)
        group_bytes = {stream.purpose: stream.group_bytes for stream in view.streams}
        yield self._by("streamrl_group_bytes", "bytes of these groups", "purpose", group_bytes)
        oldest_s = view.train.oldest_s
        yield self._one("streamrl_oldest_lease_seconds", "seconds since the oldest leased ticket was issued", oldest_s)
        trained = self._monotonic(view, "trained", view.drops.trained)
        yield self._one("streamrl_groups_trained_total", "groups trained", trained)
        dropped = {why: self._monotonic(view, f"dropped/{why}", n) for why, n in view.drops.by_reason.items()}
        yield self._by("streamrl_groups_dropped_total", "groups dropped", "reason", dropped)
        yield self._one("streamrl_dead_letters", "dead letters", view.dead.count)
        yield self._one(
            "streamrl_weights_age_seconds", "seconds since the newest version was published", view.weights.age_s
        )
        yield self._one("streamrl_redis_used_bytes", "memory used by Redis", view.redis.used_bytes)
        yield self._one("streamrl_redis_max_bytes", "Redis' maxmemory; 0 for none", view.redis.max_bytes)
        metrics = {**view.learner.validation, **view.learner.metrics}
        yield self._by("streamrl_metric", "a metric of the last step, or validation", "name", metrics)

    def _monotonic(self, view: View, name: str, count: int) -> int:
        """Keep a counter from falling. A restarted learner counts on from its checkpoint, and Prometheus would take the
        lower value for a reset and add all of it again."""
        if self._uid != view.run.uid:
            self._uid, self._largest = view.run.uid, {}
        self._largest[name] = max(count, self._largest.get(name, 0))
        return self._largest[name]

    def _one(self, name: str, help: str, value: float | None) -> Metric:
        return self._family(name, help, {(): value})

    def _by(self, name: str, help: str, label: str, values: Mapping[str, float | None]) -> Metric:
        return self._family(name, help, {(text,): value for text, value in values.items()}, label)

    def _family(self, name: str, help: str, values: Mapping[tuple[str, ...], float | None], *labels: str) -> Metric:
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        metric = kind(name, help, labels=("run", *labels))
        for texts, value in values.items():
            if value is not None:
                metric.add_metric((self._run, *texts), float(value))
        return metric


_LOOK_EVERY_S = 1.0
_SILENCE_S = 10.0


def make_server(
    figures: CollectorRegistry, bound: socket.socket, *, silence_s: float = _SILENCE_S
) -> ThreadingHTTPServer:
    """Serve on a bound socket, and close it at the end. A connection may be idle for `silence_s`."""

    class Handler(MetricsHandler):
        registry = figures
        timeout = silence_s

    server = ThreadingHTTPServer(bound.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = bound
    server.server_activate()
    return server


def serve_metrics(target: Target, bound: socket.socket, *, ready: Callable[[str], None]) -> None:
    """Serve until interrupted. `ready` gets the reason why Redis cannot be seen; empty if it can."""
    with ConnectingWatcher(target) as watcher:
        poller = Poller(watcher, period_s=_LOOK_EVERY_S)
        poller.look()
        figures = make_registry(target.run, lambda: poller.seen)
        with poller.looking(), make_server(figures, bound) as server:
            ready(poller.seen.error)
            server.serve_forever()
