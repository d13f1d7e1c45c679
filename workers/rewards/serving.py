"""Running the reward server: load the model, and serve until SIGTERM or Ctrl-C.

These end it in order: no new connections, what was asked is answered, then the process leaves. Whose scores take longer
than `STOP_TIMEOUT_S`, or until another such signal, is told to ask elsewhere.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from streamrl.config import schema
from streamrl.web import Server
from streamrl.workers.rewards.batcher import Batcher
from streamrl.workers.rewards.server import RewardApp

if TYPE_CHECKING:
    from streamrl.workers.rewards.model import Dtype

STOP_TIMEOUT_S = 10
_LEAVE_TIMEOUT_S = 5  # for a caller to take its answer
_KEEP_ALIVE_S = 60  # longer than callers keep an idle connection (httpx: 5 s): else it may close just as they ask


def build_app(
    settings: schema.RewardServer, *, dtype: Dtype, threads: int | None, token: str | None, trust_remote_code: bool
) -> RewardApp:
    """Load the model, which takes its time, and build the application around it."""
    from streamrl.workers.rewards.model import RewardModel, prepare_process  # torch: only where a model is served

    prepare_process(threads)
    model = RewardModel.load(settings, dtype=dtype, trust_remote_code=trust_remote_code)
    batcher = Batcher(model, max_delay_s=settings.max_delay_ms / 1000, max_batch_tokens=settings.max_batch_tokens)
    return RewardApp(model, batcher, token=token)


class _Server(Server):
    """It ends without an error for anybody."""

    def __init__(self, app: RewardApp, on_ready: Callable[[], None]) -> None:
        super().__init__(
            app.asgi(),
            on_ready=on_ready,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_TIMEOUT_S + _LEAVE_TIMEOUT_S,
        )
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would raise the signal again in the end, and an orderly end is exit code 0.
        if self.should_exit:
            self._app.give_up()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        giving_up = asyncio.get_running_loop().call_later(STOP_TIMEOUT_S, self._app.give_up)
        await super().shutdown(sockets=sockets)
        giving_up.cancel()


def run(app: RewardApp, bound: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, and return."""
    asyncio.run(_Server(app, on_ready).serve(sockets=[bound]))
