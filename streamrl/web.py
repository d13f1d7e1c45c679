"""uvicorn as all servers of this house run it: on a port that is taken already, silent, saying when it really listens,
and reading requests by a parser that bounds their heads.

starlette and uvicorn are needed where this is imported.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette


class Server(uvicorn.Server):
    """`settings` are those of uvicorn.Config."""

    def __init__(self, app: Starlette, *, on_ready: Callable[[], None] = lambda: None, **settings: Any) -> None:
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
        # The other parser, httptools, where it is installed, takes headers of any size into memory.
        super().__init__(uvicorn.Config(app, http="h11", lifespan="on", ws="none", **quiet, **settings))
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()
