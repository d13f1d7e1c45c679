"""GET /metrics over plain HTTP, by the standard library: a scrape every few seconds needs no more.

Blocks until it is interrupted. Redis is looked at when somebody asks, at most once a second.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from http.server import ThreadingHTTPServer

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from streamrl.errors import TransportError
from streamrl.monitor.exporter import RunFigures
from streamrl.monitor.opening import Opened
from streamrl.monitor.watcher import Watcher

_FRESH_S = 1.0
_SILENCE_S = 10.0


class Scraped(Collector):
    def __init__(self, there: Opened, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._watcher = Watcher(there.client, there.keys, server=there.server)
        self._run, self._clock = there.keys.name, clock
        self._lock = threading.Lock()
        self._is_up, self._until = False, 0.0

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            if self._clock() >= self._until:
                try:
                    self._watcher.look()
                    self._is_up = True
                except TransportError:
                    self._is_up = False
                self._until = self._clock() + _FRESH_S
            return RunFigures(self._watcher.view, self._run, is_up=self._is_up).collect()


def make_server(scraped: Scraped, bound: socket.socket, *, silence_s: float = _SILENCE_S) -> ThreadingHTTPServer:
    """On a socket that is bound, which it closes. A connection may say nothing for `silence_s`."""
    figures = CollectorRegistry()
    figures.register(scraped)

    class Handler(MetricsHandler):
        registry = figures
        timeout = silence_s

    server = ThreadingHTTPServer(bound.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = bound
    server.server_activate()
    return server


def serve_metrics(there: Opened, bound: socket.socket, *, ready: Callable[[], None]) -> None:
    with make_server(Scraped(there), bound) as server:
        ready()
        server.serve_forever()
