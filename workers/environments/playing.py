"""What plays a run's rollouts, chosen and started: the turns of an environment, or an agent with sessions. And the
account of these rollouts: failures, and the time spent in the model and in the environment."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from streamrl.config import schema
from streamrl.errors import ConfigError, SampleError
from streamrl.permissions import Permissions
from streamrl.protocol.wire.ticket import Ticket
from streamrl.workers.engines.base import Engine, SampleRequest
from streamrl.workers.engines.model import ModelFacts
from streamrl.workers.environments.own import OwnEnvironment, build_children
from streamrl.workers.environments.play import Player
from streamrl.workers.environments.tail import Tail
from streamrl.workers.sessions.trace import Played

LOOPBACK = ("127.0.0.1", 0)
_MIN_WEIGHT = 0.05  # the least weight of the newest rollout in an average
_LATELY = 100  # rollouts
_MAX_ERROR_CHARS = 200


class Plays(Protocol):
    async def play(self, ticket: Ticket, engine: Engine, request: SampleRequest) -> Played:
        """Play one rollout. SampleError concerns this rollout, EngineError all; RewardOutage is not its fault."""
        ...

    def outage(self) -> str | None:
        """Why no rollout can be played now."""
        ...


@contextlib.asynccontextmanager
async def playing(
    config: schema.Config, permissions: Permissions, model: ModelFacts, address: tuple[str, int] = LOOPBACK
) -> AsyncIterator[Plays | None]:
    """Yield a started player, or None if samples are single answers. Sessions are served at `address`."""
    settings = config.environment
    if settings is None:
        yield None
        return
    tail = Tail(model.tokenizer, date=config.data.date)
    if settings.target is None:
        from streamrl.workers.environments.remote import build_remote  # lazy: imports httpx

        remote = build_remote(settings, permissions)
        try:
            yield Player(remote, tail=tail, settings=settings)
        finally:
            await remote.close()
        return
    children = build_children(settings, permissions)
    try:
        await children.start()
        if not children.has_agent:
            yield Player(OwnEnvironment(children), tail=tail, settings=settings)
            return
        if not settings.network and ":" in address[0] and address[0] != "::":
            raise ConfigError(
                f"--sessions [{address[0]}]: an agent without a network reaches its session over IPv4 only; give an "
                "IPv4 address, or set environment.network: true"
            )
        from streamrl.workers.environments.agents import AgentPlayer  # lazy: imports starlette and uvicorn
        from streamrl.workers.sessions.session import Model
        from streamrl.workers.sessions.sessions import Sessions
        from streamrl.workers.sessions.tool_calls import make_parser

        with contextlib.closing(_Thread()) as thread:
            sessions = Sessions(
                Model(
                    facts=model,
                    parse=make_parser(settings.tool_parser, model.tokenizer),
                    settings=settings,
                    date=config.data.date,
                    max_length=min(config.data.max_prompt_tokens + settings.max_tokens, model.max_positions or 1 << 30),
                    thread=thread,
                )
            )
            async with sessions.listening(*address):
                children.reach(sessions.address)
                player = AgentPlayer(children, sessions, settings=settings)
                try:
                    yield player
                finally:
                    await player.close()
    finally:
        await children.close()


class _Thread(ThreadPoolExecutor):
    def __init__(self) -> None:
        super().__init__(max_workers=1, thread_name_prefix="conversations")

    def close(self) -> None:
        self.shutdown(wait=False, cancel_futures=True)


class Account:
    """Statistics of a worker's multi-turn rollouts."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: dict[object, float] = {}  # start times of running rollouts
        self._num_played = self._num_failed = 0
        self._failed_lately: deque[bool] = deque(maxlen=_LATELY)
        self._model_s = self._environment_s = 0.0  # per rollout, moving averages
        self._error = ""  # of the last failed rollout

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        rollout = object()
        self._began[rollout] = self._clock()
        try:
            yield
        except SampleError as error:
            self._num_failed += 1
            self._failed_lately.append(True)
            self._error = str(error)[:_MAX_ERROR_CHARS]
            raise
        finally:
            del self._began[rollout]

    def played(self, played: Played) -> None:
        self._num_played += 1
        self._failed_lately.append(False)
        share = max(_MIN_WEIGHT, 1 / self._num_played)
        self._model_s += share * (played.model_s - self._model_s)
        self._environment_s += share * (played.environment_s - self._environment_s)

    def facts(self) -> dict[str, int | float | str]:
        """`scored`, `failed` and `latency_s` have the names that reward sources use."""
        return {
            "scored": self._num_played,
            "failed": self._num_failed,
            "ended_lately": len(self._failed_lately),
            "failed_lately": sum(self._failed_lately),
            "latency_s": round(self._environment_s, 4),
            "model_s": round(self._model_s, 4),
            "under_way": len(self._began),
            "oldest_s": round(self._clock() - min(self._began.values(), default=math.inf), 1) if self._began else 0.0,
            "error": self._error,
        }
