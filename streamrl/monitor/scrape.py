"""GET /metrics over plain HTTP, by the standard library: a scrape every few seconds needs no more.

Blocks until it is interrupted. Redis is looked at when somebody asks, at most once a second.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from streamrl.errors import TransportError
from streamrl.monitor.exporter import prometheus_text
from streamrl.monitor.opening import Opened
from streamrl.monitor.watcher import Watcher

_FRESH_S = 1.0
_SILENCE_S = 10.0


class Scraper:
    def __init__(self, there: Opened, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._watcher = Watcher(there.client, there.keys, server=there.server)
        self._run, self._clock = there.keys.name, clock
        self._lock = threading.Lock()
        self._text, self._until = "", 0.0

    def text(self) -> str:
        with self._lock:
            if self._clock() >= self._until:
                try:
                    self._watcher.look()
                    is_up = True
                except TransportError:
                    is_up = False
                self._text = prometheus_text(self._watcher.view, self._run, is_up=is_up)
                self._until = self._clock() + _FRESH_S
            return self._text


def make_server(scraper: Scraper, bound: socket.socket, *, silence_s: float = _SILENCE_S) -> ThreadingHTTPServer:
    """On a socket that is bound, which it closes. A connection may say nothing for `silence_s`."""

    class Handler(BaseHTTPRequestHandler):
        timeout = silence_s

        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = (scraper.text() if found else "see /metrics\n").encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A line for every scrape says nothing."""

    server = ThreadingHTTPServer(bound.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = bound
    server.server_activate()
    return server


def serve_metrics(there: Opened, bound: socket.socket, *, ready: Callable[[], None]) -> None:
    with make_server(Scraper(there), bound) as server:
        ready()
        server.serve_forever()
