"""uvicorn as all servers of this house run it: on a port that is taken already, silent, saying when it really listens,
and bounded in what a connection may send, or keep waiting for, before it has asked for anything.

starlette and uvicorn are needed where this is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from streamrl.errors import ResourceError
from streamrl.process import address_of


class Connection(H11Protocol):
    """Closed when a request's head is not whole in time. h11 takes heads of 16 KB at most; the other parser, httptools,
    where it is installed, takes any into memory."""

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
            self._forget_deadline()  # what follows is bounded by who answers

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


class Server(uvicorn.Server):
    """`settings` are those of uvicorn.Config."""

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


@contextlib.asynccontextmanager
async def serving(app: Starlette, bound: socket.socket, *, stop_s: int = 1) -> AsyncIterator[None]:
    """On the event loop of whoever has other things to do, while the context lasts. ResourceError where it cannot
    listen: of two that are bound to a port, before either listens, one can."""
    listens = asyncio.Event()
    server = _Beside(app, on_ready=listens.set, timeout_graceful_shutdown=stop_s)

    async def serve() -> None:
        try:
            await server.serve(sockets=[bound])
        except OSError as error:
            where = address_of(bound)
            bound.close()  # as uvicorn does at its end
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
        """Signals are for who runs it, and ends this server in its own time."""
        yield
