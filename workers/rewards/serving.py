"""Running the reward server: load the model, and serve until SIGTERM or Ctrl-C.

These end it in order: no new connections, what was asked is answered, then the process leaves.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from streamrl.config import schema
from workers.rewards.batcher import Batcher
from workers.rewards.server import RewardApp

if TYPE_CHECKING:
    from workers.rewards.model import Dtype

STOP_TIMEOUT_S = 10


def build_app(
    settings: schema.RewardServer, *, dtype: Dtype, threads: int | None, token: str | None, trust_remote_code: bool
) -> Starlette:
    """Load the model, which takes its time, and build the application around it."""
    from workers.rewards.model import RewardModel, Scoring, prepare_process  # torch: only where a model is served

    prepare_process(threads)
    model = RewardModel.load(
        settings.model,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        scoring=Scoring(
            pool=settings.pool,
            attribute_weights=settings.attribute_weights,
            mean=settings.reward_mean,
            std=settings.reward_std,
        ),
    )
    batcher = Batcher(model, max_delay_s=settings.max_delay_ms / 1000, max_batch_tokens=settings.max_batch_tokens)
    return RewardApp(model, batcher, token=token).asgi()


class _Server(uvicorn.Server):
    """uvicorn, saying when it really listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()


def run(app: Starlette, bound: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, and return."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="on", ws="none", timeout_graceful_shutdown=STOP_TIMEOUT_S
    )
    # uvicorn ends on these signals, then raises them again for whoever had them before: an orderly end is exit code 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    asyncio.run(_Server(config, on_ready).serve(sockets=[bound]))
