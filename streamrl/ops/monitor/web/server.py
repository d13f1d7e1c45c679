"""The dashboard's application, served by `streamrl.web`. The only module of `ops` that imports starlette.

Requests read what one background thread has seen (`poller`), so a hundred readers cost Redis no more than one. `guard`
decides who is answered.

It also keeps what nobody else records: what workers did over time, and which weights they served. Its size is bounded:
when it grows too large, the samples are thinned. One thread adds while others read.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamrl.ops.monitor.charts import Chart, Points, charts_of, marks_of, points_of
from streamrl.ops.monitor.exporter import make_registry
from streamrl.ops.monitor.history import History, thin
from streamrl.ops.monitor.poller import Poller, watch
from streamrl.ops.monitor.remains import Remains
from streamrl.ops.monitor.rollouts import rollouts_of
from streamrl.ops.monitor.runs import Opened
from streamrl.ops.monitor.view import View, WorkerStatus
from streamrl.ops.monitor.web.guard import Guard, headers_for
from streamrl.telemetry.metrics import FAMILIES, METRICS, meaning


class Dashboard:
    def __init__(self, source: Opened | Remains, guard: Guard, *, period_s: float = 1.0) -> None:
        self._guard = guard
        self._watcher, self._groups = watch(source), rollouts_of(source)
        self._trace = ActivityTrace()
        self._poller = Poller(self._watcher, period_s=period_s, on_look=self._trace.add)
        self._figures = make_registry(source.name, lambda: self._poller.seen)
        self._history: bytes = b"{}"  # the encoded response, renewed when there is something new
        self._history_of: tuple[int, str, int] | None = None  # the state of the history that it shows
        self._page = read_page()
        self._headers = headers_for(self._page)

    def app(self) -> Starlette:
        @contextlib.asynccontextmanager
        async def looking(app: Starlette) -> AsyncIterator[None]:
            await run_in_threadpool(self._poller.look)
            with self._poller.looking():
                yield

        routes = [
            Route("/", self._index),
            Route("/api/view", self._view),
            Route("/api/history", self._curves),
            Route("/api/rollouts", self._rollouts),
            Route("/api/rollouts/{entry_id}", self._rollout),
            Route("/metrics", self._metrics),
        ]
        middleware = [
            Middleware(BaseHTTPMiddleware, dispatch=self._authorize),
            Middleware(GZipMiddleware, minimum_size=2000),
        ]
        return Starlette(routes=routes, lifespan=looking, middleware=middleware)

    async def _authorize(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        # Use the routed path: a Host header can change the one in `request.url`.
        refusal = self._guard.refusal(request.scope["path"], request.headers)
        response = _json({"error": refusal.reason}, status=refusal.status) if refusal else await call_next(request)
        response.headers.update(self._headers)
        return response

    async def _index(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html; charset=utf-8")

    async def _view(self, request: Request) -> Response:
        seen = self._poller.seen
        view = seen.view.to_json() if seen.view else None
        return _json({"view": view, "error": seen.error, **self._trace.to_json()})

    async def _curves(self, request: Request) -> Response:
        if (steps := _requested_steps(request)) is not None:
            return _json(await run_in_threadpool(curves, self._watcher.history, steps))
        records = self._watcher.history.steps.records
        newest = (len(records), records[-1].id if records else "", len(self._watcher.history.validations.records))
        if newest != self._history_of:
            self._history = await run_in_threadpool(lambda: json.dumps(curves(self._watcher.history)).encode())
            self._history_of = newest
        return Response(self._history, media_type="application/json")

    async def _rollouts(self, request: Request) -> Response:
        found = await run_in_threadpool(self._groups.latest)
        return _json([asdict(rollout) for rollout in found])

    async def _rollout(self, request: Request) -> Response:
        found = await run_in_threadpool(self._groups.to_json, request.path_params["entry_id"])
        return _json(found) if found else _json({"error": "this group has been committed in the meantime"}, status=404)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._figures), media_type=CONTENT_TYPE_LATEST)


def read_page() -> str:
    """Read the page, a single file that loads nothing else, with its script and the metrics' descriptions filled in."""
    folder = Path(__file__).parent
    page = (folder / "index.html").read_text(encoding="utf-8")
    page = page.replace("/* charts.js */", (folder / "charts.js").read_text(encoding="utf-8"))
    return page.replace("{/* meanings */}", json.dumps({name: meaning(name) for name in (*FAMILIES, *METRICS)}))


