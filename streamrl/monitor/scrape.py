"""GET /metrics over plain HTTP: a scrape every few seconds needs no more than the server of the standard library.

Blocks until it is interrupted. A scrape never waits for Redis: a thread looks at it once a second.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from http.server import ThreadingHTTPServer

from prometheus_client import CollectorRegistry, MetricsHandler

from streamrl.monitor.exporter import make_registry
from streamrl.monitor.looker import Looker
from streamrl.monitor.opening import Opened
from streamrl.monitor.watcher import Watcher

_LOOK_EVERY_S = 1.0
_SILENCE_S = 10.0


def make_server(
    figures: CollectorRegistry, bound: socket.socket, *, silence_s: float = _SILENCE_S
) -> ThreadingHTTPServer:
    """On a socket that is bound, which it closes. A connection may say nothing for `silence_s`."""

    class Handler(MetricsHandler):
        registry = figures
        timeout = silence_s

    server = ThreadingHTTPServer(bound.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = bound
    server.server_activate()
    return server


def serve_metrics(there: Opened, bound: socket.socket, *, ready: Callable[[], None]) -> None:
    looker = Looker(Watcher(there.client, there.keys, server=there.server), period_s=_LOOK_EVERY_S)
    looker.look()
    figures = make_registry(there.keys.name, lambda: looker.seen)
    with looker.looking(), make_server(figures, bound) as server:
        ready()
        server.serve_forever()
