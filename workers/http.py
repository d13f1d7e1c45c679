"""A worker's HTTP endpoint: /livez and /readyz for probes, /metrics for Prometheus.

Off unless enabled with `--http HOST:PORT`: a worker gets its work from Redis, where its report is as well, so it need
not listen. Port 0 takes any free port, so that several workers can share a machine; the report says which. It runs on
the worker's own event loop, so a hung loop answers no probe. Status 200: yes; 503: no, with the reasons as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamrl import web
from streamrl.process import address_of, bind
from streamrl.telemetry.progress import Detail
from streamrl.workers.health import Health


@contextlib.asynccontextmanager
async def serving(health: Health, address: tuple[str, int]) -> AsyncIterator[str]:
    """Serve for the lifetime of the context; yields the address as HOST:PORT."""
    bound = bind(*address, what="--http")
    async with web.serving(make_app(health), bound):
        yield address_of(bound)


def make_app(health: Health) -> Starlette:
    registry = CollectorRegistry()
    registry.register(_Figures(health))

    async def live(request: Request) -> Response:
        return _answer(health, health.against_alive())

    async def ready(request: Request) -> Response:
        return _answer(health, health.against_ready())

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/livez", live), Route("/readyz", ready), Route("/metrics", metrics)])


def _answer(health: Health, reasons: list[str]) -> Response:
    report = health.progress.report()
    return JSONResponse(
        {
            "ok": not reasons,
            "reasons": reasons,
            "part": report.part,
            "state": report.state,
            "doing": report.doing,
            "progress_age_s": round(health.progress_age_s(), 1),
        },
        status_code=503 if reasons else 200,
    )


class _Figures(Collector):
    """Computed at each scrape."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        health, parts = self._health, self._health.parts
        yield _gauge("progress_age_seconds", "seconds since the worker last made progress", health.progress_age_s())
        yield _gauge("tasks", "asyncio tasks: samples, groups and the worker's own", len(asyncio.all_tasks()))
        yield _gauge("ready", "1 if the worker can deliver groups", not health.against_ready())
        if parts is None:
            return
        detail = health.progress.report().detail
        counts = parts.work.counts
        yield _counter("groups_delivered", "groups delivered", counts.groups_delivered)
        yield _counter("groups_failed", "tickets reported as failed", counts.groups_failed)
        yield _counter("groups_late", "groups whose lease had gone to another worker", counts.groups_late)
        yield _counter("samples_failed", "samples that failed in generation or scoring", counts.samples_failed)
        yield _counter("versions_proved", "weight versions proved to be served", parts.weights.num_proved)
        yield _counter("engine_restarts", "engine restarts", int(detail.get("engine_restarts", 0)))
        yield _gauge("weights_step", "optimizer step of the weights being served", float(detail.get("step", 0)))
        yield _gauge(
            "weights_fetch_seconds",
            "seconds from announcement of a version until its bytes are here",
            _number(detail, "weights_fetch_s"),
        )
        yield _counter(
            "weights_bytes_store", "bytes of weights fetched from the store", _number(detail, "weights_from_store")
        )
        yield _counter(
            "weights_bytes_peers", "bytes of weights fetched from other hosts", _number(detail, "weights_from_peers")
        )
        yield _counter(
            "weights_bytes_host", "bytes of weights read from this host's share", _number(detail, "weights_from_host")
        )
        yield _gauge("scores_pending", "samples that wait for a score", parts.rewards.num_pending)
        if (stats := parts.work.engine_stats) is not None:
            yield _gauge("engine_tokens", "tokens generated since this engine's start", stats.num_made)
            yield _gauge("samples_in_flight", "samples in the engine", stats.in_flight)
            yield _gauge("samples_waiting", "samples in the engine that have not started", stats.num_waiting)
            yield _gauge("kv_cache_used", "share of the KV cache in use", stats.kv_used)
            accepted = stats.drafts_accepted or 0.0
            yield _gauge("drafts_accepted", "share of speculated tokens that are accepted, lately", accepted)


def _number(detail: Detail, name: str) -> float:
    return float(detail.get(name, 0))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"streamrl_worker_{name}", text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"streamrl_worker_{name}", text, value=value)
