"""uvicorn as all our servers run it: on a socket that is already bound, without logs, with a callback once it listens,
and with bounds on what a connection may send, and how slowly, before its request is complete.

Importing this requires starlette and uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from streamrl.errors import ResourceError
from streamrl.process import address_of
from streamrl.tasks import close_server


class Connection(H11Protocol):
    """Closes if a request's head is not complete in time. h11 limits heads to 16 KB; the other parser, httptools, if it
    is installed, reads heads of any size into memory."""

    head_timeout_s = 30.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()
        else:
            self._forget_deadline()  # from here on the handler bounds the request

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class AgingConnection(Connection):
    """Closes with an answer once it is old. A balancer in front of several servers distributes connections, not
    requests: a client that always has something to ask would never ask a server that was added."""

    max_age_s = 30.0
    _made_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._made_at = self.loop.time()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_old = self.loop.time() - self._made_at > self.max_age_s
        if is_old and self.cycle is not None and CLOSE_HEADER not in self.cycle.default_headers:
            self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]


class Server(uvicorn.Server):
    """`settings` are passed to uvicorn.Config."""

    def __init__(
        self,
        app: Starlette,
        *,
        on_ready: Callable[[], None] = lambda: None,
        connection: type[Connection] = Connection,
        **settings: Any,
    ) -> None:
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
        super().__init__(uvicorn.Config(app, http=connection, lifespan="on", ws="none", **quiet, **settings))
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Also end connections that were accepted just now, which uvicorn does not know yet."""
        for server in self.servers:
            await close_server(server)
        await super().shutdown(sockets=sockets)


KEEP_ALIVE_S = 60  # longer than clients keep an idle connection (httpx: 5 s): else it may close just as they send
_STOP_S = 1


@contextlib.asynccontextmanager
async def serving(app: Starlette, bound: socket.socket) -> AsyncIterator[None]:
    """Serve on the caller's event loop for the lifetime of the context. ResourceError if it cannot listen: several
    sockets may be bound to one port, but only one can listen."""
    listens = asyncio.Event()
    server = _Beside(app, on_ready=listens.set, timeout_graceful_shutdown=_STOP_S, timeout_keep_alive=KEEP_ALIVE_S)

    async def serve() -> None:
        try:
            await server.serve(sockets=[bound])
        except OSError as error:
            where = address_of(bound)
            bound.close()  # as uvicorn does when it stops
            await server.lifespan.shutdown()
            raise ResourceError(f"cannot listen at {where}: {error.strerror}") from None
        finally:
            listens.set()

    task = asyncio.create_task(serve(), name="http")
    try:
        await listens.wait()
        if not server.started:
            await task
        yield
    finally:
        server.should_exit = True
        await task


class _Beside(Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the main program, which stops this server itself."""
        yield