def _requested_steps(request: Request) -> range | None:
    """Return the requested steps; None: all."""
    query = request.query_params
    try:
        return range(int(query["from"]), int(query.get("to") or _NO_STEP)) if "from" in query else None
    except ValueError:
        return None


def curves(history: History, steps: range | None = None) -> dict[str, Any]:
    """Return {newest: step, charts: [{name, title, unit, stacked, series: {label: [[step, value], ..]}, marks: in the
    same form, meanings: {label: [metric, text]}}]}"""
    records = history.steps.records
    charts = [_chart(history, chart, steps) for chart in charts_of(history)]
    return {"newest": records[-1].step if records else 0, "charts": charts}


def _chart(history: History, chart: Chart, steps: range | None) -> dict[str, Any]:
    def shown(found: Mapping[str, Points]) -> dict[str, Points]:
        return {
            label: _rounded([p for p in points if steps is None or p[0] in steps]) for label, points in found.items()
        }

    return {
        "name": chart.name,
        "title": chart.title,
        "unit": chart.unit,
        "stacked": chart.is_stacked,
        "series": shown(points_of(chart, history)),
        "marks": shown(marks_of(chart, history)),
        "meanings": {label: [name, meaning(name)] for label, name in {**chart.series, **chart.marks}.items()},
    }


def _rounded(points: Points) -> Points:
    return [(step, float(f"{value:.6g}")) for step, value in thin(points)]


def _json(value: Any, *, status: int = 200) -> Response:
    return Response(json.dumps(value), status_code=status, media_type="application/json")


_NO_STEP = 1 << 62  # larger than any step
_MAX_SAMPLES = 600
_MAX_CHANGES = 200  # of version, per worker
_MAX_WORKERS = 60


class ActivityTrace:
    def __init__(self) -> None:
        self._doing: list[tuple[float, Counter[str]]] = []
        self._versions: dict[str, list[tuple[float, str]]] = {}
        self._living: set[str] = set()  # workers, at the last look
        self._every, self._skipped = 1, 0
        self._lock = threading.Lock()

    def add(self, view: View) -> None:
        with self._lock:
            self._skipped += 1
            if self._skipped >= self._every:
                self._skipped = 0
                self._doing.append((view.at, Counter(_cause(worker) for worker in view.workers)))
                if len(self._doing) > _MAX_SAMPLES:
                    del self._doing[::2]
                    self._every *= 2
            self._living = {worker.part.name for worker in view.workers if worker.part.alive}
            for worker in view.workers:
                if worker.part.alive and worker.version is not None and self._make_room(worker.part.name):
                    changes = self._versions.setdefault(worker.part.name, [])
                    if not changes or changes[-1][1] != worker.version:
                        changes.append((view.at, worker.version))
                        del changes[:-_MAX_CHANGES]

    def _make_room(self, worker: str) -> bool:
        """Return whether its versions can be kept, if need be in place of those of a worker that is gone."""
        if worker not in self._versions and len(self._versions) >= _MAX_WORKERS:
            gone = next((name for name in self._versions if name not in self._living), None)
            if gone is None:
                return False
            del self._versions[gone]
        return True

    def to_json(self) -> dict[str, Any]:
        """Return the versions of living workers first: the page draws only some."""
        with self._lock:
            served = sorted(self._versions.items(), key=lambda item: (item[0] not in self._living, item[0]))
            causes = sorted({cause for _, counts in self._doing for cause in counts})
            return {
                "idle": {
                    "at": [at for at, _ in self._doing],
                    "series": {cause: [counts[cause] for _, counts in self._doing] for cause in causes},
                },
                "versions": {name: list(changes) for name, changes in served},
            }


def _cause(worker: WorkerStatus) -> str:
    part = worker.part
    if part.state == "waiting":
        return f"waits for {part.doing}"
    return {"silent": "silent", "working": "works"}.get(part.state, part.state)
